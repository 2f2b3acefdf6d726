// Sentinel: data carries its own validity. Wire memory is filled with a word that never travels; a unit has arrived when
// it holds anything else. Whoever reads a unit writes the sentinel back.
//
// A slot's header is one chunk, its payload is cut into more, and each is sent and received by one warp:
//   [key 8 B][8 B never written, never polled][units of 16 B, each half XOR key]
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

// Wire form of a row of kBytes behind a header of kHeaderBytes (0: none): chunk 0 is the header, if there is one.
template <u32 kBytes, u32 kHeaderBytes>
struct Wire {
  static constexpr u32 kUnits = kBytes / 16;
  static constexpr u32 kHeaders = kHeaderBytes != 0 ? 1 : 0;
  static constexpr u32 kHeaderSpace = kHeaders * (kPrefixBytes + kHeaderBytes);
  static constexpr u32 kChunks = kHeaders + (kUnits + kChunkUnits - 1) / kChunkUnits;
  static constexpr u32 kSlotBytes = kHeaderSpace + (kChunks - kHeaders) * kPrefixBytes + kBytes;

  __device__ static bool is_header(u32 c) { return kHeaders != 0 && c == 0; }
  __device__ static u64* key(u64 slot, u32 c) {
    u32 offset = kHeaderSpace + (c - kHeaders) * (kPrefixBytes + config::kChunkBytes);
    return reinterpret_cast<u64*>(slot + (is_header(c) ? 0 : offset));
  }
  // Units of the row before those of chunk c.
  __device__ static u32 first(u32 c) { return (c - kHeaders) * kChunkUnits; }
  __device__ static u32 units(u32 c) {
    if (is_header(c)) return kHeaderBytes / 16;
    return kUnits % kChunkUnits == 0 ? kChunkUnits : min(kChunkUnits, kUnits - first(c));
  }
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

__device__ inline void send_chunk(u64* key_word, const LaneUnits& data, u32 units, u64 key) {
  u32 lane = threadIdx.x % 32;
  u64x2* body = reinterpret_cast<u64x2*>(key_word) + 1;
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) {
    if (lane + 32 * i < units) {
      store_relaxed_system(body + lane + 32 * i, u64x2{data.unit[i].a ^ key, data.unit[i].b ^ key});
    }
  }
  if (lane == 0) store_relaxed_system(key_word, key);
}

// What a lane has seen of a chunk on its way; lane 0 watches the key as well.
struct Incoming {
  u64 key;
  LaneUnits data;
};

__device__ inline void expect(Incoming& chunk) {
  chunk.key = kEmpty;
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) chunk.data.unit[i] = {kEmpty, kEmpty};
}

// One look at what this lane misses. True if it still misses something. `watcher` is the lane that watches the key.
__device__ inline bool look(const u64* key_word, u32 units, u32 watcher, Incoming& chunk) {
  u32 lane = threadIdx.x % 32;
  const u64x2* body = reinterpret_cast<const u64x2*>(key_word) + 1;
  if (lane == watcher && chunk.key == kEmpty) chunk.key = load_relaxed_system(key_word);
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) {
    bool missing = lane + 32 * i < units && is_empty(chunk.data.unit[i]);
    if (missing) chunk.data.unit[i] = load_relaxed_system(body + lane + 32 * i);
  }
  bool missing = lane == watcher && chunk.key == kEmpty;
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) missing |= lane + 32 * i < units && is_empty(chunk.data.unit[i]);
  return missing;
}

__device__ inline void undo_key(LaneUnits& data, u64 key) {
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) {
    data.unit[i].a ^= key;
    data.unit[i].b ^= key;
  }
}

// Write the sentinel back where a chunk was read.
__device__ inline void rearm_chunk(u64* key_word, u32 units, u32 watcher) {
  u32 lane = threadIdx.x % 32;
  u64x2* body = reinterpret_cast<u64x2*>(key_word) + 1;
  if (lane == watcher) store_relaxed_system(key_word, kEmpty);
#pragma unroll
  for (u32 i = 0; i < kLaneUnits; ++i) {
    if (lane + 32 * i < units) store_relaxed_system(body + lane + 32 * i, u64x2{kEmpty, kEmpty});
  }
}

// The records of a step as one warp sees them: lane r holds those of ranks r, r + 32, ...
struct Records {
  static constexpr u32 kLoads = (config::kRanks + 31) / 32;
  u64 word[kLoads];
  u32 tokens[kLoads];  // slots to expect, once all have arrived

  // The whole warp waits for every peer that takes part; masked ones send nothing. `where(rank)` is the record's address.
  template <class Where>
  __device__ bool await_all(const Step& step, Where where) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) word[i] = make_record(step.epoch + 1, 0, 0);
    Deadline deadline;
    for (;;) {
      bool missing = false;
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) {
        u32 r = lane + 32 * i;
        if (r >= config::kRanks || !step.active.has(r)) {
          word[i] = make_record(step.epoch, 0, Sentinel::kCode);
        } else if (record_epoch(word[i]) != step.epoch) {
          word[i] = load_relaxed_system(where(r));
          if constexpr (Sentinel::kAcquires) {
            if (record_epoch(word[i]) == step.epoch) word[i] = load_acquire_system(where(r));
          }
        }
      }
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) missing |= record_epoch(word[i]) != step.epoch;
      if (!__any_sync(kWarp, missing)) break;
      if (deadline.passed_for_warp(step, [&] { return first_missing(step); })) return false;
    }
    bool wrong = false;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      tokens[i] = min(record_count(word[i]), static_cast<u32>(config::kMaxTokens));
      if (record_protocol(word[i]) == Sentinel::kCode) continue;
      report_protocol(post_of(step), lane + 32 * i);
      wrong = true;
    }
    return !__any_sync(kWarp, wrong);
  }

  __device__ u32 first_missing(const Step& step) const {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      u32 missing = __ballot_sync(kWarp, record_epoch(word[i]) != step.epoch);
      if (missing != 0) return 32 * i + static_cast<u32>(__ffs(static_cast<int>(missing))) - 1;
    }
    return step.rank;
  }

  // Slots to expect from a source; all lanes call this alike.
  __device__ u32 count(u32 source) const {
    u32 result = __shfl_sync(kWarp, tokens[0], static_cast<int>(source % 32));
#pragma unroll
    for (u32 i = 1; i < kLoads; ++i) {
      u32 later = __shfl_sync(kWarp, tokens[i], static_cast<int>(source % 32));
      result = source / 32 == i ? later : result;
    }
    return result;
  }

  __device__ u32 most() const {
    u32 result = 0;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) result = max(result, __reduce_max_sync(kWarp, tokens[i]));
    return result;
  }

  __device__ void clear() {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) tokens[i] = 0;
  }

  __device__ void keep_counts(i32* counts) const {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      u32 r = threadIdx.x % 32 + 32 * i;
      if (r < config::kRanks) counts[r] = static_cast<i32>(tokens[i]);
    }
  }
};

}  // namespace nvep
