// Scales of blocks: the largest magnitude of a block, and how a scale is kept.
#pragma once
#include "formats/elements.cuh"
#include "primitives/convert_small.cuh"

namespace nvep {

constexpr float kE4m3Max = 448.0f;
constexpr float kE2m1Max = 6.0f;
constexpr float kSmallestScale = 0x1p-126f;  // its inverse is finite, and a block of zeros needs no case of its own
constexpr float kLargestTensorScale = 0x1p126f;

// Largest finite magnitude of the block that kBlock / 8 neighbouring lanes hold. All lanes of the warp call it.
template <u32 kBlock>
__device__ __forceinline__ float block_maximum(const float (&x)[kUnitElements]) {
  u32 largest = 0;  // magnitudes compare like their bits
#pragma unroll
  for (u32 i = 0; i < kUnitElements; ++i) {
    if (is_finite(x[i])) largest = max(largest, float_to_bits(x[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (u32 lanes = kBlock / kUnitElements / 2; lanes > 0; lanes /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, static_cast<int>(lanes)));
  }
  return bits_to_float(largest);
}

struct ScaleFp32 {
  using Stored = float;
  __device__ __forceinline__ static Stored of(float scale) { return scale; }
  __device__ __forceinline__ static float widen(Stored v) { return v; }
};

// The power of two at or above, so that nothing saturates.
struct ScaleUe8m0 {
  using Stored = u8;
  __device__ __forceinline__ static Stored of(float scale) { return float_to_ue8m0(scale); }
  __device__ __forceinline__ static float widen(Stored v) { return ue8m0_to_float(v); }
};

// 1 / scale of a whole tensor, or NaN, which every element then becomes, if the scale is not usable.
__device__ __forceinline__ float inverse_tensor_scale(float scale) {
  const bool usable = scale >= kSmallestScale && scale <= kLargestTensorScale;
  return usable ? __fdiv_rn(1.0f, scale) : bits_to_float(0x7fffffffu);
}

}  // namespace nvep
