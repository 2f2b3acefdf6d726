// How expert matrices are stored, and how their fragments reach the matrix instructions. A row's 128 bytes of a chunk are
// eight units of 16; the thread t of a quad takes units t and t + 4 and with them the same elements of a token.
#pragma once
#include "formats/elements.cuh"
#include "primitives/convert_small.cuh"

namespace nvep {

struct WeightBf16 {
  static constexpr u32 kElementBytes = 2;
  static constexpr u32 kChunk = 64;  // elements: 128 bytes
  static constexpr u32 kParts = 1;   // groups of eight elements in a unit
  static constexpr u32 kTileTokens = 64;
  static constexpr u32 kScaleBlock = 0;

  // Elements 8 * part to 8 * part + 7 of a unit, as bf16.
  __device__ __forceinline__ static uint4 part(const uint4& unit, u32) { return unit; }
};

// e4m3, all finite, with a float32 scale for each block of 128 x 128, applied to sums over a chunk.
struct WeightFp8Block {
  static constexpr u32 kElementBytes = 1;
  static constexpr u32 kChunk = 128;
  static constexpr u32 kParts = 2;
  static constexpr u32 kTileTokens = 32;
  static constexpr u32 kScaleBlock = 128;

  __device__ __forceinline__ static uint4 part(const uint4& unit, u32 which) {
    const uint2 low = e4m3x4_to_bf16x4(which ? unit.z : unit.x), high = e4m3x4_to_bf16x4(which ? unit.w : unit.y);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
};

}  // namespace nvep
