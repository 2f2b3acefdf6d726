// Sentinel: data carries its own validity. Wire memory is filled with a word that never travels; a unit has arrived when
// it holds anything else. Whoever reads a unit writes the sentinel back.
//
// A slot's payload is cut into chunks, each sent and received by one warp:
//   [key 8 B][8 B never written, never polled][header units, chunk 0 only][payload units of 16 B, each half XOR key]
// Every access is relaxed, system scope, in 8-byte elements. Nothing here fences: the order of grids keeps the wires.
#pragma once
#include "protocols/lane.cuh"

namespace nvep {

constexpr u64 kEmpty = 0x8080808080808080ull;     // the sentinel
constexpr u64 kUnrouted = 0x7fffffffffffffffull;  // in place of every key of a slot that holds no token
constexpr u32 kPrefixBytes = 16;
constexpr u32 kChunkUnits = config::kChunkBytes / 16;
constexpr u32 kLaneUnits = (kChunkUnits + 31) / 32;  // units that a lane holds in registers

struct Sentinel {
  static constexpr u32 kCode = 2;
  static constexpr bool kAcquires = config::kStrictPtx;
};

// Wire form of a row of kBytes with kHeaderUnits units of 8 bytes in front.
template <u32 kBytes, u32 kHeaderUnits>
struct Wire {
  static constexpr u32 kUnits = kBytes / 16;
  static constexpr u32 kChunks = (kUnits + kChunkUnits - 1) / kChunkUnits;
  static constexpr u32 kHeaderBytes = (kHeaderUnits + 1) / 2 * 16;
  static constexpr u32 kSlotBytes = kChunks * kPrefixBytes + kHeaderBytes + kBytes;

  __device__ static u64 chunk(u64 slot, u32 c) {
    return slot + static_cast<u64>(c) * (kPrefixBytes + config::kChunkBytes) + (c == 0 ? 0 : kHeaderBytes);
  }
  __device__ static u64* header(u64 slot) { return reinterpret_cast<u64*>(slot + kPrefixBytes); }
  __device__ static u64x2* body(u64 slot, u32 c) {
    return reinterpret_cast<u64x2*>(chunk(slot, c) + kPrefixBytes + (c == 0 ? kHeaderBytes : 0));
  }
  __device__ static u32 units(u32 c) { return min(kChunkUnits, kUnits - c * kChunkUnits); }
};

// The units of a chunk that one lane holds: number lane, lane + 32, ...
struct LaneUnits {
  u64x2 unit[kLaneUnits];
};

__device__ inline bool is_empty(const u64x2& unit) {
  return unit.a == kEmpty || unit.b == kEmpty;
}

// The whole warp votes: 0 where no unit looks like the sentinel, else the first key that hides all that do. A key
// fails for at most one value of each half, so one of the first 2 n + 1 works.
__device__ inline u64 choose_key(const LaneUnits& data, u32 units) {
  u32 lane = threadIdx.x % 32;
  for (u64 key = 0;; ++key) {
    bool hit = false;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      u64x2 unit = {data.unit[i].a ^ key, data.unit[i].b ^ key};
      hit |= lane + 32 * i < units && is_empty(unit);
    }
    if (!__any_sync(kWarp, hit)) return key;
  }
}

__device__ inline void send_units(u64x2* body, const LaneUnits& data, u32 units, u64 key) {
  u32 lane = threadIdx.x % 32;
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) {
    if (lane + 32 * i < units) {
      store_relaxed_system(body + lane + 32 * i, u64x2{data.unit[i].a ^ key, data.unit[i].b ^ key});
    }
  }
}

enum class Poll { kArrived, kNothing, kGivenUp };

// The whole warp waits for one chunk: each lane polls its own units, lane 0 the key as well, and `header_missing()` says
// whether header units of this lane are outstanding. A slot without a token shows in the key; nothing else of it was
// written, so nothing else is waited for. On arrival `data` holds the units with the key undone.
template <class HeaderMissing>
__device__ inline Poll await_chunk(const Step& step, u32 suspect, const u64* key_word, const u64x2* body, u32 units,
                                   LaneUnits& data, HeaderMissing header_missing) {
  u32 lane = threadIdx.x % 32;
  Deadline deadline;
  for (;;) {
    u64 key = lane == 0 ? load_relaxed_system(key_word) : 0ull;
    bool missing = header_missing();
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < units) {
        data.unit[i] = load_relaxed_system(body + lane + 32 * i);
        missing |= is_empty(data.unit[i]);
      }
    }
    key = __shfl_sync(kWarp, key, 0);
    if (key == kUnrouted) return Poll::kNothing;
    if (!__any_sync(kWarp, missing || key == kEmpty)) {
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
        data.unit[i].a ^= key;
        data.unit[i].b ^= key;
      }
      return Poll::kArrived;
    }
    bool stop = lane == 0 ? deadline.passed(step, suspect) : false;
    if (lane != 0) spin_pause();
    if (__any_sync(kWarp, stop)) return Poll::kGivenUp;
  }
}

// Write the sentinel back where a chunk was read.
__device__ inline void rearm_chunk(u64* key_word, u64x2* body, u32 units) {
  u32 lane = threadIdx.x % 32;
  if (lane == 0) store_relaxed_system(key_word, kEmpty);
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) {
    if (lane + 32 * i < units) store_relaxed_system(body + lane + 32 * i, u64x2{kEmpty, kEmpty});
  }
}

}  // namespace nvep
