// Signals: a message travels on its own; one word per (source, queue, lane, direction) at the target, written behind the
// messages of its queue, says which step is complete and how many rows it has.
#pragma once
#include "protocols/lane.cuh"

namespace nvep {

struct Signals {
  static constexpr u32 kCode = 3;
  static constexpr bool kAcquires = true;

  // Directions of a step: rows on their way out, partial rows on their way back.
  enum Direction : u32 { kOut = 0, kBack = 1 };

  // Index among the words of all lanes, which sit in lane 0.
  __device__ static u32 word_index(const Step& step, Direction direction, u32 source, u32 queue) {
    return ((step.arguments->lane * 2 + direction) * config::kRanks + source) * config::kQueues + queue;
  }
  __device__ static u64* word(const Step& step, u32 rank, u32 index) {
    return reinterpret_cast<u64*>(step.arguments->peers[rank] + heap::kSignalsOffset) + index;
  }

  // Every block calls this. One thread per peer and queue waits; a barrier extends what was acquired to the block.
  // `seen(rank, word)` runs for the first queue of each rank. False in all threads if any wait failed.
  template <class Seen>
  __device__ static bool await_all(const Step& step, Direction direction, Seen seen) {
    bool failed = false;
    for (u32 i = threadIdx.x; i < config::kRanks * config::kQueues; i += blockDim.x) {
      u32 source = i / config::kQueues, queue = i % config::kQueues;
      u64 value = make_record(step.epoch, 0, kCode);
      failed |= poisoned_by(post_of(step), source);
      if (step.active.has(source)) {
        const u64* at = word(step, step.rank, word_index(step, direction, source, queue));
        if (!await_word<kAcquires>(step, at, source, value)) failed = true;
      }
      if (queue == 0) seen(source, value);
    }
    return !__syncthreads_or(failed);
  }
};

}  // namespace nvep
