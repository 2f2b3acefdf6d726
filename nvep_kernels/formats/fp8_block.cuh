// e4m3 with one scale for each block of neighbouring elements: value = element * scale. The last block of a row may be
// short. Elements that are not finite become NaN.
#pragma once
#include "formats/scales.cuh"

namespace nvep {

// What an element is converted from: NaN if it is not finite, so that an infinity does not saturate.
__device__ __forceinline__ float scaled_or_nan(float x, float inverse) {
  return is_finite(x) ? __fmul_rn(x, inverse) : bits_to_float(0x7fffffffu);
}

// Eight e4m3 of x * inverse.
__device__ __forceinline__ u64 pack_e4m3(const float (&x)[kUnitElements], float inverse) {
  u64 unit = 0;
#pragma unroll
  for (u32 i = 0; i < kUnitElements / 2; ++i) {
    const float low = scaled_or_nan(x[2 * i], inverse), high = scaled_or_nan(x[2 * i + 1], inverse);
    unit |= static_cast<u64>(float2_to_e4m3x2(low, high)) << (16 * i);
  }
  return unit;
}

__device__ __forceinline__ void unpack_e4m3(u64 unit, float scale, float (&x)[kUnitElements]) {
#pragma unroll
  for (u32 i = 0; i < kUnitElements / 2; ++i) {
    const float2 pair = e4m3x2_to_float2(static_cast<u16>(unit >> (16 * i)));
    x[2 * i] = __fmul_rn(pair.x, scale);
    x[2 * i + 1] = __fmul_rn(pair.y, scale);
  }
}

template <u32 kElements, class StoredScale>
struct PayloadFp8Block {
  static constexpr u32 kBlock = kElements;
  using Unit = u64;
  using Scale = typename StoredScale::Stored;
  static constexpr u32 kScaleBytes = sizeof(Scale);

  __device__ __forceinline__ static Unit encode(const float (&x)[kUnitElements], float, Scale& scale) {
    const float wanted = __fdiv_rn(block_maximum<kBlock>(x), kE4m3Max);
    scale = StoredScale::of(wanted < kSmallestScale ? kSmallestScale : wanted);
    return pack_e4m3(x, __fdiv_rn(1.0f, StoredScale::widen(scale)));
  }
  __device__ __forceinline__ static void decode(const Unit& unit, Scale scale, float, float (&x)[kUnitElements]) {
    unpack_e4m3(unit, StoredScale::widen(scale), x);
  }
  __device__ __forceinline__ static Unit padding() { return 0; }
};

using PayloadFp8Block128 = PayloadFp8Block<128, ScaleFp32>;
using PayloadFp8Block128Ue8m0 = PayloadFp8Block<128, ScaleUe8m0>;

}  // namespace nvep
