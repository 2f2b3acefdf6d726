// How the work of a projection is divided. A tile is kTileOutputs outputs of up to kTileTokens rows of one expert; its
// inner dimension is summed in fixed segments, each from zero, added in ascending order. So a result does not depend on
// who computes which segment, on other rows, or on a row's place. A unit is a segment of a tile; each block takes an equal
// stretch of all units.
#pragma once
#include "moe/experts.cuh"

namespace nvep {

constexpr u32 kMaxSegments = 8;

struct TileOffsets {
  u32 tiles[moe::kLocalExperts + 1];  // tiles of lower experts
  u32 pairs[moe::kLocalExperts + 1];  // pairs of lower experts
};

template <u32 kInner, u32 kOutputs_, u32 kTileOutputs_, class Weights>
struct Division {
  static constexpr u32 kOutputs = kOutputs_, kTileOutputs = kTileOutputs_, kTileTokens = Weights::kTileTokens;
  static constexpr u32 kOutputTiles = (kOutputs + kTileOutputs - 1) / kTileOutputs;
  static constexpr u32 kChunks = (kInner + Weights::kChunk - 1) / Weights::kChunk;
  static constexpr u32 kSegmentChunks = (kChunks + kMaxSegments - 1) / kMaxSegments;
  static constexpr u32 kSegments = (kChunks + kSegmentChunks - 1) / kSegmentChunks;

  // All threads of the block; ends with a barrier.
  __device__ static void fill(TileOffsets& offsets, const u32* counts) {
    if (threadIdx.x < 32) {
      u32 tiles = 0, pairs = 0;
      for (u32 base = 0; base < moe::kLocalExperts; base += 32) {
        const u32 expert = base + threadIdx.x;
        const u32 count = expert < moe::kLocalExperts ? load_weak(counts + expert) : 0;
        const u32 token_tiles = (count + kTileTokens - 1) / kTileTokens;
        const u32 tiles_here = tiles + warp_prefix(token_tiles * kOutputTiles, threadIdx.x);
        const u32 pairs_here = pairs + warp_prefix(count, threadIdx.x);
        if (expert < moe::kLocalExperts) {
          offsets.tiles[expert + 1] = tiles_here;
          offsets.pairs[expert + 1] = pairs_here;
        }
        tiles = __shfl_sync(kFullWarp, tiles_here, 31);
        pairs = __shfl_sync(kFullWarp, pairs_here, 31);
      }
      if (threadIdx.x == 0) offsets.tiles[0] = offsets.pairs[0] = 0;
    }
    __syncthreads();
  }

  __device__ static u32 units(const TileOffsets& offsets) { return offsets.tiles[moe::kLocalExperts] * kSegments; }
};

// Units [first_of(b), first_of(b + 1)) are block b's.
struct Share {
  u32 units;
  u32 blocks;
  __device__ __forceinline__ u32 first_of(u32 block) const {
    return static_cast<u32>(static_cast<u64>(units) * block / blocks);
  }
  __device__ __forceinline__ u32 owner_of(u32 unit) const {
    return static_cast<u32>(((static_cast<u64>(unit) + 1) * blocks - 1) / units);
  }
};

// A chunk of a unit; moves forward only.
template <class Division>
struct Cursor {
  u32 unit, end;
  u32 chunk;  // of the inner dimension
  u32 segment, expert, output, token, tokens;
  u32 tile;
  bool moved;  // the tile is not that of the chunk before

  __device__ __forceinline__ bool done() const { return unit >= end; }

  __device__ void start(const TileOffsets& offsets, u32 begin, u32 stop) {
    unit = begin;
    end = stop;
    expert = 0;
    moved = true;
    if (!done()) locate(offsets);
  }

  __device__ void locate(const TileOffsets& offsets) {
    tile = unit / Division::kSegments;
    segment = unit % Division::kSegments;
    chunk = segment * Division::kSegmentChunks;
    while (tile >= offsets.tiles[expert + 1]) ++expert;
    const u32 count = offsets.pairs[expert + 1] - offsets.pairs[expert];
    const u32 token_tiles = (count + Division::kTileTokens - 1) / Division::kTileTokens;
    const u32 inside = tile - offsets.tiles[expert];
    output = inside / token_tiles * Division::kTileOutputs;
    token = inside % token_tiles * Division::kTileTokens;
    tokens = min(count - token, Division::kTileTokens);
  }

  __device__ __forceinline__ bool ends_segment() const {
    return chunk + 1 == min((segment + 1) * Division::kSegmentChunks, Division::kChunks);
  }
  __device__ __forceinline__ bool ends_tile() const { return segment + 1 == Division::kSegments; }

  __device__ __forceinline__ void next(const TileOffsets& offsets) {
    moved = false;
    if (!ends_segment()) {
      ++chunk;
      return;
    }
    moved = ends_tile();
    ++unit;
    if (done()) return;
    if (moved) return locate(offsets);
    ++segment;
    ++chunk;
  }
};

}  // namespace nvep
