// GPI-MC: one descriptor for one source and up to 64 targets. A head holds four, each continuation seven more; all slots
// are claimed in one step, so that nobody else's descriptor comes between them.
#pragma once
#include "transports/ring_gfd.cuh"

namespace nvep {

struct FanoutTarget {
  u32 rank;
  u64 offset;  // below 2^48
};

__device__ inline u64 target_segment(const FanoutTarget& target) {
  ring::FanoutTarget segment = {};
  segment.set_peer(target.rank);
  segment.set_offset(target.offset);
  return segment.word[0];
}

__device__ inline u32 fanout_slots(u32 targets) {
  u32 beyond = targets > ring::kHeadTargets ? targets - ring::kHeadTargets : 0;
  return 1 + (beyond + ring::kMoreTargets - 1) / ring::kMoreTargets;
}

// One source for all targets; `target_of(i)` is target i of `targets`.
struct Fanout {
  u32 targets;
  u32 bytes;
  u32 to_handle;
  Place from;
};

template <class TargetOf>
__device__ inline ring::FanoutHead fanout_head(const Fanout& fanout, TargetOf target_of, u32 counter) {
  ring::FanoutHead d = {};
  set_header(d, ring::kOpFanout, 0, counter);
  d.set_targets(fanout.targets);
  d.set_bytes(fanout.bytes);
  d.set_target_handle(fanout.to_handle);
  d.set_source_handle(fanout.from.handle);
  d.set_source_offset_low(static_cast<u32>(fanout.from.offset));
  d.set_source_offset_high(static_cast<u32>(fanout.from.offset >> 32));
#pragma unroll
  for (u32 i = 0; i < ring::kHeadTargets; ++i) {
    if (i < fanout.targets) d.word[4 + i] = target_segment(target_of(i));
  }
  return d;
}

template <class TargetOf>
__device__ inline ring::FanoutMore fanout_more(const Fanout& fanout, u32 position, TargetOf target_of) {
  ring::FanoutMore d = {};
  set_header(d, ring::kOpMore, 0, kNoCounter);
  d.set_targets(fanout.targets);
  d.set_position(position);
#pragma unroll
  for (u32 i = 0; i < ring::kMoreTargets; ++i) {
    u32 target = ring::kHeadTargets + position * ring::kMoreTargets + i;
    if (target < fanout.targets) d.word[1 + i] = target_segment(target_of(target));
  }
  return d;
}

struct FanoutPoster : GfdPoster {
  // One thread posts; false when given up. The consumer has taken the source once it passed the last slot.
  template <class TargetOf, class Waiter>
  __device__ static bool put_all(const Ring& ring, const Fanout& fanout, TargetOf target_of, Waiter& waiter,
                                 u32 counter = kNoCounter) {
    u32 slots = fanout_slots(fanout.targets);
    u64 index = reserve(ring, slots);
    if (!await_credit(ring, index + slots, waiter)) return false;
    write_descriptor(ring, index, fanout_head(fanout, target_of, counter));
    for (u32 i = 1; i < slots; ++i) write_descriptor(ring, index + i, fanout_more(fanout, i - 1, target_of));
    return true;
  }

  // Lanes of a warp write the slots side by side. Whole warps call this with the same fan-out.
  template <class TargetOf, class Waiter>
  __device__ static bool put_all_by_warp(const Ring& ring, const Fanout& fanout, TargetOf target_of, Waiter& waiter,
                                         u32 counter = kNoCounter) {
    u32 lane = threadIdx.x % 32, slots = fanout_slots(fanout.targets);
    u64 index = 0;
    waiter.clock.start();
    if (lane == 0) index = reserve(ring, slots);
    index = __shfl_sync(0xffffffffu, index, 0);
    if (!__all_sync(0xffffffffu, await_credit(ring, index + slots, waiter))) return false;
    waiter.clock.note(kPostClaim, lane == 0);
    if (lane == 0) write_descriptor(ring, index, fanout_head(fanout, target_of, counter));
    if (lane != 0 && lane < slots) write_descriptor(ring, index + lane, fanout_more(fanout, lane - 1, target_of));
    waiter.clock.note(kPostBuild, lane == 0);
    return true;
  }
};

}  // namespace nvep
