// Events of a ring: signals, completions, counts. Each becomes visible once it is due and everything it comes after is
// visible; a lane of the engine's first warp does that for the rings it watches.
#pragma once
#include "nic/work.cuh"

namespace nvep {

constexpr u32 kReorderWindow = 8;

__device__ inline Pending* pending_of(const EngineRing& engine, u64 position, u32 capacity) {
  return reinterpret_cast<Pending*>(engine.pending) + (position & (capacity - 1));
}

__device__ inline void complete(const Ring& ring, const Pending& event) {
  u64* entry = reinterpret_cast<u64*>(event.address);
  ring::Cqe cqe = {};
  cqe.set_bytes(event.bytes);
  if (event.syndrome != 0) {
    cqe.set_syndrome(event.syndrome);
  } else {
    cqe.set_timestamp(event.due);
  }
  u64 index = event.value;
  cqe.set_number(ring.number);
  cqe.set_index(static_cast<u32>(index));
  cqe.set_owner(static_cast<u32>(index >> ring.depth_log2) & 1u);
  cqe.set_opcode(event.syndrome != 0 ? ring::kCqeFailed : ring::kCqeDone);
  store_relaxed_system(entry + 5, cqe.word[5]);
  store_relaxed_system(entry + 6, cqe.word[6]);
  store_release_system(entry + 7, cqe.word[7]);
}

// The caller's fence puts it behind all bytes of its batch.
__device__ inline void apply(const Ring& ring, const Pending& event) {
  u64* word = reinterpret_cast<u64*>(event.address);
  if (event.kind == kEventComplete) {
    complete(ring, event);
  } else if (event.kind == kEventStore) {
    store_relaxed_system(word, event.value);
  } else if (event.kind == kEventAdd) {
    fetch_add_relaxed_system(word, event.value);
  } else if (event.syndrome != 0) {
    store_relaxed_system(word, load_relaxed_system(word) | ring::kCounterError);
  } else if (event.kind == kEventReset) {
    store_relaxed_system(word, 0ull);
  } else {
    store_relaxed_system(word, load_relaxed_system(word) + 1);  // its ring is the counter's only writer
  }
}

// May the event at `position` go before those pending earlier? Signals to different peers are unordered among
// themselves; everything else keeps its place.
__device__ inline bool may_overtake(const EngineRing& engine, u64 position, u32 capacity) {
  const Pending& event = *pending_of(engine, position, capacity);
  if (event.kind != kEventStore && event.kind != kEventAdd) return false;
  for (u64 p = engine.head; p < position; ++p) {
    const Pending& earlier = *pending_of(engine, p, capacity);
    if (earlier.kind == kEventDone) continue;
    bool signal = earlier.kind == kEventStore || earlier.kind == kEventAdd;
    if (!signal || earlier.peer == event.peer) return false;
  }
  return true;
}

// The next event to apply: the oldest, or when what is unordered shall be reordered, one that may overtake.
__device__ inline u64 choose_event(const SoftNicArguments& a, EngineRing& engine, const Ring& ring, u64 now) {
  if (!a.reorder || ring.kind != ring::kKindGfd) return engine.head;
  u64 ahead = mix(a.seed, ring.number, ++engine.attempts) % kReorderWindow;
  u64 position = engine.head + ahead;
  if (position >= engine.tail) return engine.head;
  const Pending& event = *pending_of(engine, position, a.capacity);
  return event.due <= now && may_overtake(engine, position, a.capacity) ? position : engine.head;
}

// Applies what is due. Returns whether anything is still pending.
__device__ inline bool drain(const SoftNicArguments& a, EngineRing& engine, const Ring& ring) {
  if (engine.head == engine.tail) return false;
  u64 now = global_timer_ns();
  bool fenced = false;
  while (engine.head < engine.tail) {
    Pending& oldest = *pending_of(engine, engine.head, a.capacity);
    if (oldest.kind != kEventDone) {
      if (oldest.due > now) break;
      if (!fenced) fence_acq_rel_system();
      fenced = true;
      Pending& event = *pending_of(engine, choose_event(a, engine, ring, now), a.capacity);
      apply(ring, event);
      event.kind = kEventDone;
      if (&event != &oldest) continue;
    }
    ++engine.head;
  }
  return engine.head < engine.tail;
}

}  // namespace nvep
