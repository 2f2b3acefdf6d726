// One error for each sanitizer to find, chosen by `mode`, and correct twins of those about order. Two blocks.
#include "primitives/memory.cuh"
#include "primitives/shared.cuh"
#include "primitives/time.cuh"

using namespace nvep;

// As in planted.py.
constexpr u32 kOutside = 1, kUndefined = 2, kAcquire = 3, kNoAcquire = 4, kBarrier = 5, kNoBarrier = 6;
constexpr u32 kMessage = 7;

struct PlantedShared {
  u32 words[64];
};

// Block 0 posts data and then a flag, block 1 reads them.
__device__ inline void pass_on(u32* words, u32* flag, bool acquires) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    store_weak(words, kMessage);
    fence_acq_rel_system();
    store_relaxed_system(flag, 1u);
  } else {
    while ((acquires ? load_acquire_system(flag) : load_relaxed_system(flag)) == 0u) spin_pause();
    store_weak(words + 1, load_weak(words));
  }
}

__device__ inline void mirror(u32* words, bool barrier) {
  NVEP_SHARED(PlantedShared, shared);
  shared.words[threadIdx.x] = threadIdx.x;
  if (barrier) __syncthreads();
  if (blockIdx.x == 0) store_weak(words + threadIdx.x, shared.words[blockDim.x - 1 - threadIdx.x]);
}

extern "C" __global__ void planted(const __grid_constant__ PlantedArguments arguments) {
  switch (arguments.mode) {
    case kOutside:
      if (blockIdx.x == 0 && threadIdx.x == 0) store_weak(arguments.words + arguments.count, 1u);
      break;
    case kUndefined:
      store_weak(reinterpret_cast<i32*>(arguments.words), static_cast<i32>(arguments.count) + 0x7fffffff);
      break;
    case kAcquire:
    case kNoAcquire:
      pass_on(arguments.words, arguments.flag, arguments.mode == kAcquire);
      break;
    default:
      mirror(arguments.words, arguments.mode == kBarrier);
  }
}
