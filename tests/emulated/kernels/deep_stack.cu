// Recursion until less than `spare` bytes are left of the 128 KiB of an emulated thread: for the emulated device only.
#include "primitives/types.cuh"

using namespace nvep;

// Takes 4 KiB of stack per level; returns the number of levels.
__device__ __noinline__ u32 sink(u32 value, u32 spare) {
  volatile u32 frame[1024];
  for (u32 i = 0; i < 1024; ++i) frame[i] = value + i;
  const u64 left = reinterpret_cast<u64>(&frame[0]) % 131072;
  return left < spare ? 1 : sink(frame[0], spare) + (frame[1023] == value + 1023);
}

extern "C" __global__ void deep_stack(const __grid_constant__ StackArguments arguments) {
  arguments.out[threadIdx.x] = sink(threadIdx.x, arguments.spare);
}
