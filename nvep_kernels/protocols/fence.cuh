// Fence: data is pushed straight into exposed buffers; one record per (source, step), stored after one system fence, says
// that all of it is there.
#pragma once
#include "protocols/lane.cuh"

namespace nvep {

struct Fence {
  static constexpr u32 kCode = 1;
  static constexpr bool kAcquires = true;

  // Every block calls this once after its stores. Block barrier, one acquire-release increment per block at GPU
  // scope, and in the last block one system fence: by cumulativity that fence covers the stores of every block.
  // `word(rank)` then gives the word for each unmasked peer and `where(rank)` its address. Returns true in the one
  // thread that announced.
  template <class Word, class Where>
  __device__ static bool announce_blocks(u32* arrivals, const RankSet& active, Word word, Where where) {
    __syncthreads();
    if (threadIdx.x != 0) return false;
    if (fetch_add_acq_rel_device(arrivals, 1u) != gridDim.x - 1) return false;
    store_relaxed_device(arrivals, 0u);
    announce(active, word, where);
    return true;
  }

  // By one thread: what it knows to be stored, before this kernel for instance.
  template <class Word, class Where>
  __device__ static void announce(const RankSet& active, Word word, Where where) {
    u64 words[config::kRanks];
#pragma unroll 8
    for (u32 r = 0; r < config::kRanks; ++r) words[r] = word(r);  // loads end before the fence does
    fence_acq_rel_system();
#pragma unroll 8
    for (u32 r = 0; r < config::kRanks; ++r) {
      if (active.has(r)) store_relaxed_system(where(r), words[r]);
    }
  }
};

}  // namespace nvep
