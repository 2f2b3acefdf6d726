// Copies and then releases `flag`; the mirror image of wait_word.
#include "primitives/memory.cuh"

using namespace nvep;

extern "C" __global__ void post_word(const __grid_constant__ WordArguments arguments) {
  for (u32 i = threadIdx.x; i < arguments.words; i += blockDim.x) {
    store_weak(arguments.to + i, load_weak(arguments.from + i));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_acq_rel_system();
    store_release_system(arguments.flag, arguments.value);
  }
}
