// Dispatch over peer load/store under Sentinel. A slot is its token's index; chunks are pushed into the target's wire of
// this epoch's generation. What a rank sends to itself lands at once.
#pragma once
#include "transports/nvlink_sentinel_landing.cuh"

namespace nvep {

struct NvlinkSentinelDispatch : NvlinkSentinelLanding {
  // A chunk of a token as loaded: nothing here depends on the step.
  struct TokenChunk {
    LaneUnits data;
    RawIds ids;
    float weight[LaneIds::kLoads];
  };

  // The warp of chunk 0 has the header to send: another one keeps the routes.
  static constexpr u32 kRoutesChunk = DispatchWire::kChunks > 1 ? 1 : 0;

  // The first chunk of this warp, loaded while the step's own words are on their way.
  template <class Arguments>
  __device__ static TokenChunk dispatch_ahead(const Arguments& a) {
    TokenChunk chunk = {};
    u32 work = warp_index();
    if (work < a.num_tokens * DispatchWire::kChunks) load_chunk(a, work, chunk);
    return chunk;
  }

  template <class Arguments>
  __device__ static void load_chunk(const Arguments& a, u32 work, TokenChunk& chunk) {
    u32 token = work / DispatchWire::kChunks, c = work % DispatchWire::kChunks, lane = threadIdx.x % 32;
    load_lane_ids(a, token, chunk.ids);
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      u32 unit = c * kChunkUnits + lane + 32 * i;
      if (lane + 32 * i < DispatchWire::units(c)) {
        chunk.data.unit[i] = *payload_unit<0>(token, unit, [&](u32 p) { return a.payloads[p]; });
      }
    }
#pragma unroll
    for (u32 i = 0; i < LaneIds::kLoads; ++i) {
      u32 k = lane + 32 * i;
      chunk.weight[i] = c == 0 && k < config::kTopK ? a.expert_weights[token * config::kTopK + k] : 0.0f;
    }
  }

  template <class Arguments>
  __device__ static void dispatch_send(const Arguments& a, const Step& step, TokenChunk& chunk, const Shared&) {
    if (!step.alive) return;
    u32 tokens = token_count(a);
    if (warp_index() == warp_count() - 1) announce(step, tokens);
    if (is_last_thread()) close_dispatch_send(a, step, tokens);
    u32 total = tokens * DispatchWire::kChunks;
    for (u32 work = warp_index(); work < total;) {
      send_chunk(a, step, work / DispatchWire::kChunks, work % DispatchWire::kChunks, chunk);
      work += warp_count();
      if (work < total) load_chunk(a, work, chunk);
    }
  }

  // One warp. Under strict PTX the re-arm stores of earlier grids are ordered before the record by release and acquire,
  // otherwise by the axiom on completed grids.
  __device__ static void announce(const Step& step, u32 tokens) {
    if constexpr (config::kStrictPtx) fence_acq_rel_system();
    for (u32 r = threadIdx.x % 32; r < config::kRanks; r += 32) {
      if (step.active.has(r)) {
        store_relaxed_system(dispatch_record(step.lane_of(r), step.rank, step.epoch),
                             make_record(step.epoch, tokens, Protocol::kCode));
      }
    }
  }

  template <class Arguments>
  __device__ static void send_chunk(const Arguments& a, const Step& step, u32 token, u32 c, const TokenChunk& chunk) {
    u32 lane = threadIdx.x % 32, units = DispatchWire::units(c);
    LaneIds ids;
    u32 bad = check_lane_ids(a, chunk.ids, ids);
    RankSet set = targets_of(ids, a.expert_ranks);
    u64 key = choose_key(chunk.data, units);
    u64 header[kHeaderLoads];
#pragma unroll
    for (u32 i = 0; i < kHeaderLoads; ++i) header[i] = make_header(ids.id[i], chunk.weight[i]);
    bool dropped = false;
    set.for_each([&](u32 r) {
      if (r == step.rank) return;
      if (!step.active.has(r)) {
        dropped = true;
        return;
      }
      u64 slot = dispatch_slot(step.lane_of(r), step.epoch, step.rank, token);
      send_units(DispatchWire::body(slot, c), chunk.data, units, key);
      if (lane == 0) store_relaxed_system(reinterpret_cast<u64*>(DispatchWire::chunk(slot, c)), key);
      if (c == 0) send_header(slot, header);
    });
    for (u32 r = lane; r < config::kRanks; r += 32) {
      if (set.has(r) || r == step.rank || !step.active.has(r)) continue;
      u64 slot = dispatch_slot(step.lane_of(r), step.epoch, step.rank, token);
      store_relaxed_system(reinterpret_cast<u64*>(DispatchWire::chunk(slot, c)), kUnrouted);
    }
    land_own(step, token, c, set.has(step.rank), header, chunk.data);
    if (c != kRoutesChunk) return;
    keep_routes(step, token, set);
    if (lane == 0) {
      if (bad) fetch_add_relaxed_device(&step.counters()->invalid_ids, bad);
      if (dropped) fetch_add_relaxed_device(&step.counters()->dropped_tokens, 1u);
    }
  }

  __device__ static void send_header(u64 slot, const u64 (&header)[kHeaderLoads]) {
#pragma unroll
    for (u32 i = 0; i < kHeaderLoads; ++i) {
      u32 k = threadIdx.x % 32 + 32 * i;
      if (k < config::kTopK) store_relaxed_system(DispatchWire::header(slot) + k, header[i]);
    }
  }

  // What this rank sends to itself needs no wire: the landing buffers are its own, and nobody reads them before D.recv.
  __device__ static void land_own(const Step& step, u32 token, u32 c, bool here, const u64 (&header)[kHeaderLoads],
                                  const LaneUnits& data) {
    u32 row = step.rank * config::kMaxTokens + token;
    if (here) {
      if (c == 0) land_header(step, row, header);
      land_units(step, row, c, data);
    } else if (c == 0) {
      land_nothing(step, row);
    }
  }

  // C.recv needs the targets by position: j counts masked ranks too, and a slot below 0 says not to wait for one.
  __device__ static void keep_routes(const Step& step, u32 token, const RankSet& set) {
    Route* routes = step.local_region<Route>(local::kRoutesOffset) + static_cast<u64>(token) * config::kMaxTargets;
    for (u32 r = threadIdx.x % 32; r < config::kRanks; r += 32) {
      if (set.has(r)) routes[set.below(r)] = {static_cast<i32>(r), step.active.has(r) ? static_cast<i32>(token) : -1};
    }
    for (u32 j = set.below(config::kRanks) + threadIdx.x % 32; j < config::kMaxTargets; j += 32) routes[j] = {-1, -1};
  }
};

}  // namespace nvep
