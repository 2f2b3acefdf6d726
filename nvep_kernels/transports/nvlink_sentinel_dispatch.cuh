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
    if (DispatchWire::is_header(c)) {
#pragma unroll
      for (u32 i = 0; i < LaneIds::kLoads; ++i) {
        u32 k = min(lane + 32 * i, config::kTopK - 1);
        chunk.weight[i] = a.expert_weights[token * config::kTopK + k];
      }
      return;
    }
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < DispatchWire::units(c)) {
        u32 unit = DispatchWire::first(c) + lane + 32 * i;
        chunk.data.unit[i] = *payload_unit<0>(token, unit, [&](u32 p) { return a.payloads[p]; });
      }
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
      send_token(a, step, work / DispatchWire::kChunks, work % DispatchWire::kChunks, chunk);
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

  // A chunk of a token to every rank: its units to those that own one of the token's experts, a word to the others.
  template <class Arguments>
  __device__ static void send_token(const Arguments& a, const Step& step, u32 token, u32 c, TokenChunk& chunk) {
    u32 units = DispatchWire::units(c);
    RankSet set;
    if (DispatchWire::is_header(c)) {
      LaneIds ids;
      u32 bad = check_lane_ids(a, chunk.ids, ids);
      set = targets_of(ids, a.expert_ranks);
      make_header(ids, chunk);
      keep_routes(step, token, set);
      count_refused(step, bad, set);
    } else {
      set = targets_of(valid_lane_ids(a, chunk.ids), a.expert_ranks);
    }
    u64 key = choose_key(chunk.data, units);
    for (u32 w = 0; w < kMaskWords; ++w) set.bits[w] &= step.active.bits[w];
    set.for_each([&](u32 r) {
      if (r == step.rank) return;
      u64 slot = dispatch_slot(step.lane_of(r), step.epoch, step.rank, token);
      send_chunk(DispatchWire::key(slot, c), chunk.data, units, key);
    });
    for (u32 r = threadIdx.x % 32; r < config::kRanks; r += 32) {
      if (set.has(r) || r == step.rank || !step.active.has(r)) continue;
      u64 slot = dispatch_slot(step.lane_of(r), step.epoch, step.rank, token);
      store_relaxed_system(DispatchWire::key(slot, c), kUnrouted);
    }
    // What this rank sends to itself needs no wire: the landing buffers are its own, and nobody reads them before D.recv.
    u32 row = step.rank * config::kMaxTokens + token;
    if (set.has(step.rank)) {
      land(step, row, c, chunk.data);
    } else if (DispatchWire::is_header(c)) {
      land_nothing(step, row);
    }
  }

  // Pairs from the lanes that hold them to the lane that sends them, weights in the high half.
  __device__ static void make_header(const LaneIds& ids, TokenChunk& chunk) {
    u64 pair[2] = {};
#pragma unroll
    for (u32 i = 0; i < LaneIds::kLoads; ++i) {
      u32 mine = static_cast<u32>(ids.id[i]), weight = __float_as_uint(chunk.weight[i]);
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        u32 k = threadIdx.x % 32 * 2 + h;
        u64 id = __shfl_sync(kWarp, mine, static_cast<int>(k % 32));
        u64 high = __shfl_sync(kWarp, weight, static_cast<int>(k % 32));
        if (k / 32 == i && k < config::kTopK) pair[h] = id | (high << 32);
      }
    }
    chunk.data.unit[0] = {pair[0], pair[1]};
  }

  __device__ static void count_refused(const Step& step, u32 bad, const RankSet& set) {
    u32 dropped = 0;
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) dropped |= set.bits[w] & ~step.active.bits[w];
    if (threadIdx.x % 32 != 0) return;
    if (bad) fetch_add_relaxed_device(&step.counters()->invalid_ids, bad);
    if (dropped) fetch_add_relaxed_device(&step.counters()->dropped_tokens, 1u);
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
