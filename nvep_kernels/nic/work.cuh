// What a descriptor asks for, once read: copies, and events that become visible when everything before them is.
#pragma once
#include "transports/ring_queue.cuh"

namespace nvep {

constexpr u32 kWorkTargets = 7;      // copies of one slot: the targets of a continuation
constexpr u32 kMaxOperations = 128;  // copies of one batch; at least one whole fan-out
constexpr u32 kBatch = 32;           // descriptors of one batch: a warp reads them

// Events of a ring, in the order of `Pending::kind`.
enum EventKind : u32 {
  kEventNone = 0,
  kEventStore = 1,     // 8 bytes at the target
  kEventAdd = 2,       // atomic, at the target
  kEventComplete = 3,  // completion queue entry
  kEventCount = 4,     // counter of the ring
  kEventReset = 5,
  kEventFlush = 6,  // counts once everything before it is done
  kEventDone = 7,   // happened already
};

struct Work {
  u32 valid;       // the whole descriptor is there
  u32 error;       // syndrome, or 0
  u32 copies;      // targets of this slot
  u32 bytes;       // of each copy
  u32 slots;       // of the descriptor that begins here; 0 in a continuation
  u32 back;        // slots back to where it begins
  u32 peer;        // of the signal
  u32 event;       // signal: kEventNone, kEventStore, kEventAdd
  u32 completion;  // kEventNone, kEventComplete, kEventCount, kEventReset, kEventFlush
  u64 from;        // 0: the bytes are in `data`
  u64 to[kWorkTargets];
  u32 data[kMaxInline / 4];
  u64 event_address, event_value, completion_address;
};

struct Copy {
  u64 to, from;
  u32 bytes;
  u32 data[kMaxInline / 4];
};

// Address of registered memory of `rank`, or 0 if it is not registered that far. Offsets, sizes: multiples of 4.
__device__ inline u64 reach(const Port& port, u32 handle, u32 rank, u64 offset, u32 bytes) {
  if (handle >= port.region_count || rank >= port.ranks || ((offset | bytes) & 3) != 0) return 0;
  const Region& region = reinterpret_cast<const Region*>(port.regions)[handle];
  if (offset > region.bytes || bytes > region.bytes - offset) return 0;
  u64 base = reinterpret_cast<const u64*>(region.bases)[rank];
  return base == 0 ? 0 : base + offset;
}

__device__ inline bool is_ordered(const Port& port, u32 handle) {
  return reinterpret_cast<const Region*>(port.regions)[handle].ordered != 0;
}

// Address of a word that an event changes: 8 bytes, aligned.
__device__ inline u64 reach_word(const Port& port, u32 handle, u32 rank, u64 offset) {
  return (offset & 7) != 0 ? 0 : reach(port, handle, rank, offset, 8);
}

__device__ inline u32 mix(u64 seed, u64 a, u64 b) {
  u64 x = seed + a * 0x9e3779b97f4a7c15ull + b * 0xd1b54a32d192ed03ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<u32>(x >> 33);
}

}  // namespace nvep
