// Chunks of weights and tokens on their way through shared memory, and the products of one chunk. Weights are the left
// operand of the matrix instructions, so a few tokens waste little of them: the 128 weight rows of a tile are 16 a warp.
#pragma once
#include "moe/rows.cuh"
#include "moe/tiles.cuh"
#include "moe/weight_formats.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/matrix.cuh"
#include "primitives/shared.cuh"

namespace nvep {

constexpr u32 kGatherThreads = 256;
constexpr u32 kTileWeightRows = 128;
constexpr u32 kStages = 4;
constexpr u32 kChunkUnits = 8;  // of 16 bytes, in a chunk of a weight row

// Rows are 128 bytes: all banks. Every other row swaps its halves, so that the eight threads of a load phase, two rows and
// four units of each, meet eight different groups of banks.
__device__ __forceinline__ u32 weight_slot(u32 row, u32 unit) {
  return row * kChunkUnits + (unit ^ ((row & 1u) << 2));
}

// Of a token's units of eight elements, those that one thread takes together lie in different halves.
template <u32 kParts>
__device__ __forceinline__ u32 token_slot(u32 token, u32 unit) {
  const u32 place = (unit % kParts) * kChunkUnits + unit / kParts;
  return token * kChunkUnits * kParts + (place ^ ((token & 1u) << 2));
}

template <class Problem>
struct Ring {
  using Weights = typename Problem::Weights;
  using Rows = typename Problem::Rows;
  static constexpr u32 kGroups = Problem::kTileTokens / 8;  // of eight tokens
  static constexpr u32 kWeightSlots = kTileWeightRows * kChunkUnits;
  static constexpr u32 kTokenUnits = kChunkUnits * Weights::kParts;
  static constexpr u32 kTokenSlots = Problem::kTileTokens * kTokenUnits;
  static constexpr u32 kStageSlots = kWeightSlots + kTokenSlots;
  static constexpr u32 kWeightCopies = kWeightSlots / kGatherThreads, kTokenCopies = kTokenSlots / kGatherThreads;
  static_assert(kWeightSlots % kGatherThreads == 0 && kTokenSlots % kGatherThreads == 0, "copies a thread");

  uint4* slots;
  float (*scales)[2];  // of a stage's weights: first and second eight rows of a warp
  RowSource source;
  u64 weight_rows[kWeightCopies];
  u32 token_rows[kTokenCopies];
  typename Rows::Pending pending[kTokenCopies];

  __device__ __forceinline__ uint4* stage(u32 number) { return slots + number % kStages * kStageSlots; }

  template <class Arguments>
  __device__ __forceinline__ void locate(const Arguments& a, const TileOffsets& offsets, const Cursor<Problem>& at) {
#pragma unroll
    for (u32 i = 0; i < kWeightCopies; ++i) {
      weight_rows[i] = Problem::weight_row(a, at, (threadIdx.x + kGatherThreads * i) / kChunkUnits);
    }
#pragma unroll
    for (u32 i = 0; i < kTokenCopies; ++i) {
      const u32 token = (threadIdx.x + kGatherThreads * i) / kTokenUnits;
      token_rows[i] = token < at.tokens ? Problem::token_row(a, offsets, at, token) : kNoPosition;
    }
  }

  // Starts the copies of the chunk at `at`. Tokens beyond the tile's are left as they are: their columns go nowhere.
  template <class Arguments>
  __device__ __forceinline__ void fetch(const Arguments& a, const TileOffsets& offsets, const Cursor<Problem>& at,
                                        u32 number) {
    if (at.moved) locate(a, offsets, at);
    uint4* to = stage(number);
#pragma unroll
    for (u32 i = 0; i < kWeightCopies; ++i) {
      const u32 slot = threadIdx.x + kGatherThreads * i, unit = slot % kChunkUnits;
      const u32 byte = (at.chunk * kChunkUnits + unit) * 16;
      const bool inside = weight_rows[i] != 0 && byte < Problem::kInner * Weights::kElementBytes;
      const u64 from = inside ? weight_rows[i] + byte : Problem::any_weight(a);
      async_copy_16(to + weight_slot(slot / kChunkUnits, unit), reinterpret_cast<const void*>(from), inside);
    }
#pragma unroll
    for (u32 i = 0; i < kTokenCopies; ++i) {
      if (token_rows[i] == kNoPosition) continue;
      const u32 slot = threadIdx.x + kGatherThreads * i, unit = slot % kTokenUnits;
      const u32 element = at.chunk * Weights::kChunk + unit * 8;
      uint4* shared = to + kWeightSlots + token_slot<Weights::kParts>(slot / kTokenUnits, unit);
      Rows::fetch(pending[i], shared, source, token_rows[i], element, element < Problem::kInner);
    }
    if (Weights::kScaleBlock && threadIdx.x < 2) {
      async_copy_4(&scales[number % kStages][threadIdx.x], Problem::weight_scale(a, at, threadIdx.x));
    }
  }

  // Behind `fetch` of the same chunk: what was not copied asynchronously goes to shared memory.
  __device__ __forceinline__ void settle(u32 number) {
#pragma unroll
    for (u32 i = 0; i < kTokenCopies; ++i) {
      if (token_rows[i] == kNoPosition) continue;
      const u32 slot = threadIdx.x + kGatherThreads * i;
      uint4* shared =
          stage(number) + kWeightSlots + token_slot<Weights::kParts>(slot / kTokenUnits, slot % kTokenUnits);
      Rows::settle(pending[i], shared);
    }
  }

  // Adds the products of a stage to the sums of the first kUsed groups of tokens.
  template <u32 kUsed>
  __device__ __forceinline__ void multiply(u32 number, float (&sum)[kGroups][4]) {
    const uint4* from = stage(number);
    const u32 lane = threadIdx.x & 31u, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 * 16 + g;
    float chunk[kUsed][4] = {};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const uint4 upper = from[weight_slot(row, 4 * half + t)], lower = from[weight_slot(row + 8, 4 * half + t)];
#pragma unroll
      for (u32 part = 0; part < Weights::kParts; ++part) {
        const uint4 a = Weights::part(upper, part), b = Weights::part(lower, part);
        const u32 first[4] = {a.x, b.x, a.y, b.y}, second[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
        for (u32 j = 0; j < kUsed; ++j) {
          const u32 unit = Weights::kParts * (4 * half + t) + part;
          const uint4 v = from[kWeightSlots + token_slot<Weights::kParts>(8 * j + g, unit)];
          const u32 front[2] = {v.x, v.y}, back[2] = {v.z, v.w};
          float (&d)[4] = Weights::kScaleBlock ? chunk[j] : sum[j];
          multiply_bf16(d, first, front);
          multiply_bf16(d, second, back);
        }
      }
    }
    if (!Weights::kScaleBlock) return;
    const float* scale = scales[number % kStages];
#pragma unroll
    for (u32 j = 0; j < kUsed; ++j) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) sum[j][i] = __fmaf_rn(scale[i / 2], chunk[j][i], sum[j][i]);
    }
  }

  __device__ __forceinline__ void multiply(u32 number, u32 tokens, float (&sum)[kGroups][4]) {
    if (tokens <= 8) return multiply<1>(number, sum);
    if (tokens <= 16) return multiply<2>(number, sum);
    if (tokens <= 32 || kGroups == 4) return multiply<4>(number, sum);
    multiply<kGroups>(number, sum);
  }
};

}  // namespace nvep
