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

  template <class Arguments>
  __device__ static void combine_send(const Arguments& a, const Step& step, Shared& shared) {
    if (!step.alive) return;
    const i32* counts = step.local_region<i32>(local::kCountsOffset);
    for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) shared.count[r] = static_cast<u32>(counts[r]);
    __syncthreads();
    u32 total = number_units(shared, CombineWire::kChunks);
    for (u32 work = warp_index(); work < total; work += warp_count()) {
      u32 source = source_of(shared, work), rest = work - shared.first[source];
      send_partial_chunk(a, step, source, rest / CombineWire::kChunks, rest % CombineWire::kChunks, shared);
    }
  }

  template <class Arguments>
  __device__ static void send_partial_chunk(const Arguments& a, const Step& step, u32 source, u32 token, u32 c,
                                            const Shared& shared) {
    u64 row = static_cast<u64>(source) * config::kMaxTokens + token;
    const i32* landed = reinterpret_cast<const i32*>(landing_ids(step)) + row * config::kTopK;
    TokenIds ids;
#pragma unroll
    for (u32 k = 0; k < config::kTopK; ++k) ids.id[k] = landed[k];
    RankSet set = targets_of(ids, a.expert_ranks);
    if (!set.has(step.rank)) return;  // no token here: its ids are all invalid
    u32 lane = threadIdx.x % 32, units = CombineWire::units(c);
    const u64x2* from = reinterpret_cast<const u64x2*>(a.partial_rows) + row * CombineWire::kUnits + c * kChunkUnits;
    LaneUnits data;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < units) data.unit[i] = from[lane + 32 * i];
    }
    u64 key = choose_key(data, units);
    u64 slot = combine_slot(step.lane_of(source), token, set.below(step.rank));
    if (lane == 0) store_relaxed_system(reinterpret_cast<u64*>(CombineWire::chunk(slot, c)), key);
    send_units(CombineWire::body(slot, c), data, units, key);
  }

  // --- C.recv ---------------------------------------------------------------------------------------------------------

  template <class Arguments>
  __device__ static void combine_recv(const Arguments& a, const Step& step, const Shared& shared) {
    if (step.alive) {
      u32 total = step.counters()->tokens * CombineWire::kChunks;
      for (u32 work = warp_index(); work < total; work += warp_count()) {
        if (!sum_chunk(a, step, work / CombineWire::kChunks, work % CombineWire::kChunks, shared)) break;
      }
    }
    complete(step);
  }

  // One chunk of one output row: targets ascending, in float32, rounded once; -0 is the identity of addition.
  template <class Arguments>
  __device__ static bool sum_chunk(const Arguments& a, const Step& step, u32 token, u32 c, const Shared& shared) {
    const Route* routes =
        step.local_region<Route>(local::kRoutesOffset) + static_cast<u64>(token) * config::kMaxTargets;
    u32 lane = threadIdx.x % 32, units = CombineWire::units(c);
    bool any = false;
    for (u32 j = 0; j < config::kMaxTargets; ++j) any |= routes[j].slot >= 0;
    float sum[kLaneUnits][Partial::kElements];
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
#pragma unroll
      for (int e = 0; e < Partial::kElements; ++e) sum[i][e] = any ? -0.0f : 0.0f;
    }
    for (u32 j = 0; j < config::kMaxTargets; ++j) {
      Route route = routes[j];
      if (route.slot < 0) continue;
      u64 slot = combine_slot(step.lane_of(step.rank), token, j);
      u64* key_word = reinterpret_cast<u64*>(CombineWire::chunk(slot, c));
      LaneUnits data;
      u32 suspect = static_cast<u32>(route.target);
      Poll poll = await_chunk(step, suspect, key_word, CombineWire::body(slot, c), units, data, [] { return false; });
      if (poll == Poll::kGivenUp) return false;
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) Partial::add(sum[i], as_words(data.unit[i]));
      rearm_chunk(key_word, CombineWire::body(slot, c), units);
    }
    uint4* out = reinterpret_cast<uint4*>(a.output) + static_cast<u64>(token) * CombineWire::kUnits + c * kChunkUnits;
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < units) out[lane + 32 * i] = Partial::round(sum[i]);
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
