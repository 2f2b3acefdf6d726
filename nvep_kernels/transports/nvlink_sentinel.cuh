// Peer load/store under Sentinel: combine pushes partial rows into the source's [token][j] wire, where they are summed
// as they arrive.
#pragma once
#include "formats/partial.cuh"
#include "transports/nvlink_sentinel_dispatch.cuh"

namespace nvep {

template <class Partial>
struct NvlinkSentinel : NvlinkSentinelDispatch {
  using CombineWire = Wire<config::kPartialBytes, 0>;

  __device__ static u64 combine_slot(u64 lane, u32 token, u32 j) {
    u64 slot = static_cast<u64>(token) * config::kMaxTargets + j;
    return lane + heap::kCombineWireOffset + slot * CombineWire::kSlotBytes;
  }

  // --- C.send ---------------------------------------------------------------------------------------------------------

  // In a joined launch C.recv takes this rank's own partial rows where they are.
  template <class Arguments>
  __device__ static void combine_send(const Arguments& a, const Step& step, const Shared&) {
    if (!step.alive) return;
    u32 most = most_tokens(step);
    constexpr u32 token_work = config::kRanks * CombineWire::kChunks;
    for (u32 work = warp_index(); work < most * token_work; work += warp_count()) {
      u32 source = work % token_work / CombineWire::kChunks;
      if (step.joined && source == step.rank) continue;
      send_partial_chunk(a, step, source, work / token_work, work % CombineWire::kChunks);
    }
  }

  // Of all sources. A row beyond its source's count has invalid ids.
  __device__ static u32 most_tokens(const Step& step) {
    const i32* counts = step.local_region<i32>(local::kCountsOffset);
    i32 most = 0;
#pragma unroll 8
    for (u32 r = 0; r < config::kRanks; ++r) most = max(most, counts[r]);
    return static_cast<u32>(most);
  }

  template <class Arguments>
  __device__ static void send_partial_chunk(const Arguments& a, const Step& step, u32 source, u32 token, u32 c) {
    u32 row = source * config::kMaxTokens + token;
    const i32* landed = reinterpret_cast<const i32*>(landing_ids(step)) + static_cast<u64>(row) * config::kTopK;
    TokenIds ids;
#pragma unroll
    for (u32 k = 0; k < config::kTopK; ++k) ids.id[k] = landed[k];
    LaneUnits data;  // loaded beside the ids: where no token is, in vain
    load_partial(a, row, c, data);
    RankSet set = targets_of(ids, a.expert_ranks);
    if (!set.has(step.rank)) return;  // no token here: its ids are all invalid
    u32 units = CombineWire::units(c);
    u64 key = choose_key(data, units);
    u64 slot = combine_slot(step.lane_of(source), token, set.below(step.rank));
    if (threadIdx.x % 32 == 0) store_relaxed_system(reinterpret_cast<u64*>(CombineWire::chunk(slot, c)), key);
    send_units(CombineWire::body(slot, c), data, units, key);
  }

  template <class Arguments>
  __device__ static void load_partial(const Arguments& a, u32 row, u32 c, LaneUnits& data) {
    u32 lane = threadIdx.x % 32;
    const u64x2* from = reinterpret_cast<const u64x2*>(a.partial_rows) + static_cast<u64>(row) * CombineWire::kUnits;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < CombineWire::units(c)) data.unit[i] = from[c * kChunkUnits + lane + 32 * i];
    }
  }

  // --- C.recv ---------------------------------------------------------------------------------------------------------

  // Targets that are watched at once; a lane each watches a key.
  static constexpr u32 kWatched = config::kMaxTargets < 2 ? 1 : 2;

  template <class Arguments>
  __device__ static void combine_recv(const Arguments& a, const Step& step, const Shared&) {
    complete(step);
    if (!step.alive) return;
    u32 total = step.counters()->tokens * CombineWire::kChunks;
    for (u32 work = warp_index(); work < total; work += warp_count()) {
      if (!sum_chunk(a, step, work / CombineWire::kChunks, work % CombineWire::kChunks)) return;
    }
  }

  // One chunk of one output row: targets ascending, in float32, rounded once; -0 is the identity of addition.
  template <class Arguments>
  __device__ static bool sum_chunk(const Arguments& a, const Step& step, u32 token, u32 c) {
    const Route* routes =
        step.local_region<Route>(local::kRoutesOffset) + static_cast<u64>(token) * config::kMaxTargets;
    bool any = false;
#pragma unroll
    for (u32 j = 0; j < config::kMaxTargets; ++j) any |= routes[j].slot >= 0;
    float sum[kLaneUnits][Partial::kElements];
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
#pragma unroll
      for (int e = 0; e < Partial::kElements; ++e) sum[i][e] = any ? -0.0f : 0.0f;
    }
#pragma unroll 1
    for (u32 j = 0; j < config::kMaxTargets; j += kWatched) {
      if (!add_targets(a, step, routes, token, c, j, sum)) return false;
    }
    u32 lane = threadIdx.x % 32;
    uint4* out = reinterpret_cast<uint4*>(a.output) + static_cast<u64>(token) * CombineWire::kUnits + c * kChunkUnits;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < CombineWire::units(c)) out[lane + 32 * i] = Partial::round(sum[i]);
    }
    return true;
  }

  // Waits for the partial rows of targets first, first + 1, ... together, and adds them in order.
  template <class Arguments>
  __device__ static bool add_targets(const Arguments& a, const Step& step, const Route* routes, u32 token, u32 c,
                                     u32 first, float (&sum)[kLaneUnits][Partial::kElements]) {
    Route route[kWatched];
    Incoming chunk[kWatched];
    u32 units = CombineWire::units(c);
#pragma unroll
    for (u32 g = 0; g < kWatched; ++g) {
      route[g] = first + g < config::kMaxTargets ? routes[first + g] : Route{-1, -1};
      expect(chunk[g]);
      if (step.joined && route[g].slot >= 0 && static_cast<u32>(route[g].target) == step.rank) {
        load_partial(a, step.rank * config::kMaxTokens + token, c, chunk[g].data);
        chunk[g].key = 0;
      }
    }
    Deadline deadline;
    for (;;) {
      u32 missing = 0;
#pragma unroll
      for (u32 g = 0; g < kWatched; ++g) {
        if (route[g].slot < 0 || (step.joined && static_cast<u32>(route[g].target) == step.rank)) continue;
        u64 slot = combine_slot(step.lane_of(step.rank), token, first + g);
        const u64* key_word = reinterpret_cast<const u64*>(CombineWire::chunk(slot, c));
        if (look(key_word, CombineWire::body(slot, c), units, g, chunk[g])) missing |= 1u << g;
      }
      if (!__any_sync(kWarp, missing != 0)) break;
      auto suspect = [&] {
        bool later = kWatched > 1 && !__any_sync(kWarp, missing & 1u);
        return static_cast<u32>(later ? route[kWatched - 1].target : route[0].target);
      };
      if (deadline.passed_for_warp(step, suspect)) return false;
    }
#pragma unroll
    for (u32 g = 0; g < kWatched; ++g) {
      if (route[g].slot < 0) continue;
      bool own = step.joined && static_cast<u32>(route[g].target) == step.rank;
      if (!own) undo_key(chunk[g].data, __shfl_sync(kWarp, chunk[g].key, static_cast<int>(g)));
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) Partial::add(sum[i], as_words(chunk[g].data.unit[i]));
      if (own) continue;
      u64 slot = combine_slot(step.lane_of(step.rank), token, first + g);
      rearm_chunk(reinterpret_cast<u64*>(CombineWire::chunk(slot, c)), CombineWire::body(slot, c), units, g);
    }
    return true;
  }

  __device__ static uint4 as_words(const u64x2& unit) {
    return make_uint4(static_cast<u32>(unit.a), static_cast<u32>(unit.a >> 32), static_cast<u32>(unit.b),
                      static_cast<u32>(unit.b >> 32));
  }

  // The next step's records say that this one is over: nothing is sent.
  __device__ static void release(const Step& step, const Shared&) { complete(step); }
};

}  // namespace nvep
