// A per-peer send queue: entries handed out by fetch-add, published in order, announced by doorbell.
//
// Every entry asks for a completion, and the completion queue is as deep as the send queue: the completion of entry
// i - depth says that slot i is free. One 8-byte word of a completion holds its index, opcode and queue.
#pragma once
#include "transports/wqe.cuh"

namespace nvep {

// True once entry `index` has completed; `failed` if it, or an earlier one that still shows, completed with an error.
__device__ inline bool entry_completed(const Ring& ring, u64 index, bool& failed) {
  const u64* last = reinterpret_cast<const u64*>(ring.completions + (index & (ring.depth - 1)) * 64) + 7;
  ring::Cqe cqe = {};
  cqe.word[7] = load_acquire_system(last);
  if (cqe.opcode() == ring::kCqeInvalid) return false;
  if (static_cast<short>(static_cast<u16>(cqe.index() - static_cast<u32>(index))) < 0) return false;
  failed |= cqe.opcode() == ring::kCqeFailed;
  return true;
}

// Entries below `first + count` may be written. False: given up, or the queue failed.
template <class Waiter>
__device__ inline bool await_queue_room(const Ring& ring, u64 end, Waiter& waiter) {
  bool failed = false;
  const u64 awaited = end - ring.depth - 1;  // used only once the ring went round
  auto consumed = [&]() -> u64 { return end > ring.depth && entry_completed(ring, awaited, failed) ? awaited + 1 : 0; };
  return await_room(ring, end, consumed, waiter) && !failed;
}

__device__ inline void ring_doorbell(const Ring& ring, u64 end) {
  ring::Doorbell bell = {};
  bell.set_index(static_cast<u32>(end));
  bell.set_number(ring.number);
  u64* doorbell = reinterpret_cast<u64*>(ring.doorbell);
  u32* record = reinterpret_cast<u32*>(ring.record) + 1;
  // An adapter that takes the first doorbell for a hint finds the record behind the second.
  store_relaxed_system(doorbell, bell.word[0]);
  store_relaxed_system(record, swap_bytes(static_cast<u32>(end & 0xffff)));
  fence_acq_rel_system();
  store_relaxed_system(doorbell, bell.word[0]);
}

// Publishes built entries [first, first + count) behind those of earlier reservers, then rings for all that are ready
// unless somebody did already. One thread calls this; what it saw written (a warp: after __syncwarp) is published.
template <class Waiter>
__device__ inline bool publish(const Ring& ring, u64 first, u32 count, Waiter& waiter) {
  RingState* state = state_of(ring);
  fence_acq_rel_device();
  while (compare_swap_relaxed_device(&state->ready, first, first + count) != first) {
    if (waiter.passed()) return give_up(ring);
  }
  waiter.clock.note(kPostOrder);
  while (exchange_acquire_device(&state->lock, 1u) != 0u) {
    if (waiter.passed()) return give_up(ring);
  }
  waiter.clock.note(kPostLock);
  u64 end = load_relaxed_device(&state->ready);
  fence_acq_rel_device();  // acquires what earlier reservers released with their increments of `ready`
  if (end > load_relaxed_device(&state->posted)) {
    ring_doorbell(ring, end);
    store_relaxed_device(&state->posted, end);
  }
  store_release_device(&state->lock, 0u);
  waiter.clock.note(kPostDoorbell);
  return true;
}

// GDAKI: the GPU does everything. A thread posts through its target's queue; threads may post concurrently.
struct DoorbellPublisher {
  template <class Waiter>
  __device__ static bool publish(const Ring& ring, u64 first, u32 count, Waiter& waiter) {
    return nvep::publish(ring, first, count, waiter);
  }

  // The lanes' entries are built; lane 0 publishes all of them.
  template <class Waiter>
  __device__ static bool publish_by_warp(const Ring& ring, u64 first, u32 count, u64, bool, Waiter& waiter) {
    __syncwarp();
    bool sent = threadIdx.x % 32 != 0 || nvep::publish(ring, first, count, waiter);
    return __all_sync(0xffffffffu, sent);
  }
};

// What senders of every scheme offer, each member called by one thread unless its name says warp. False: given up, or
// the ring failed. The caller's stores to a source come first: a block barrier, then fence_acq_rel_system.
template <class Publisher>
struct QueuePoster {
  static constexpr bool kPerPeer = true;  // a ring leads to one rank

  template <class Waiter>
  __device__ static bool put(const Ring& ring, const Message& message, Waiter& waiter) {
    waiter.clock.start();
    u64 index = reserve(ring, 1);
    if (!await_queue_room(ring, index + 1, waiter)) return false;
    waiter.clock.note(kPostClaim);
    write_wqe(ring, index, wqe_put(ring, index, message));
    waiter.clock.note(kPostBuild);
    return Publisher::publish(ring, index, 1, waiter);
  }

  // Lanes with `active` post one message each to the same queue: one reservation, one publication.
  template <class Waiter>
  __device__ static bool put_by_warp(const Ring& ring, const Message& message, bool active, Waiter& waiter) {
    const bool notes = threadIdx.x % 32 == 0;
    waiter.clock.start();
    u64 first;
    u32 count;
    u64 index = reserve_for_warp(ring, active, first, count);
    if (count == 0) return true;
    if (!__all_sync(0xffffffffu, await_queue_room(ring, first + count, waiter))) return false;
    waiter.clock.note(kPostClaim, notes);
    if (active) write_wqe(ring, index, wqe_put(ring, index, message));
    waiter.clock.note(kPostBuild, notes);
    return Publisher::publish_by_warp(ring, first, count, index, active, waiter);
  }

  // The message, then a signal behind it: two entries, published together.
  template <class Waiter>
  __device__ static bool put_signal(const Ring& ring, const Message& message, const Signal& signal, bool add,
                                    Waiter& waiter) {
    u64 index = reserve(ring, 2);
    if (!await_queue_room(ring, index + 2, waiter)) return false;
    write_wqe(ring, index, wqe_put(ring, index, message));
    write_wqe(ring, index + 1, add ? wqe_signal_add(ring, index + 1, signal) : wqe_signal(ring, index + 1, signal));
    return Publisher::publish(ring, index, 2, waiter);
  }

  template <class Waiter>
  __device__ static bool signal(const Ring& ring, const Signal& signal, bool add, Waiter& waiter) {
    u64 index = reserve(ring, 1);
    if (!await_queue_room(ring, index + 1, waiter)) return false;
    write_wqe(ring, index, add ? wqe_signal_add(ring, index, signal) : wqe_signal(ring, index, signal));
    return Publisher::publish(ring, index, 1, waiter);
  }

  // 4 or 8 bytes that travel inside the entry.
  template <class Waiter>
  __device__ static bool put_inline(const Ring& ring, u32, const Place& to, u64 value, u32 bytes, Waiter& waiter) {
    const u32 data[2] = {static_cast<u32>(value), static_cast<u32>(value >> 32)};
    u64 index = reserve(ring, 1);
    if (!await_queue_room(ring, index + 1, waiter)) return false;
    write_wqe(ring, index, wqe_inline(ring, index, to, data, bytes));
    return Publisher::publish(ring, index, 1, waiter);
  }

  // Waits until the entries below `end` have completed: their bytes are at the target, and their sources are free.
  template <class Waiter>
  __device__ static bool await_passed(const Ring& ring, u64 end, Waiter& waiter) {
    bool failed = false;
    while (end != 0 && !entry_completed(ring, end - 1, failed)) {
      if (waiter.passed()) return give_up(ring);
    }
    return !failed;
  }
};

}  // namespace nvep
