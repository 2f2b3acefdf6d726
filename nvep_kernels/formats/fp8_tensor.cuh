// e4m3 with one scale, chosen beforehand, for all rows: value = element * scale. Values beyond 448 * scale saturate.
#pragma once
#include "formats/fp8_block.cuh"

namespace nvep {

struct PayloadFp8Tensor {
  static constexpr u32 kBlock = kUnitElements;
  static constexpr u32 kScaleBytes = 0;
  using Unit = u64;
  using Scale = u8;

  __device__ __forceinline__ static Unit encode(const float (&x)[kUnitElements], float tensor_scale, Scale&) {
    return pack_e4m3(x, inverse_tensor_scale(tensor_scale));
  }
  __device__ __forceinline__ static void decode(const Unit& unit, Scale, float tensor_scale,
                                                float (&x)[kUnitElements]) {
    unpack_e4m3(unit, tensor_scale, x);
  }
  __device__ __forceinline__ static Unit padding() { return 0; }
};

}  // namespace nvep
