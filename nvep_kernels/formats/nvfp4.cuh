// nvfp4: e2m1 in blocks of 16, two elements a byte with the first in the low bits, an e4m3 scale for each block and one
// float32 scale, chosen beforehand, for all rows: value = element * block scale * tensor scale. e2m1 has no NaN, so a
// block with an element that is not finite gets the scale NaN, and with it all of its elements.
#pragma once
#include "formats/scales.cuh"

namespace nvep {

struct PayloadNvfp4 {
  static constexpr u32 kBlock = 16;
  using Unit = u32;
  using Scale = u8;
  static constexpr u32 kScaleBytes = 1;

  __device__ __forceinline__ static Unit encode(const float (&x)[kUnitElements], float tensor_scale, Scale& scale) {
    const float inverse = inverse_tensor_scale(tensor_scale);
    bool finite = is_finite(inverse);
#pragma unroll
    for (u32 i = 0; i < kUnitElements; ++i) finite &= is_finite(x[i]);
    const u32 good = __shfl_xor_sync(0xffffffffu, static_cast<u32>(finite), 1) & static_cast<u32>(finite);
    const float largest = block_maximum<kBlock>(x);
    const u8 wanted = float_to_e4m3(__fdiv_rn(__fmul_rn(largest, inverse), kE2m1Max));
    scale = good ? wanted : static_cast<u8>(0x7f);
    if (!good || wanted == 0) return 0;
    const float block_inverse = __fdiv_rn(1.0f, e4m3_to_float(scale));
    u32 unit = 0;
#pragma unroll
    for (u32 i = 0; i < kUnitElements; ++i) {
      unit |= float_to_e2m1(__fmul_rn(__fmul_rn(x[i], inverse), block_inverse)) << (4 * i);
    }
    return unit;
  }

  __device__ __forceinline__ static void decode(const Unit& unit, Scale scale, float tensor_scale,
                                                float (&x)[kUnitElements]) {
    const float both = __fmul_rn(e4m3_to_float(scale), tensor_scale);
#pragma unroll
    for (u32 i = 0; i < kUnitElements; ++i) x[i] = __fmul_rn(e2m1_to_float(unit >> (4 * i)), both);
  }
  __device__ __forceinline__ static Unit padding() { return 0; }
};

}  // namespace nvep
