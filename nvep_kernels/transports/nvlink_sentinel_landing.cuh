// The receiving end of dispatch under Sentinel: where chunks lie on the wire, and how they land in private buffers.
#pragma once
#include "protocols/sentinel.cuh"
#include "transports/lane_ids.cuh"
#include "transports/nvlink.cuh"

namespace nvep {

struct NvlinkSentinelShared {};  // warps work alone

// A header unit: id in the low half, never the sentinel's half, since it is valid or -1; weight in the high half.
__device__ inline u64 make_header(i32 id, float weight) {
  return static_cast<u32>(id < 0 ? -1 : id) | (static_cast<u64>(__float_as_uint(weight)) << 32);
}

struct NvlinkSentinelLanding : NvlinkStep {
  using Protocol = Sentinel;
  using Shared = NvlinkSentinelShared;
  using DispatchWire = Wire<config::kTokenBytes, config::kTopK>;

  static constexpr u32 kHeaderLoads = LaneIds::kLoads;

  __device__ static u32 warp_index() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }
  __device__ static u32 warp_count() { return gridDim.x * blockDim.x / 32; }

  __device__ static u64 dispatch_slot(u64 lane, u32 epoch, u32 source, u32 token) {
    u32 slot = ((epoch & 1u) * config::kRanks + source) * config::kMaxTokens + token;
    return lane + heap::kDispatchWireOffset + static_cast<u64>(slot) * DispatchWire::kSlotBytes;
  }
  __device__ static u64 landing_ids(const Step& step) { return step.local + local::kLandingIdsOffset; }

  // Address of a unit of a row's concatenated payloads in arrays that hold one payload each.
  template <u32 kPayload, class Base>
  __device__ static u64x2* payload_unit(u32 row, u32 unit, Base base) {
    constexpr u32 bytes = config::payload_bytes(kPayload), units = bytes / 16;
    if constexpr (kPayload + 1 < config::kPayloads) {
      if (unit >= units) return payload_unit<kPayload + 1>(row, unit - units, base);
    }
    return reinterpret_cast<u64x2*>(base(kPayload) + static_cast<u64>(row) * bytes) + unit;
  }

  // --- D.recv ---------------------------------------------------------------------------------------------------------

  // Chunks are numbered by token, then source (this rank left out), then place in the row, so that a warp knows its first
  // one before any count has arrived.
  static constexpr u32 kTokenWork = (config::kRanks - 1) * DispatchWire::kChunks;

  struct Place {
    u32 token, source, chunk;
  };
  __device__ static Place place_of(const Step& step, u32 work) {
    constexpr u32 token_work = kTokenWork != 0 ? kTokenWork : 1;  // a rank alone has none
    u32 other = work % token_work / DispatchWire::kChunks;
    return {work / token_work, other + (other >= step.rank ? 1u : 0u), work % DispatchWire::kChunks};
  }

  __device__ static void dispatch_recv(const Step& step, const Shared&) {
    Records records;
    bool alive = step.alive && land_all(step, records);
    if (!alive) records.clear();  // outputs are undefined; ids are valid or invalid, never out of range
    u32* ids = reinterpret_cast<u32*>(landing_ids(step));
    constexpr u32 per_source = config::kMaxTokens * config::kTopK;
    for (u32 r = 0; r < config::kRanks; ++r, ids += per_source) {
      u32 first = records.count(r) * config::kTopK + blockIdx.x * blockDim.x + threadIdx.x;
      for (u32 i = first; i < per_source; i += gridDim.x * blockDim.x)
        ids[i] = static_cast<u32>(config::kInvalidExpert);
    }
    if (warp_index() == warp_count() - 1) records.keep_counts(step.local_region<i32>(local::kCountsOffset));
  }

  // False in a warp that gave up.
  __device__ static bool land_all(const Step& step, Records& records) {
    u32 work = warp_index();
    Incoming chunk;
    u64 header[kHeaderLoads];
    expect_all(chunk, header);
    if (work < config::kMaxTokens * kTokenWork) look_at(step, place_of(step, work), chunk, header);
    auto where = [&](u32 r) { return dispatch_record(step.lane_of(step.rank), r, step.epoch); };
    if (!records.await_all(step, where)) return false;
    for (u32 total = records.most() * kTokenWork; work < total; work += warp_count()) {
      Place place = place_of(step, work);
      if (place.token >= records.count(place.source)) continue;
      if (!land_chunk(step, place, chunk, header)) return false;
      expect_all(chunk, header);
    }
    return true;
  }

  __device__ static void expect_all(Incoming& chunk, u64 (&header)[kHeaderLoads]) {
    expect(chunk);
#pragma unroll
    for (u32 i = 0; i < kHeaderLoads; ++i) header[i] = kEmpty;
  }

  // One look at what this lane misses of a chunk. True if it still misses something.
  __device__ static bool look_at(const Step& step, const Place& place, Incoming& chunk, u64 (&header)[kHeaderLoads]) {
    u64 slot = dispatch_slot(step.lane_of(step.rank), step.epoch, place.source, place.token);
    bool missing = place.chunk == 0 && look_at_header(slot, header);
    const u64* key_word = reinterpret_cast<const u64*>(DispatchWire::chunk(slot, place.chunk));
    return look(key_word, DispatchWire::body(slot, place.chunk), DispatchWire::units(place.chunk), 0, chunk) || missing;
  }

  // The whole warp waits for a chunk. A slot without a token shows in the key; nothing else of it was written, so nothing
  // else is waited for.
  __device__ static bool land_chunk(const Step& step, const Place& place, Incoming& chunk,
                                    u64 (&header)[kHeaderLoads]) {
    u32 row = place.source * config::kMaxTokens + place.token;
    u64 slot = dispatch_slot(step.lane_of(step.rank), step.epoch, place.source, place.token);
    u64* key_word = reinterpret_cast<u64*>(DispatchWire::chunk(slot, place.chunk));
    Deadline deadline;
    while (__any_sync(kWarp, look_at(step, place, chunk, header))) {
      if (__any_sync(kWarp, threadIdx.x % 32 == 0 && chunk.key == kUnrouted)) {
        if (place.chunk == 0) land_nothing(step, row);
        if (threadIdx.x % 32 == 0) store_relaxed_system(key_word, kEmpty);
        return true;
      }
      if (deadline.passed_for_warp(step, [&] { return place.source; })) return false;
    }
    undo_key(chunk.data, __shfl_sync(kWarp, chunk.key, 0));
    if (place.chunk == 0) {
      land_header(step, row, header);
      rearm_header(slot);
    }
    land_units(step, row, place.chunk, chunk.data);
    rearm_chunk(key_word, DispatchWire::body(slot, place.chunk), DispatchWire::units(place.chunk), 0);
    return true;
  }

  // One look at the header units that this lane misses. True if it still misses one.
  __device__ static bool look_at_header(u64 slot, u64 (&header)[kHeaderLoads]) {
    bool missing = false;
#pragma unroll
    for (u32 i = 0; i < kHeaderLoads; ++i) {
      u32 k = threadIdx.x % 32 + 32 * i;
      if (k < config::kTopK && header[i] == kEmpty) header[i] = load_relaxed_system(DispatchWire::header(slot) + k);
      missing |= k < config::kTopK && header[i] == kEmpty;
    }
    return missing;
  }

  __device__ static void land_header(const Step& step, u32 row, const u64 (&header)[kHeaderLoads]) {
    i32* ids = reinterpret_cast<i32*>(landing_ids(step)) + static_cast<u64>(row) * config::kTopK;
    float* weights = step.local_region<float>(local::kLandingWeightsOffset) + static_cast<u64>(row) * config::kTopK;
#pragma unroll
    for (u32 i = 0; i < kHeaderLoads; ++i) {
      u32 k = threadIdx.x % 32 + 32 * i;
      if (k < config::kTopK) {
        i32 id = static_cast<i32>(static_cast<u32>(header[i]));
        ids[k] = id < 0 ? config::kInvalidExpert : id;
        weights[k] = __uint_as_float(static_cast<u32>(header[i] >> 32));
      }
    }
  }

  __device__ static void rearm_header(u64 slot) {
    for (u32 k = threadIdx.x % 32; k < config::kTopK; k += 32)
      store_relaxed_system(DispatchWire::header(slot) + k, kEmpty);
  }

  __device__ static void land_units(const Step& step, u32 row, u32 c, const LaneUnits& data) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < DispatchWire::units(c)) {
        *payload_unit<0>(row, c * kChunkUnits + lane + 32 * i,
                         [&](u32 p) { return step.local + config::payload_offset(p); }) = data.unit[i];
      }
    }
  }

  __device__ static void land_nothing(const Step& step, u32 row) {
    i32* ids = reinterpret_cast<i32*>(landing_ids(step)) + static_cast<u64>(row) * config::kTopK;
    for (u32 k = threadIdx.x % 32; k < config::kTopK; k += 32) ids[k] = config::kInvalidExpert;
  }
};

}  // namespace nvep
