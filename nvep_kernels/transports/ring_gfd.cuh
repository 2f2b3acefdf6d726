// A descriptor ring: slots claimed by fetch-add against credits; no lock, no doorbell, no order among producers.
#pragma once
#include "transports/gfd.cuh"

namespace nvep {

template <class Waiter>
__device__ inline bool await_credit(const Ring& ring, u64 end, Waiter& waiter) {
  auto consumed = [&]() -> u64 { return load_acquire_system(reinterpret_cast<const u64*>(ring.consumer)); };
  return await_room(ring, end, consumed, waiter);
}

// Has the consumer passed entry `index`? Then its source may be reused. Asks the consumer only when the ring's shadow of
// its index does not know.
__device__ inline bool entry_passed(const Ring& ring, u64 index) {
  if (index < load_acquire_device(&state_of(ring)->cached)) return true;
  u64 consumed = load_acquire_system(reinterpret_cast<const u64*>(ring.consumer));
  if (index >= consumed) return false;
  fence_acq_rel_device();
  raise_relaxed_device(&state_of(ring)->cached, consumed);
  return true;
}

// Waits for a counter to reach `value`. False: given up, or an operation that it counts failed.
template <class Waiter>
__device__ inline bool await_counter(const Ring& ring, u32 counter, u64 value, Waiter& waiter) {
  const u64* word = reinterpret_cast<const u64*>(ring.counters) + counter;
  for (;;) {
    u64 seen = load_acquire_system(word);
    if ((seen & ring::kCounterError) != 0) return false;
    if (seen >= value) return true;
    if (waiter.passed()) return give_up(ring);
  }
}

// GPI, with the members of QueuePoster, and those that need the ring's counters.
struct GfdPoster {
  static constexpr bool kPerPeer = false;

  template <class Waiter>
  __device__ static bool post(const Ring& ring, const ring::Gfd& descriptor, Waiter& waiter) {
    waiter.clock.start();
    u64 index = reserve(ring, 1);
    if (!await_credit(ring, index + 1, waiter)) return false;
    waiter.clock.note(kPostClaim);
    write_descriptor(ring, index, descriptor);
    waiter.clock.note(kPostBuild);
    return true;
  }

  template <class Waiter>
  __device__ static bool put(const Ring& ring, const Message& message, Waiter& waiter, u32 counter = kNoCounter) {
    return post(ring, gfd_put(message, counter), waiter);
  }

  template <class Waiter>
  __device__ static bool put_signal(const Ring& ring, const Message& message, const Signal& signal, bool add,
                                    Waiter& waiter) {
    return post(ring, gfd_put_signal(message, signal, add, kNoCounter), waiter);
  }

  template <class Waiter>
  __device__ static bool signal(const Ring& ring, const Signal& signal, bool add, Waiter& waiter) {
    return post(ring, gfd_signal(signal, add, kNoCounter), waiter);
  }

  template <class Waiter>
  __device__ static bool put_inline(const Ring& ring, u32 target, const Place& to, u64 value, u32 bytes,
                                    Waiter& waiter) {
    return post(ring, gfd_inline(target, to, value, bytes, kNoCounter), waiter);
  }

  // Lanes with `active` post one message each: one claim, no further agreement.
  template <class Waiter>
  __device__ static bool put_by_warp(const Ring& ring, const Message& message, bool active, Waiter& waiter) {
    const bool notes = threadIdx.x % 32 == 0;
    waiter.clock.start();
    u64 first;
    u32 count;
    u64 index = reserve_for_warp(ring, active, first, count);
    if (count == 0) return true;
    if (!__all_sync(0xffffffffu, await_credit(ring, first + count, waiter))) return false;
    waiter.clock.note(kPostClaim, notes);
    if (active) write_descriptor(ring, index, gfd_put(message, kNoCounter));
    waiter.clock.note(kPostBuild, notes);
    return true;
  }

  // Waits until the consumer has read the sources of entries below `end`.
  template <class Waiter>
  __device__ static bool await_passed(const Ring& ring, u64 end, Waiter& waiter) {
    while (end != 0 && !entry_passed(ring, end - 1)) {
      if (waiter.passed()) return give_up(ring);
    }
    return true;
  }

  // Waits until everything posted before is at its target. `counter` is the caller's, and so is its last value.
  template <class Waiter>
  __device__ static bool flush(const Ring& ring, u32 counter, u64& value, Waiter& waiter) {
    return post(ring, gfd_control(ring::kOpFlush, counter), waiter) && await_counter(ring, counter, ++value, waiter);
  }

  // Sets a counter back to 0, behind everything posted before.
  template <class Waiter>
  __device__ static bool reset(const Ring& ring, u32 counter, Waiter& waiter) {
    return post(ring, gfd_control(ring::kOpReset, counter), waiter);
  }
};

}  // namespace nvep
