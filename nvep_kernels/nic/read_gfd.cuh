// Reads descriptors of a ring, one lane each. A slot counts only when the owner bits of all its segments match its lap.
#pragma once
#include "nic/work.cuh"
#include "transports/fanout.cuh"

namespace nvep {

struct GfdWords {
  u64 word[8];
  bool valid;
};

// Relaxed loads in any order, then a fence: what producers stored before valid descriptors is visible after it.
__device__ inline GfdWords load_gfd(const Ring& ring, u64 index) {
  const u64x2* slot = reinterpret_cast<const u64x2*>(slot_address(ring, index));
  GfdWords d = {};
  u64 owner = owner_bit(ring, index), differs = 0;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u64x2 unit = load_relaxed_system(slot + i);
    d.word[2 * i] = unit.a;
    d.word[2 * i + 1] = unit.b;
    differs |= (unit.a ^ owner) | (unit.b ^ owner);
  }
  d.valid = (differs & 1ull) == 0;
  fence_acq_rel_system();
  return d;
}

template <class Descriptor>
__device__ inline Descriptor as(const GfdWords& words) {
  Descriptor d;
#pragma unroll
  for (u32 i = 0; i < 8; ++i) d.word[i] = words.word[i];
  return d;
}

__device__ inline void read_signal(const Port& port, const ring::Gfd& d, Work& work) {
  work.event = (d.flags() & ring::kFlagSet) != 0 ? kEventStore : kEventAdd;
  work.peer = d.peer();
  work.event_address = reach_word(port, port.signal_handle, d.peer(), d.signal() * 8ull);
  work.event_value = static_cast<u64>(d.value_high()) << 32 | d.value_low();
  if (work.event_address == 0) work.error = ring::kSyndromeRemoteAccess;
}

__device__ inline void read_put(const Port& port, const ring::Gfd& d, Work& work) {
  work.bytes = d.bytes();
  work.copies = work.bytes != 0 ? 1 : 0;
  if (work.bytes == 0) return;
  work.to[0] = reach(port, d.target_handle(), d.peer(), d.target_offset(), work.bytes);
  if (d.op() == ring::kOpInlinePut) {
    work.data[0] = d.inline_low();
    work.data[1] = d.inline_high();
    if (work.bytes > 8) work.error = ring::kSyndromeLocalLength;
  } else {
    work.from = reach(port, d.source_handle(), port.rank, d.source_offset(), work.bytes);
    if (work.from == 0) work.error = ring::kSyndromeLocalProtection;
  }
  if (work.to[0] == 0) work.error = ring::kSyndromeRemoteAccess;
}

// What every slot of a fan-out takes from its head.
struct FanoutSource {
  u64 from;
  u32 bytes, to_handle, targets;
};

__device__ inline void read_targets(const Port& port, const FanoutSource& source, const u64* segments, u32 first,
                                    u32 room, Work& work) {
  u32 beyond = source.targets > first ? source.targets - first : 0;
  work.copies = min(beyond, room);
  work.bytes = source.bytes;
  work.from = source.from;
  for (u32 i = 0; i < work.copies; ++i) {
    ring::FanoutTarget target = {{segments[i]}};
    work.to[i] = reach(port, source.to_handle, target.peer(), target.offset(), source.bytes);
    if (work.to[i] == 0) work.error = ring::kSyndromeRemoteAccess;
  }
  if (source.from == 0) work.error = ring::kSyndromeLocalProtection;
}

__device__ inline FanoutSource read_head(const Port& port, const ring::FanoutHead& head) {
  u64 offset = static_cast<u64>(head.source_offset_high()) << 32 | head.source_offset_low();
  return {reach(port, head.source_handle(), port.rank, offset, head.bytes()), head.bytes(), head.target_handle(),
          head.targets()};
}

__device__ inline FanoutSource source_of_lane(const FanoutSource& source, u32 lane) {
  return {__shfl_sync(0xffffffffu, source.from, static_cast<int>(lane)),
          __shfl_sync(0xffffffffu, source.bytes, static_cast<int>(lane)),
          __shfl_sync(0xffffffffu, source.to_handle, static_cast<int>(lane)),
          __shfl_sync(0xffffffffu, source.targets, static_cast<int>(lane))};
}

// Whole warp: lane i reads the descriptor at `first` + i.
__device__ inline Work read_gfd(const Port& port, const Ring& ring, u64 first) {
  u32 lane = threadIdx.x % 32;
  GfdWords words = load_gfd(ring, first + lane);
  ring::Gfd d = as<ring::Gfd>(words);
  u32 op = d.op(), counter = d.counter();
  Work work = {};
  work.valid = words.valid;
  work.slots = 1;
  FanoutSource source = {};
  if (words.valid && op == ring::kOpFanout) source = read_head(port, as<ring::FanoutHead>(words));
  ring::FanoutMore more = as<ring::FanoutMore>(words);
  bool follows = words.valid && op == ring::kOpMore;
  work.back = follows ? more.position() + 1 : 0;
  bool orphan = work.back > lane;
  FanoutSource theirs = source_of_lane(source, orphan ? lane : lane - work.back);
  if (!words.valid) return work;
  if ((d.flags() & ring::kFlagCounted) != 0) {
    work.completion = op == ring::kOpReset ? kEventReset : op == ring::kOpFlush ? kEventFlush : kEventCount;
    work.completion_address = ring.counters + counter * 8ull;
    if (counter >= ring.counter_count) {
      work.completion = kEventNone;
      work.error = ring::kSyndromeLocalOperation;
    }
  }
  if (op == ring::kOpPut || op == ring::kOpInlinePut || op == ring::kOpPutSignal) read_put(port, d, work);
  if (op == ring::kOpSignal || op == ring::kOpPutSignal) read_signal(port, d, work);
  if (op == ring::kOpFanout) {
    work.slots = fanout_slots(source.targets);
    if (source.targets == 0 || source.targets > ring::kMaxFanout) work.error = ring::kSyndromeLocalOperation;
    if (!work.error) read_targets(port, source, words.word + 4, 0, ring::kHeadTargets, work);
    if (work.error) work.slots = 1;
  } else if (follows) {
    work.slots = 0;
    u32 begin = ring::kHeadTargets + more.position() * ring::kMoreTargets;
    if (orphan || theirs.targets <= begin) {
      work.error = ring::kSyndromeLocalOperation;
      work.slots = 1;
      work.back = 0;
    } else {
      read_targets(port, theirs, words.word + 1, begin, ring::kMoreTargets, work);
    }
  } else if (op == 0 || op > ring::kOpMore) {
    work.error = ring::kSyndromeLocalOperation;
  }
  return work;
}

}  // namespace nvep
