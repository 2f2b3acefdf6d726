// A batch: up to 32 descriptors of one ring, taken in order by the first warp, whose copies the whole block then makes.
#pragma once
#include "nic/events.cuh"
#include "nic/read_gfd.cuh"
#include "nic/read_wqe.cuh"

namespace nvep {

constexpr u32 kAll = 0xffffffffu;

struct Batch {
  u32 taken, copies, events, bytes_low, bytes_high;
  Copy copy[kMaxOperations];
};

template <class T>
__device__ inline T sum_up_to(T value) {
  u32 lane = threadIdx.x % 32;
  for (u32 step = 1; step < 32; step *= 2) {
    T below = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

__device__ inline u32 first_lane(bool predicate, u32 otherwise) {
  u32 lanes = __ballot_sync(kAll, predicate);
  return lanes == 0 ? otherwise : static_cast<u32>(__ffs(static_cast<int>(lanes))) - 1;
}

__device__ inline u32 value_of_lane(u32 value, u32 lane) {
  return __shfl_sync(kAll, value, static_cast<int>(lane % 32));
}

// Descriptors of this batch: those that are there, whole, and find room. Nothing is dropped for lack of it: what is not
// taken stays in the ring.
__device__ inline u32 count_taken(const SoftNicArguments& a, EngineRing& engine, const Ring& ring, const Work& work) {
  u32 lane = threadIdx.x % 32;
  u32 n = first_lane(!work.valid, kBatch);
  n = first_lane(lane < n && lane + work.slots > n, n);
  if (n == 0) return 0;
  u32 room = a.capacity - static_cast<u32>(engine.tail - engine.head);
  u32 fitting = min(n, room / 2);  // a descriptor makes at most two events
  u32 copies = sum_up_to(lane < n ? work.copies : 0u);
  fitting = min(fitting, first_lane(copies > kMaxOperations, kBatch));
  u64 attempt = 0;
  if (a.reorder || a.busy_odds) {
    if (lane == 0) attempt = ++engine.attempts;
    attempt = __shfl_sync(kAll, attempt, 0);
    if (a.reorder) fitting = min(fitting, 1 + mix(a.seed, ring.number, attempt) % kBatch);
    if (mix(a.seed + 1, ring.number, attempt) % 1024 < a.busy_odds) fitting = 0;
  }
  u32 back = value_of_lane(work.back, fitting);
  if (fitting < n && back <= fitting) fitting -= back;
  if (lane == 0 && fitting < n) ++engine.retries;
  return fitting;
}

// The first descriptor that fails, counted from the start of the batch; `n` if none does. What follows it on its ring
// fails too: a signal must never arrive ahead of bytes that cannot.
__device__ inline u32 find_failure(const SoftNicArguments& a, EngineRing& engine, const Ring& ring, Work& work, u32 n) {
  u32 lane = threadIdx.x % 32;
  u64 index = engine.next + lane;
  if (ring.number == a.fail_number && index + 1 == a.fail_index) work.error = ring::kSyndromeRemoteAccess;
  if (engine.failed) return 0;
  u32 failing = first_lane(lane < n && work.error != 0, n);
  if (failing == n) return n;
  u32 begin = failing - value_of_lane(work.back, failing);
  u32 error = value_of_lane(work.error, failing);
  if (lane == begin && work.error == 0) work.error = error;
  return begin;
}

__device__ inline void raise_alarm(const Port& port, const Ring& ring, u64 index, u32 error) {
  u64* alarm = reinterpret_cast<u64*>(port.alarm);
  u64 word = static_cast<u64>(error) << 56 | static_cast<u64>(ring.number & 0xffffffu) << 32 | (index & 0xffffffffull);
  if (load_relaxed_system(alarm) == 0) store_relaxed_system(alarm, word);
  fence_acq_rel_system();  // whoever sees a failed completion sees the alarm
}

// Time on the modelled line, in order: a batch starts when the line is free, a message arrives its latency after it left.
__device__ inline u64 time_on_line(const SoftNicArguments& a, const Port& port, u64 cost, u64 delay) {
  u64 until = sum_up_to(cost), total = __shfl_sync(kAll, until, 31), start = 0;
  if (threadIdx.x % 32 == 0) {
    u64* line = reinterpret_cast<u64*>(port.line);
    u64 now = global_timer_ns() + delay, seen = load_relaxed_device(line), before;
    do {
      before = seen;
      start = max(now, before);
      seen = compare_swap_relaxed_device(line, before, start + total);
    } while (seen != before);
  }
  return __shfl_sync(kAll, start, 0) + until + a.latency_ns;
}

__device__ inline void list_copies(const Work& work, u32 begin, u32 end, Batch& batch) {
  for (u32 i = begin; i < end; ++i) {
    Copy& copy = batch.copy[i];
    copy.to = work.to[i - begin];
    copy.from = work.from;
    copy.bytes = work.bytes;
    if (work.from == 0) {
#pragma unroll
      for (u32 k = 0; k < kMaxInline / 4; ++k) copy.data[k] = work.data[k];
    }
  }
}

__device__ inline void list_events(const SoftNicArguments& a, EngineRing& engine, const Work& work, u64 index, u64 due,
                                   u64 position) {
  if (work.event != kEventNone) {
    *pending_of(engine, position++, a.capacity) = {due, work.event_address, work.event_value, work.event, work.peer, 8,
                                                   0};
  }
  if (work.completion != kEventNone) {
    *pending_of(engine, position, a.capacity) = {
        due, work.completion_address, index, work.completion, work.peer, work.bytes, work.error};
  }
}

// First warp. Reads and lists; nothing becomes visible before `finish_batch`.
__device__ inline void take_batch(const SoftNicArguments& a, EngineRing& engine, Batch& batch) {
  const Ring& ring = *reinterpret_cast<const Ring*>(engine.ring);
  const Port& port = *reinterpret_cast<const Port*>(engine.port);
  u32 lane = threadIdx.x % 32;
  u64 index = engine.next + lane;
  bool queue = ring.kind == ring::kKindSendQueue;
  Work work = {};
  if (!queue) {
    work = read_gfd(port, ring, engine.next);
  } else if (index < engine.available) {
    work = read_wqe(port, ring, index);
  }
  u32 n = count_taken(a, engine, ring, work);
  u32 failed = find_failure(a, engine, ring, work, n);
  if (failed < n && lane == failed && !engine.failed) raise_alarm(port, ring, index, work.error);
  if (lane >= n) work.completion = kEventNone;
  if (lane >= failed || lane >= n) {
    work.event = kEventNone;
    work.copies = 0;
    if (lane < n && (lane != failed || work.error == 0)) work.error = ring::kSyndromeFlushed;
  }
  u32 copies = sum_up_to(work.copies);
  u32 events = (work.event != kEventNone) + (work.completion != kEventNone);
  u32 events_end = sum_up_to(events);
  u64 bytes = static_cast<u64>(work.copies) * work.bytes;
  u64 cost = (work.copies + (work.event != kEventNone)) * static_cast<u64>(a.message_ns) + bytes * a.ps_per_byte / 1000;
  u64 due = time_on_line(a, port, cost, queue ? a.doorbell_ns : 0);
  u64 moved = sum_up_to(bytes);
  list_copies(work, copies - work.copies, copies, batch);
  list_events(a, engine, work, index, due, engine.tail + events_end - events);
  __syncwarp();
  if (lane != 31) return;
  batch.taken = n;
  batch.copies = copies;
  batch.events = events_end;
  batch.bytes_low = static_cast<u32>(moved);
  batch.bytes_high = static_cast<u32>(moved >> 32);
  if (failed < n) {
    engine.failed = 1;
    engine.errors += n - failed;
  }
}

template <class Unit>
__device__ inline void copy_units(u64 to, u64 from, u32 bytes) {
  constexpr u32 ahead = 4;  // loads in flight
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  u32 n = bytes / sizeof(Unit), lane = threadIdx.x % 32, i = lane;
  for (; i + 32 * (ahead - 1) < n; i += 32 * ahead) {
    Unit unit[ahead];
#pragma unroll
    for (u32 k = 0; k < ahead; ++k) unit[k] = load_weak(source + i + 32 * k);
#pragma unroll
    for (u32 k = 0; k < ahead; ++k) store_weak(target + i + 32 * k, unit[k]);
  }
  for (; i < n; i += 32) store_weak(target + i, load_weak(source + i));
}

__device__ inline void make_copy(const Copy& copy) {
  u32 lane = threadIdx.x % 32;
  u64 all = copy.to | copy.from | copy.bytes;
  if (copy.from == 0) {
    if (copy.bytes == 8 && (copy.to & 7) == 0) {
      if (lane == 0) store_weak(reinterpret_cast<u64*>(copy.to), static_cast<u64>(copy.data[1]) << 32 | copy.data[0]);
    } else if (lane < copy.bytes / 4) {
      store_weak(reinterpret_cast<u32*>(copy.to) + lane, copy.data[lane]);
    }
  } else if ((all & 15) == 0) {
    copy_units<uint4>(copy.to, copy.from, copy.bytes);
  } else if ((all & 7) == 0) {
    copy_units<u64>(copy.to, copy.from, copy.bytes);
  } else {
    copy_units<u32>(copy.to, copy.from, copy.bytes);
  }
}

// Whole block. Copies of a batch have no order among themselves; any stride that has no factor in common with their
// number visits each once.
__device__ inline void make_copies(const SoftNicArguments& a, const Batch& batch) {
  u32 n = batch.copies, warps = (blockDim.x + 31) / 32, warp = threadIdx.x / 32;
  u32 stride = !a.reorder || n < 2 ? 1 : n - 1;
  for (u32 i = warp; i < n; i += warps) make_copy(batch.copy[static_cast<u64>(i) * stride % n]);
}

// One thread, after the block's barrier: sources have been read, so producers may have slots and sources back; events
// may follow.
__device__ inline void finish_batch(EngineRing& engine, const Batch& batch) {
  const Ring& ring = *reinterpret_cast<const Ring*>(engine.ring);
  engine.next += batch.taken;
  engine.tail += batch.events;
  engine.descriptors += batch.taken;
  engine.messages += batch.copies;
  engine.bytes += static_cast<u64>(batch.bytes_high) << 32 | batch.bytes_low;
  engine.batches += batch.taken != 0;
  if (ring.consumer != 0 && batch.taken != 0) {
    store_release_system(reinterpret_cast<u64*>(ring.consumer), engine.next);
  }
}

}  // namespace nvep
