// One way per `mode` to break the rules of blocks and warps, or to strain the scheduler.
#include "primitives/memory.cuh"
#include "primitives/shared.cuh"
#include "primitives/time.cuh"
#include "primitives/types.cuh"

using namespace nvep;

struct Half {
  u8 bytes[30000];
};

template <u32 kTag>
__device__ u32 take_half() {
  NVEP_SHARED(Half, half);
  half.bytes[0] = kTag;
  return half.bytes[0];
}

extern "C" __global__ void faults(const __grid_constant__ FaultArguments arguments) {
  const u32 t = threadIdx.x;
  switch (arguments.mode) {
    case 0:  // divergent trip count, then another barrier
      for (u32 i = 0; i < 2 + (t == 5); ++i) __syncthreads();
      __syncthreads();
      break;
    case 1:  // half of the block skips a barrier and waits in another
      if (t < blockDim.x / 2) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case 2:  // two lanes wait for each other with different masks
      if (t == 0) {
        __syncwarp(0x3u);
      } else if (t == 1) {
        __syncwarp(0x7u);
      }
      break;
    case 3:  // a lane that is not in its own mask
      __ballot_sync(0x1u, 1);
      break;
    case 4:  // lanes wait for one that waits at the block's barrier
      if (t == 3) {
        __syncthreads();
      } else {
        __shfl_sync(0xffffffffu, t, 0);
      }
      break;
    case 5:  // 60,000 bytes of shared memory
      arguments.out[t] = take_half<1>() + take_half<2>();
      break;
    case 6:  // the block can never go on although another block only waits
      if (blockIdx.x == 0) {
        while (load_relaxed_system(arguments.out) == 0) spin_pause();
      } else if (t == 0) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      break;
    case 7:  // one block polls through barriers, without a pause, for what another block stores
      if (blockIdx.x == 1) {
        if (t == 0) store_relaxed_system(arguments.out, 1u);
      } else {
        while (!__syncthreads_or(load_relaxed_system(arguments.out) != 0)) {
        }
      }
      break;
    default:
      arguments.out[t] = t;
  }
}
