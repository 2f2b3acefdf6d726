// Shuffles and votes by every live lane of a mask, results per thread. With `split`, the two halves of a warp
// run in different branches with their own masks. Threads at or beyond `active` return first.
#include "primitives/types.cuh"

using namespace nvep;

constexpr u32 kOutputs = 12;

__device__ void collect(const WarpArguments& a, u32 thread, u32 mask) {
  u32 value = a.values[thread];
  u64 wide = (static_cast<u64>(value) << 32) | ~value;
  u64* out = a.results + thread * kOutputs;
  int width = static_cast<int>(a.width);
  out[0] = __shfl_sync(mask, value, static_cast<int>(value % 32), width);
  out[1] = __shfl_up_sync(mask, static_cast<int>(value), a.delta, width);
  out[2] = __shfl_down_sync(mask, wide, a.delta, width);
  out[3] = __float_as_uint(__shfl_xor_sync(mask, static_cast<float>(value), static_cast<int>(a.delta), width));
  out[4] = __ballot_sync(mask, value & 1);
  out[5] = static_cast<u64>(__any_sync(mask, value == a.values[0]));
  out[6] = static_cast<u64>(__all_sync(mask, value < 900));
  out[7] = __match_any_sync(mask, value % 5);
  out[8] = __match_any_sync(mask, wide);
  __syncwarp(mask);
  out[9] = __activemask() >> (thread % 32) & 1;
  u32 sum = value;
  for (int d = a.split ? 8 : 16; d; d >>= 1) sum += __shfl_xor_sync(mask, sum, d);
  out[10] = sum;
  out[11] = __shfl_sync(mask, value, 0) + 1;
}

extern "C" __global__ void warp_collectives(const __grid_constant__ WarpArguments arguments) {
  u32 thread = threadIdx.x;
  if (thread >= arguments.active) return;
  if (!arguments.split) {
    collect(arguments, thread, 0xffffffffu);
  } else if (thread % 32 < 16) {
    collect(arguments, thread, 0x0000ffffu);
  } else {
    collect(arguments, thread, 0xffff0000u);
  }
}
