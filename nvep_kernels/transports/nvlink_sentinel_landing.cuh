// The receiving end of dispatch under Sentinel: where chunks lie on the wire, and how they land in private buffers.
#pragma once
#include "protocols/sentinel.cuh"
#include "transports/lane_ids.cuh"
#include "transports/nvlink.cuh"

namespace nvep {

struct NvlinkSentinelShared {};  // warps work alone

struct NvlinkSentinelLanding : NvlinkStep {
  using Protocol = Sentinel;
  using Shared = NvlinkSentinelShared;
  // A header unit holds two pairs of id and weight; unit l is that of pairs 2 l and 2 l + 1.
  static constexpr u32 kHeaderUnits = (config::kTopK + 1) / 2;
  using DispatchWire = Wire<config::kTokenBytes, kHeaderUnits * 16>;

  // Neighbours by number are on different multiprocessors: where few warps have work, each is fast.
  __device__ static u32 warp_index() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }
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

  // Chunks are numbered by token, then source (this rank left out), then place in the slot, so that a warp knows its
  // first one before any count has arrived.
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
    expect(chunk);
    if (work < config::kMaxTokens * kTokenWork) look_at(step, place_of(step, work), chunk);
    auto where = [&](u32 r) { return dispatch_record(step.lane_of(step.rank), r, step.epoch); };
    if (!records.await_all(step, where)) return false;
    for (u32 total = records.most() * kTokenWork; work < total; work += warp_count()) {
      Place place = place_of(step, work);
      bool there = place.token < records.count(place.source);
      if (there && !land_chunk(step, place, chunk)) return false;
      expect(chunk);  // also where the first look saw what a rank sent that is masked by now
    }
    return true;
  }

  __device__ static u64* wire_of(const Step& step, const Place& place) {
    u64 slot = dispatch_slot(step.lane_of(step.rank), step.epoch, place.source, place.token);
    return DispatchWire::key(slot, place.chunk);
  }

  // One look at what this lane misses of a chunk. True if it still misses something.
  __device__ static bool look_at(const Step& step, const Place& place, Incoming& chunk) {
    return look(wire_of(step, place), DispatchWire::units(place.chunk), 0, chunk);
  }

  // The whole warp waits for a chunk. A slot without a token shows in the key; nothing else of it was written, so nothing
  // else is waited for.
  __device__ static bool land_chunk(const Step& step, const Place& place, Incoming& chunk) {
    u32 row = place.source * config::kMaxTokens + place.token;
    Deadline deadline;
    while (__any_sync(kWarp, look_at(step, place, chunk))) {
      if (__any_sync(kWarp, threadIdx.x % 32 == 0 && chunk.key == kUnrouted)) {
        if (DispatchWire::is_header(place.chunk)) land_nothing(step, row);
        if (threadIdx.x % 32 == 0) store_relaxed_system(wire_of(step, place), kEmpty);
        return true;
      }
      if (deadline.passed_for_warp(step, [&] { return place.source; })) return false;
    }
    undo_key(chunk.data, __shfl_sync(kWarp, chunk.key, 0));
    land(step, row, place.chunk, chunk.data);
    rearm_chunk(wire_of(step, place), DispatchWire::units(place.chunk), 0);
    return true;
  }

  __device__ static void land(const Step& step, u32 row, u32 c, const LaneUnits& data) {
    if (DispatchWire::is_header(c)) {
      land_header(step, row, data.unit[0]);
    } else {
      land_units(step, row, DispatchWire::first(c), DispatchWire::units(c), data);
    }
  }

  __device__ static void land_header(const Step& step, u32 row, const u64x2& unit) {
    i32* ids = reinterpret_cast<i32*>(landing_ids(step)) + static_cast<u64>(row) * config::kTopK;
    float* weights = step.local_region<float>(local::kLandingWeightsOffset) + static_cast<u64>(row) * config::kTopK;
    u64 pair[2] = {unit.a, unit.b};
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      u32 k = threadIdx.x % 32 * 2 + i;
      if (k < config::kTopK) {
        i32 id = static_cast<i32>(static_cast<u32>(pair[i]));
        ids[k] = id < 0 ? config::kInvalidExpert : id;
        weights[k] = __uint_as_float(static_cast<u32>(pair[i] >> 32));
      }
    }
  }

  __device__ static void land_units(const Step& step, u32 row, u32 first, u32 units, const LaneUnits& data) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < units) {
        *payload_unit<0>(row, first + lane + 32 * i, [&](u32 p) { return step.local + config::payload_offset(p); }) =
            data.unit[i];
      }
    }
  }

  __device__ static void land_nothing(const Step& step, u32 row) {
    i32* ids = reinterpret_cast<i32*>(landing_ids(step)) + static_cast<u64>(row) * config::kTopK;
    for (u32 k = threadIdx.x % 32; k < config::kTopK; k += 32) ids[k] = config::kInvalidExpert;
  }
};

}  // namespace nvep
