// A projection of all local experts over rows gathered by index. Each block walks through its units with loads always
// kStages - 1 chunks ahead, across units; a tile that several blocks share is finished by the last of them, which adds the
// segments in order.
#pragma once
#include "moe/ring.cuh"
#include "primitives/launch.cuh"

namespace nvep {

struct GatherShared {
  TileOffsets offsets;
  float scales[kStages][2];
  u32 last;             // this block completed a tile
  u32 last_tokens[64];  // ... and these rows
};

template <class Problem>
struct Sums {
  static constexpr u32 kGroups = Problem::kTileTokens / 8;
  float of[kGroups][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 j = 0; j < kGroups; ++j) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) of[j][i] = 0.0f;
    }
  }
  __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
    for (u32 j = 0; j < kGroups; ++j) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) of[j][i] = __fadd_rn(of[j][i], other.of[j][i]);
    }
  }

  // A slot is for one segment of one block; slot 0 of a block for the sum of a tile's first segments.
  __device__ __forceinline__ static uint4* slot(u64 slots, u32 block, u32 segment) {
    return reinterpret_cast<uint4*>(slots) +
           (static_cast<u64>(block) * kMaxSegments + segment) * kGroups * kGatherThreads + threadIdx.x;
  }
  __device__ __forceinline__ void store(uint4* to, u32 tokens) const {
#pragma unroll
    for (u32 j = 0; j < kGroups; ++j) {
      if (8 * j >= tokens) return;
      const float* v = of[j];
      const uint4 bits = make_uint4(float_to_bits(v[0]), float_to_bits(v[1]), float_to_bits(v[2]), float_to_bits(v[3]));
      store_weak(to + j * kGatherThreads, bits);
    }
  }
  __device__ __forceinline__ void add_stored(const uint4* from, u32 tokens) {
#pragma unroll
    for (u32 j = 0; j < kGroups; ++j) {
      if (8 * j >= tokens) return;
      const uint4 bits = load_weak(from + j * kGatherThreads);
      const u32 word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) of[j][i] = __fadd_rn(of[j][i], bits_to_float(word[i]));
    }
  }
};

// True in all threads of the block whose segments were the last that the tile needed. What all blocks stored is visible.
__device__ inline bool arrive(GatherShared& shared, u32* counter, u32 segments, u32 needed) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = fetch_add_acq_rel_device(counter, segments) + segments == needed;
    if (shared.last) store_weak(counter, 0u);  // for the next step
  }
  __syncthreads();
  return shared.last != 0;
}

template <class Problem, class Arguments>
struct Gather {
  const Arguments& a;
  GatherShared& shared;
  Share share;
  Sums<Problem> sum, total;
  u32 first_segment;  // of this block in the tile

  // A segment of this block is complete.
  __device__ __forceinline__ void fold(const Cursor<Problem>& at) {
    if (at.segment == 0) {
      total.clear();
      total.add(sum);
    } else if (first_segment == 0) {
      total.add(sum);
    } else {
      sum.store(Sums<Problem>::slot(a.slots, blockIdx.x, at.segment), at.tokens);
    }
  }

  // The block leaves a tile.
  __device__ __forceinline__ void leave(const Cursor<Problem>& at) {
    const bool whole = first_segment == 0 && at.ends_tile();
    if (!whole) {
      if (first_segment == 0) total.store(Sums<Problem>::slot(a.slots, blockIdx.x, 0), at.tokens);
      u32* counter = reinterpret_cast<u32*>(a.tile_counters) + at.tile;
      if (!arrive(shared, counter, at.segment + 1 - first_segment, Problem::kSegments)) return;
      collect(at);
    }
    Problem::finish(a, shared, at, total.of);
  }

  __device__ __forceinline__ void collect(const Cursor<Problem>& at) {
    const u32 first_unit = at.tile * Problem::kSegments;
    const u32 opener = share.owner_of(first_unit);
    const u32 opened = share.first_of(opener + 1) - first_unit;
    total.clear();
    total.add_stored(Sums<Problem>::slot(a.slots, opener, 0), at.tokens);
    for (u32 segment = opened; segment < Problem::kSegments; ++segment) {
      total.add_stored(Sums<Problem>::slot(a.slots, share.owner_of(first_unit + segment), segment), at.tokens);
    }
  }

  __device__ __forceinline__ void run(uint4* slots, const RowSource& source) {
    const TileOffsets& offsets = shared.offsets;
    const u32 begin = share.first_of(blockIdx.x), end = share.first_of(blockIdx.x + 1);
    Ring<Problem> ring;
    ring.slots = slots;
    ring.scales = shared.scales;
    ring.source = source;
    Cursor<Problem> ahead, at;
    ahead.start(offsets, begin, end);
    at.start(offsets, begin, end);
    for (u32 number = 0; number < kStages - 1; ++number) {
      if (!ahead.done()) {
        ring.fetch(a, offsets, ahead, number);
        ring.settle(number);
        ahead.next(offsets);
      }
      async_commit();
    }
    sum.clear();
    first_segment = at.segment;
    for (u32 number = 0; !at.done(); ++number) {
      async_wait<kStages - 2>();
      __syncthreads();  // chunk `number` is there for all, and nobody reads the stage before it any more
      const bool loads = !ahead.done();
      if (loads) ring.fetch(a, offsets, ahead, number + kStages - 1);
      async_commit();
      ring.multiply(number, at.tokens, sum.of);
      if (loads) {
        ring.settle(number + kStages - 1);
        ahead.next(offsets);
      }
      if (at.ends_segment()) {
        fold(at);
        if (at.ends_tile() || at.unit + 1 == end) {
          leave(at);
          first_segment = 0;
        }
        sum.clear();  // only now: while a tile is finished its registers are needed
      }
      at.next(offsets);
    }
    async_wait<0>();
  }
};

template <class Problem, class Arguments>
__device__ __forceinline__ void gather_tiles(const Arguments& a, GatherShared& shared, char* memory,
                                             const RowSource& source) {
  grid_dependency_launch();
  grid_dependency_wait();  // for the kernel before, which this one may be launched beside
  Problem::fill(shared.offsets, step_plan(a.plan).counts);
  Gather<Problem, Arguments> work = {a, shared, {Problem::units(shared.offsets), gridDim.x}};
  work.run(reinterpret_cast<uint4*>(memory), source);
}

}  // namespace nvep
