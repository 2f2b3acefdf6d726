// Waits for `flag` to reach a value, then reads what was released with it.
#include "primitives/memory.cuh"
#include "primitives/time.cuh"

using namespace nvep;

extern "C" __global__ void wait_word(const __grid_constant__ WordArguments arguments) {
  if (threadIdx.x == 0) {
    const u64 start = global_timer_ns();
    while (load_acquire_system(arguments.flag) < arguments.value) {
      if (global_timer_ns() - start > arguments.deadline_ns) break;
      spin_pause();
    }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < arguments.words; i += blockDim.x) {
    store_weak(arguments.to + i, load_weak(arguments.from + i));
  }
}
