// Fence: data is pushed straight into exposed buffers; one record per (source, step), stored after one system fence, says
// that all of it is there.
#pragma once
#include "protocols/lane.cuh"

namespace nvep {

struct Fence {
  static constexpr u32 kCode = 1;

  // Every block calls this once after its stores. Block barrier, one acquire-release increment per block at GPU
  // scope, and in the last block one system fence: by cumulativity that fence covers the stores of every block.
  // `post(rank)` then gives the word for each unmasked peer and `where(rank)` its address. Returns true in the one
  // thread that announced.
  template <class Word, class Where>
  __device__ static bool announce(u32* arrivals, const u32* active, Word word, Where where) {
    __syncthreads();
    if (threadIdx.x != 0) return false;
    if (fetch_add_acq_rel_device(arrivals, 1u) != gridDim.x - 1) return false;
    store_relaxed_device(arrivals, 0u);
    fence_acq_rel_system();
    for (u32 r = 0; r < config::kRanks; ++r) {
      if (active[r]) store_relaxed_system(where(r), word(r));
    }
    return true;
  }

  // Every block calls this: one thread per peer waits for that peer's word and acquires it, then a barrier extends
  // what was acquired to the block. `seen(rank, word)` runs in the waiting thread. Returns false in all threads of
  // the block if any wait failed.
  template <class Where, class Seen>
  __device__ static bool await(const Step& step, u32 epoch, u32 phase, const u32* active, Where where, Seen seen) {
    bool failed = threadIdx.x == blockDim.x - 1 && poisoned(step, epoch, phase);
    for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) {
      u64 word = 0;
      if (!active[r]) {
        seen(r, make_record(epoch, 0, kCode));
      } else if (!await_word(step, where(r), epoch, phase, r, word)) {
        failed = true;
      } else if (record_protocol(word) != kCode) {
        report(step, epoch, phase, {kStatusProtocol, r, step.rank, epoch, phase});
        failed = true;
      } else {
        seen(r, word);
      }
    }
    return !__syncthreads_or(failed);
  }
};

}  // namespace nvep
