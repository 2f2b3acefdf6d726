// bf16 and fp16 rows: no scales, one rounding to nearest even; infinities and NaN stay what they are.
//
// Every payload format is a struct like these. A unit is eight encoded elements. `encode` is called by all lanes of a
// warp together, each with one unit, those of a block side by side; `decode` by any thread alone. Elements that are not
// finite take no part in choosing a scale.
//   kBlock       elements that share a scale, a power of two from 8 to 256
//   Unit         how a unit is stored
//   Scale        how a scale is stored; kScaleBytes is 0 where there is none
#pragma once
#include "formats/elements.cuh"

namespace nvep {

template <class Elements>
struct Payload16 {
  static constexpr u32 kBlock = kUnitElements;
  static constexpr u32 kScaleBytes = 0;
  using Unit = uint4;
  using Scale = u8;

  __device__ __forceinline__ static Unit encode(const float (&x)[kUnitElements], float, Scale&) {
    return Elements::pack(x);
  }
  __device__ __forceinline__ static void decode(const Unit& unit, Scale, float, float (&x)[kUnitElements]) {
    Elements::unpack(unit, x);
  }
  __device__ __forceinline__ static Unit padding() { return make_uint4(0, 0, 0, 0); }
};

using PayloadBf16 = Payload16<ElementsBf16>;

}  // namespace nvep
