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
    u32 slot = token * config::kMaxTargets + j;
    return lane + heap::kCombineWireOffset + static_cast<u64>(slot) * CombineWire::kSlotBytes;
  }

  // --- C.send ---------------------------------------------------------------------------------------------------------

  // Chunks are numbered by token, then source, then place in the row. In a joined launch this rank is left out: C.recv
  // takes its own partial rows where they are.
  __device__ static Place combine_place(u32 rank, bool joined, u32 work) {
    constexpr u32 others = config::kRanks > 1 ? config::kRanks - 1 : 1;
    u32 token_work = (joined ? others : config::kRanks) * CombineWire::kChunks;
    u32 source = work % token_work / CombineWire::kChunks;
    return {work / token_work, source + (joined && source >= rank ? 1u : 0u), work % CombineWire::kChunks};
  }

  __device__ static u32 combine_work(bool joined, u32 tokens) {
    return tokens * (joined ? config::kRanks - 1 : config::kRanks) * CombineWire::kChunks;
  }

  // A chunk of a partial row, loaded beside the ids that say whether a token is there.
  struct PartialChunk {
    LaneIds ids;
    LaneUnits data;
  };

  static constexpr u32 kRouteLoads = (config::kMaxTargets + 31) / 32;

  // A token's targets by position, one a lane.
  struct LaneRoutes {
    Route route[kRouteLoads];
  };

  // The first chunks that this warp sends and sums, loaded while the step's own words are on their way.
  struct CombineAhead {
    PartialChunk chunk;
    u32 tokens;
    LaneRoutes routes;
  };

  template <class Arguments>
  __device__ static CombineAhead combine_ahead(const Arguments& a, bool joined) {
    CombineAhead ahead = {};
    u32 work = warp_index();
    if (work < combine_work(joined, config::kMaxTokens)) {
      load_partial_chunk(a, combine_place(a.rank, joined, work), ahead.chunk);
    }
    ahead.tokens = reinterpret_cast<const Counters*>(a.local + local::kCountersOffset)->tokens;
    if (work < config::kMaxTokens * CombineWire::kChunks) load_routes(a, work / CombineWire::kChunks, ahead.routes);
    return ahead;
  }

  template <class Arguments>
  __device__ static void load_routes(const Arguments& a, u32 token, LaneRoutes& routes) {
    const Route* kept =
        reinterpret_cast<const Route*>(a.local + local::kRoutesOffset) + static_cast<u64>(token) * config::kMaxTargets;
#pragma unroll
    for (u32 i = 0; i < kRouteLoads; ++i) {
      routes.route[i] = kept[min(threadIdx.x % 32 + 32 * i, config::kMaxTargets - 1)];
    }
  }

  template <class Arguments>
  __device__ static void load_partial_chunk(const Arguments& a, const Place& place, PartialChunk& chunk) {
    u32 row = place.source * config::kMaxTokens + place.token;
    const i32* landed =
        reinterpret_cast<const i32*>(a.local + local::kLandingIdsOffset) + static_cast<u64>(row) * config::kTopK;
#pragma unroll
    for (u32 i = 0; i < LaneIds::kLoads; ++i) {
      u32 k = threadIdx.x % 32 + 32 * i;
      chunk.ids.id[i] = k < config::kTopK ? landed[k] : -1;
    }
    load_partial(a, row, place.chunk, chunk.data);
  }

  template <class Arguments>
  __device__ static void load_partial(const Arguments& a, u32 row, u32 c, LaneUnits& data) {
    u32 lane = threadIdx.x % 32;
    const u64x2* from = reinterpret_cast<const u64x2*>(a.partial_rows + static_cast<u64>(row) * config::kPartialBytes);
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < CombineWire::units(c)) data.unit[i] = from[c * kChunkUnits + lane + 32 * i];
    }
  }

  template <class Arguments>
  __device__ static void combine_send(const Arguments& a, const Step& step, CombineAhead& ahead, const Shared&) {
    if (!step.alive) return;
    PartialChunk& chunk = ahead.chunk;
    u32 total = combine_work(step.joined, most_tokens(step));
    for (u32 work = warp_index(); work < total;) {
      send_partial_chunk(a, step, combine_place(step.rank, step.joined, work), chunk);
      work += warp_count();
      if (work < total) load_partial_chunk(a, combine_place(step.rank, step.joined, work), chunk);
    }
  }

  // Of all sources. A row beyond its source's count has invalid ids.
  __device__ static u32 most_tokens(const Step& step) {
    const i32* counts = step.local_region<i32>(local::kCountsOffset);
    u32 most = 0;
#pragma unroll
    for (u32 first = 0; first < config::kRanks; first += 32) {
      u32 r = first + threadIdx.x % 32;
      most = max(most, __reduce_max_sync(kWarp, r < config::kRanks ? static_cast<u32>(counts[r]) : 0u));
    }
    return most;
  }

  template <class Arguments>
  __device__ static void send_partial_chunk(const Arguments& a, const Step& step, const Place& place,
                                            const PartialChunk& chunk) {
    RankSet set = targets_of(chunk.ids, a.expert_ranks);
    if (!set.has(step.rank)) return;  // no token here: its ids are all invalid
    u32 units = CombineWire::units(place.chunk);
    u64 key = choose_key(chunk.data, units);
    u64 slot = combine_slot(step.lane_of(place.source), place.token, set.below(step.rank));
    send_chunk(CombineWire::key(slot, place.chunk), chunk.data, units, key);
  }

  // --- C.recv ---------------------------------------------------------------------------------------------------------

  // Targets at once, as registers allow; a lane each watches a key.
  static constexpr u32 kRoom = kLaneUnits <= 2 ? 4 : kLaneUnits <= 4 ? 2 : 1;
  static constexpr u32 kWatched = config::kMaxTargets < kRoom ? config::kMaxTargets : kRoom;

  template <class Arguments>
  __device__ static void combine_recv(const Arguments& a, const Step& step, CombineAhead& ahead, const Shared&) {
    complete(step);
    if (!step.alive) return;
    u32 total = ahead.tokens * CombineWire::kChunks;
    for (u32 work = warp_index(); work < total;) {
      if (!sum_chunk(a, step, work / CombineWire::kChunks, work % CombineWire::kChunks, ahead.routes)) return;
      work += warp_count();
      if (work < total) load_routes(a, work / CombineWire::kChunks, ahead.routes);
    }
  }

  using Sum = float[kLaneUnits][Partial::kElements];

  // One chunk of one output row: targets ascending, in float32, rounded once; -0 is the identity of addition.
  template <class Arguments>
  __device__ static bool sum_chunk(const Arguments& a, const Step& step, u32 token, u32 c, const LaneRoutes& routes) {
    u32 lane = threadIdx.x % 32, awaited[kRouteLoads], any = 0;
#pragma unroll
    for (u32 i = 0; i < kRouteLoads; ++i) {
      awaited[i] = __ballot_sync(kWarp, lane + 32 * i < config::kMaxTargets && routes.route[i].slot >= 0);
      any |= awaited[i];
    }
    Sum sum;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
#pragma unroll
      for (int e = 0; e < Partial::kElements; ++e) sum[i][e] = any ? -0.0f : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < kRouteLoads; ++i) {
      while (awaited[i] != 0) {
        u32 position[kWatched], target[kWatched];
#pragma unroll
        for (u32 g = 0; g < kWatched; ++g) {
          u32 bit = awaited[i] == 0 ? 32u : static_cast<u32>(__ffs(static_cast<int>(awaited[i]))) - 1;
          awaited[i] &= awaited[i] - 1;
          target[g] = static_cast<u32>(__shfl_sync(kWarp, routes.route[i].target, static_cast<int>(bit % 32)));
          position[g] = bit == 32 ? kNobody : bit + 32 * i;
        }
        if (!add_targets(a, step, token, c, position, target, sum)) return false;
      }
    }
    uint4* out = reinterpret_cast<uint4*>(a.output + static_cast<u64>(token) * config::kPartialBytes) + c * kChunkUnits;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < CombineWire::units(c)) out[lane + 32 * i] = Partial::round(sum[i]);
    }
    return true;
  }

  static constexpr u32 kNobody = ~0u;

  // Waits for the partial rows at some positions of a token together, and adds them in order.
  template <class Arguments>
  __device__ static bool add_targets(const Arguments& a, const Step& step, u32 token, u32 c,
                                     const u32 (&position)[kWatched], const u32 (&target)[kWatched], Sum& sum) {
    Incoming chunk[kWatched];
    bool wired[kWatched];
    u32 units = CombineWire::units(c);
#pragma unroll
    for (u32 g = 0; g < kWatched; ++g) {
      expect(chunk[g]);
      bool own = step.joined && target[g] == step.rank;
      wired[g] = position[g] != kNobody && !own;
      if (position[g] != kNobody && own) load_partial(a, step.rank * config::kMaxTokens + token, c, chunk[g].data);
    }
    Deadline deadline;
    for (;;) {
      bool missing[kWatched], some = false;
#pragma unroll
      for (u32 g = 0; g < kWatched; ++g) {
        u64 slot = combine_slot(step.lane_of(step.rank), token, position[g]);
        missing[g] = wired[g] && look(CombineWire::key(slot, c), units, g, chunk[g]);
        some |= missing[g];
      }
      if (!__any_sync(kWarp, some)) break;
      auto suspect = [&] {
        u32 rank = target[kWatched - 1];
#pragma unroll
        for (u32 g = kWatched; g-- > 0;) rank = __any_sync(kWarp, missing[g]) ? target[g] : rank;
        return rank;
      };
      if (deadline.passed_for_warp(step, suspect)) return false;
    }
#pragma unroll
    for (u32 g = 0; g < kWatched; ++g) {
      if (position[g] == kNobody) continue;
      if (wired[g]) undo_key(chunk[g].data, __shfl_sync(kWarp, chunk[g].key, static_cast<int>(g)));
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) Partial::add(sum[i], as_words(chunk[g].data.unit[i]));
      u64 slot = combine_slot(step.lane_of(step.rank), token, position[g]);
      if (wired[g]) rearm_chunk(CombineWire::key(slot, c), units, g);
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
