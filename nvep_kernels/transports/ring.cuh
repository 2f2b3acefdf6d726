// What send queues and descriptor rings share: messages, places in registered memory, waiting for room.
//
// Indices are absolute and never wrap; an entry's slot is index mod depth. Who waits passes a `Waiter`: `passed()` is called
// once a poll and says when to give up; its `clock` takes notes of where time goes. A claim that was given up leaves a hole that no consumer passes: the ring is
// then of no more use, which its alarm or the waiter's own report says.
#pragma once
#include "primitives/atomics.cuh"
#include "primitives/time.cuh"
#include "transports/send_clock.cuh"

namespace nvep {

// A byte of registered memory: which registration, and how far into it.
struct Place {
  u32 handle;
  u64 offset;
};

// One message. `bytes` and both offsets are multiples of 4; multiples of 16 move fastest. The source is left alone until
// the consumer has passed the message.
struct Message {
  u32 target;
  u32 bytes;
  Place to;
  Place from;
};

// A single-writer word at the target that says how far its sources are. Later values are larger.
struct Signal {
  u32 target;
  u32 word;  // index among the target's signal words
  u64 value;
};

// Gives up after a time, or once the rank's alarm is set. `given_up` says that it did.
struct RingWaiter {
  u64 limit_ns;
  const u64* alarm;
  u64 start = 0;
  u32 polls = 0;
  bool given_up = false;
  SendClock<false> clock{0};

  __device__ RingWaiter(u64 limit, u64 alarm_address)
      : limit_ns(limit), alarm(reinterpret_cast<const u64*>(alarm_address)) {}

  __device__ bool passed() {
    spin_pause();
    if (given_up) return true;
    if ((++polls & 63u) != 0u) return false;
    u64 now = global_timer_ns();
    if (start == 0) start = now;
    given_up = now - start > limit_ns || load_relaxed_system(alarm) != 0ull;
    return given_up;
  }
};

__device__ inline RingState* state_of(const Ring& ring) {
  return reinterpret_cast<RingState*>(ring.state);
}

__device__ inline u64 slot_address(const Ring& ring, u64 index) {
  return ring.entries + (index & (ring.depth - 1)) * ring::kEntryBytes;
}

// Always false. The host sees that a wait on this ring was given up.
__device__ inline bool give_up(const Ring& ring) {
  fetch_add_relaxed_device(&state_of(ring)->expired, 1ull);
  return false;
}

// Takes `count` entries for the calling thread alone.
__device__ inline u64 reserve(const Ring& ring, u32 count) {
  return fetch_add_relaxed_device(&state_of(ring)->reserved, count);
}

// Waits until entries below `end` may be written, and with them every source that the consumer is done with.
// `consumed()` asks the consumer for its index. Time spent here is counted apart: it is back-pressure, not work.
template <class Consumed, class Waiter>
__device__ inline bool await_room(const Ring& ring, u64 end, Consumed consumed, Waiter& waiter) {
  RingState* state = state_of(ring);
  if (end <= load_acquire_device(&state->cached) + ring.depth) return true;
  u64 index = consumed();
  if (end > index + ring.depth) {
    u64 began = global_timer_ns();
    bool expired = false;
    while (end > index + ring.depth && !expired) {
      expired = waiter.passed();
      index = consumed();
    }
    fetch_add_relaxed_device(&state->stalled_ns, global_timer_ns() - began);
    fetch_add_relaxed_device(&state->stalls, 1ull);
    if (end > index + ring.depth) return give_up(ring);
  }
  // Another producer that reads `cached` learns through it what this one acquired from the consumer.
  fence_acq_rel_device();
  raise_relaxed_device(&state->cached, index);
  return true;
}

// A warp's lanes with `active` take one entry each of the same ring, in lane order. Whole warps call this. Returns the
// lane's index; `first` and `count` are those of the warp.
__device__ inline u64 reserve_for_warp(const Ring& ring, bool active, u64& first, u32& count) {
  u32 lane = threadIdx.x % 32, members = __ballot_sync(0xffffffffu, active);
  count = static_cast<u32>(__popc(members));
  first = 0;
  if (lane == 0 && count != 0) first = reserve(ring, count);
  first = __shfl_sync(0xffffffffu, first, 0);
  return first + static_cast<u32>(__popc(members & ((1u << lane) - 1)));
}

}  // namespace nvep
