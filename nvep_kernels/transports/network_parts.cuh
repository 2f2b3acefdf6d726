// Where rows are, who is near, and how a warp posts: what network transports share besides their phases.
#pragma once
#include "formats/partial.cuh"
#include "protocols/signal.cuh"
#include "transports/fence_slots.cuh"
#include "transports/nvlink.cuh"
#include "transports/ring.cuh"

namespace nvep {

// Registrations, in the order of nvep/exchange/network.py.
constexpr u32 kHeapHandle = 0, kLocalHandle = 1;
constexpr u32 kRowsAtATime = 8;  // partial rows that a warp posts together

struct NetworkShared : NvlinkShared {
  u32 sent[config::kRanks];  // rows before the tile that is assigned next, by target
  SlotTile tile;
};

// Reached by peer store: this rank itself, and those of its NVLink domain.
__device__ __forceinline__ bool is_near(u32 rank, u32 other) {
  return rank / config::kDomain == other / config::kDomain;
}

__device__ __forceinline__ constexpr u32 slot_payload_offset(u32 payload) {
  u32 offset = config::kHeaderBytes;
  for (u32 p = 0; p < payload; ++p) offset += config::payload_bytes(p);
  return offset;
}

// Slot `slot` of what `source` sends, in `rank`'s inbox.
__device__ inline u64 inbox_slot(const Step& step, u32 rank, u32 source, u32 slot) {
  return step.lane_of(rank) + heap::kInboxOffset +
         (static_cast<u64>(source) * config::kMaxTokens + slot) * config::kSlotBytes;
}

// Where `target` returns the partial row of its slot `slot`, at `source`.
__device__ inline u64 combine_slot(const Step& step, u32 source, u32 target, u32 slot) {
  return step.lane_of(source) + heap::kCombineInboxOffset +
         (static_cast<u64>(target) * config::kMaxTokens + slot) * config::kPartialBytes;
}

// Offset of private memory of this lane within its registration.
__device__ inline u64 local_offset(const Step& step, u64 address) {
  return address - step.local + step.arguments->lane * local::kLaneBytes;
}
__device__ inline u64 staging_offset(const Step& step, u32 token) {
  return step.arguments->lane * local::kLaneBytes + local::kStagingOffset +
         static_cast<u64>(token) * config::kSlotBytes;
}

// Calls `store(slot address)` for every place that a token's row is stored to: near targets, and staging if any is far.
template <class Store>
__device__ inline void for_each_place(const Step& step, u32 token, const Route* routes, Store store) {
  bool far = false;
  for (u32 j = 0; j < config::kMaxTargets && routes[j].target >= 0; ++j) {
    u32 target = static_cast<u32>(routes[j].target);
    if (is_near(step.rank, target)) {
      store(inbox_slot(step, target, step.rank, static_cast<u32>(routes[j].slot)));
    } else {
      far = true;
    }
  }
  if (far) store(step.local + local::kStagingOffset + static_cast<u64>(token) * config::kSlotBytes);
}

// Sums of `SendClock`, by phase.
using StepClock = SendClock<config::kAccountSends != 0>;
__device__ inline StepClock step_clock(const Step& step) {
  return StepClock(step.local + local::kSendAccountOffset + (step.phase - 1) * kSendStages * 8ull);
}

// The waits of a sender end as all waits of a step do, and when its own adapter has failed.
struct StepWaiter {
  const Step& step;
  const u64* alarm;
  Deadline deadline;
  StepClock clock;

  __device__ bool passed() {
    if (deadline.passed(step, step.rank)) return true;
    if ((deadline.polls & 63u) != 0u || load_relaxed_system(alarm) == 0ull) return false;
    expire(post_of(step), step.rank);
    return true;
  }
};

// A thread's or warp's way to the rings of its rank.
template <class Poster>
struct NetworkSender {
  const Step& step;
  const Ring* rings;
  StepWaiter waiter;
  u32 queue = 0;

  __device__ explicit NetworkSender(const Step& s)
      : step(s),
        rings(reinterpret_cast<const Ring*>(state(s).rings)),
        waiter{s, reinterpret_cast<const u64*>(state(s).alarm), {}, step_clock(s)} {}

  __device__ static const NetworkState& state(const Step& s) {
    return *s.template local_region<NetworkState>(local::kNetworkOffset);
  }
  __device__ const Ring& ring_to(u32 target) const {
    return rings[Poster::kPerPeer ? target * config::kQueues + queue : queue];
  }
};

// One message a far target: lane j posts for target j.
template <class P>
struct Unicast {
  using Poster = P;

  __device__ static void send_token(NetworkSender<P>& sender, const Route* routes, Message message) {
    for (u32 first = 0; first < config::kMaxTargets; first += 32) {
      u32 j = first + threadIdx.x % 32;
      Route route = j < config::kMaxTargets ? routes[j] : Route{-1, -1};
      bool far = route.target >= 0 && !is_near(sender.step.rank, static_cast<u32>(route.target));
      message.target = far ? static_cast<u32>(route.target) : sender.step.rank;
      u64 slot = inbox_slot(sender.step, message.target, sender.step.rank, static_cast<u32>(far ? route.slot : 0));
      message.to.offset = slot - sender.step.arguments->peers[message.target];
      if constexpr (P::kPerPeer) {
        if (far) P::put(sender.ring_to(message.target), message, sender.waiter);
      } else {
        P::put_by_warp(sender.ring_to(0), message, far, sender.waiter);
      }
    }
    __syncwarp();
  }
};

}  // namespace nvep
