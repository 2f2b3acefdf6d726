// Dispatch over peer load/store under Sentinel. A slot is its token's index; chunks are pushed into the target's wire of
// this epoch's generation, and land in private buffers.
#pragma once
#include "protocols/sentinel.cuh"
#include "transports/nvlink.cuh"

namespace nvep {

struct NvlinkSentinelShared : NvlinkShared {
  u32 first[config::kRanks + 1];  // units of D.recv and C.send before those of each source
};

// A header unit: id in the low half, never the sentinel's half, since it is valid or -1; weight in the high half.
__device__ inline u64 make_header(i32 id, float weight) {
  return static_cast<u32>(id < 0 ? -1 : id) | (static_cast<u64>(__float_as_uint(weight)) << 32);
}

struct NvlinkSentinelDispatch : NvlinkStep {
  using Protocol = Sentinel;
  using Shared = NvlinkSentinelShared;
  using DispatchWire = Wire<config::kTokenBytes, config::kTopK>;

  static constexpr u32 kHeaderLoads = (config::kTopK + 31) / 32;

  __device__ static u32 warp_index() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }
  __device__ static u32 warp_count() { return gridDim.x * blockDim.x / 32; }

  __device__ static u64 dispatch_slot(u64 lane, u32 epoch, u32 source, u32 token) {
    u64 slot = (static_cast<u64>(epoch & 1u) * config::kRanks + source) * config::kMaxTokens + token;
    return lane + heap::kDispatchWireOffset + slot * DispatchWire::kSlotBytes;
  }
  __device__ static u64 landing_ids(const Step& step) { return step.local + local::kLandingIdsOffset; }

  // --- D.send ---------------------------------------------------------------------------------------------------------

  template <class Arguments>
  __device__ static void dispatch_send(const Arguments& a, const Step& step, Shared& shared) {
    if (!step.alive) return;
    u32 tokens = token_count(a);
    if (blockIdx.x == 0) {
      // Under strict PTX the re-arm stores of earlier grids are ordered before the record by release and acquire,
      // otherwise by the axiom on completed grids.
      if constexpr (config::kStrictPtx) fence_acq_rel_system();
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) {
        if (step.active.has(r)) {
          store_relaxed_system(dispatch_record(step.lane_of(r), step.rank, step.epoch),
                               make_record(step.epoch, tokens, Protocol::kCode));
        }
      }
    }
    for (u32 work = warp_index(); work < tokens * DispatchWire::kChunks; work += warp_count()) {
      send_token_chunk(a, step, work / DispatchWire::kChunks, work % DispatchWire::kChunks, shared);
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) close_dispatch_send(a, step, tokens);
  }

  template <class Arguments>
  __device__ static void send_token_chunk(const Arguments& a, const Step& step, u32 token, u32 c,
                                          const Shared& shared) {
    u32 lane = threadIdx.x % 32;
    TokenIds ids;
    u32 bad = read_token_ids(a, token, ids);
    RankSet set = targets_of(ids, a.expert_ranks);
    LaneUnits data;
    load_payload(a, token, c, data);
    u32 units = DispatchWire::units(c);
    u64 key = choose_key(data, units);
    bool dropped = false;
    for (u32 r = 0; r < config::kRanks; ++r) {
      if (!set.has(r)) continue;
      if (!step.active.has(r)) {
        dropped = true;
        continue;
      }
      u64 slot = dispatch_slot(step.lane_of(r), step.epoch, step.rank, token);
      if (lane == 0) store_relaxed_system(reinterpret_cast<u64*>(DispatchWire::chunk(slot, c)), key);
      if (c == 0) send_header(a, slot, token, ids);
      send_units(DispatchWire::body(slot, c), data, units, key);
    }
    for (u32 r = lane; r < config::kRanks; r += 32) {
      if (set.has(r) || !step.active.has(r)) continue;
      u64 slot = dispatch_slot(step.lane_of(r), step.epoch, step.rank, token);
      store_relaxed_system(reinterpret_cast<u64*>(DispatchWire::chunk(slot, c)), kUnrouted);
    }
    if (c == 0) keep_routes(step, token, set, shared);
    if (c == 0 && lane == 0) {
      if (bad) fetch_add_relaxed_device(&step.counters()->invalid_ids, bad);
      if (dropped) fetch_add_relaxed_device(&step.counters()->dropped_tokens, 1u);
    }
  }

  template <class Arguments>
  __device__ static void send_header(const Arguments& a, u64 slot, u32 token, const TokenIds& ids) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 k = 0; k < config::kTopK; ++k) {
      if (k % 32 == lane) {
        u64 unit = make_header(ids.id[k], a.expert_weights[token * config::kTopK + k]);
        store_relaxed_system(DispatchWire::header(slot) + k, unit);
      }
    }
  }

  // C.recv needs the targets by position: j counts masked ranks too, and a slot below 0 says not to wait for one.
  __device__ static void keep_routes(const Step& step, u32 token, const RankSet& set, const Shared& shared) {
    Route* routes = step.local_region<Route>(local::kRoutesOffset) + static_cast<u64>(token) * config::kMaxTargets;
    for (u32 r = threadIdx.x % 32; r < config::kRanks; r += 32) {
      if (set.has(r)) routes[set.below(r)] = {static_cast<i32>(r), step.active.has(r) ? static_cast<i32>(token) : -1};
    }
    for (u32 j = set.below(config::kRanks) + threadIdx.x % 32; j < config::kMaxTargets; j += 32) routes[j] = {-1, -1};
  }

  template <class Arguments>
  __device__ static void load_payload(const Arguments& a, u32 token, u32 c, LaneUnits& data) {
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      u32 unit = c * kChunkUnits + threadIdx.x % 32 + 32 * i;
      if (threadIdx.x % 32 + 32 * i < DispatchWire::units(c)) {
        data.unit[i] = *payload_unit<0>(token, unit, [&](u32 p) { return a.payloads[p]; });
      }
    }
  }

  // Address of a unit of a row's concatenated payloads in arrays that hold one payload each.
  template <u32 kPayload, class Base>
  __device__ static u64x2* payload_unit(u64 row, u32 unit, Base base) {
    constexpr u32 units = config::payload_bytes(kPayload) / 16;
    if constexpr (kPayload + 1 < config::kPayloads) {
      if (unit >= units) return payload_unit<kPayload + 1>(row, unit - units, base);
    }
    return reinterpret_cast<u64x2*>(base(kPayload)) + row * units + unit;
  }

  // --- D.recv ---------------------------------------------------------------------------------------------------------

  __device__ static void dispatch_recv(const Step& step, Shared& shared) {
    for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) shared.count[r] = 0;
    __syncthreads();
    bool alive = step.alive && await_records<Protocol>(
                                   step, [&](u32 r) { return dispatch_record(step.lane_of(step.rank), r, step.epoch); },
                                   [&](u32 r, u64 word) {
                                     shared.count[r] = min(record_count(word), static_cast<u32>(config::kMaxTokens));
                                   });
    if (alive) alive = !__syncthreads_or(!land_all(step, shared));
    if (!alive) {  // outputs are undefined; ids are valid or invalid, never out of range
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) shared.count[r] = 0;
      __syncthreads();
    }
    fill_invalid(landing_ids(step), shared);
    if (blockIdx.x == 0) {
      i32* counts = step.local_region<i32>(local::kCountsOffset);
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) counts[r] = static_cast<i32>(shared.count[r]);
    }
  }

  // False in the lanes of a warp that gave up.
  __device__ static bool land_all(const Step& step, Shared& shared) {
    u32 total = number_units(shared, DispatchWire::kChunks);
    for (u32 work = warp_index(); work < total; work += warp_count()) {
      u32 source = source_of(shared, work), rest = work - shared.first[source];
      if (!land_chunk(step, source, rest / DispatchWire::kChunks, rest % DispatchWire::kChunks, shared)) return false;
    }
    return true;
  }

  // Lays the chunks of all sources' rows end to end; every thread of the block calls it.
  __device__ static u32 number_units(Shared& shared, u32 chunks) {
    if (threadIdx.x == 0) {
      u32 sum = 0;
      for (u32 r = 0; r < config::kRanks; ++r) {
        shared.first[r] = sum;
        sum += shared.count[r] * chunks;
      }
      shared.first[config::kRanks] = sum;
    }
    __syncthreads();
    return shared.first[config::kRanks];
  }

  __device__ static u32 source_of(const Shared& shared, u32 work) {
    u32 source = 0;
    while (shared.first[source + 1] <= work) ++source;
    return source;
  }

  __device__ static bool land_chunk(const Step& step, u32 source, u32 token, u32 c, const Shared& shared) {
    u32 lane = threadIdx.x % 32, units = DispatchWire::units(c);
    u64 slot = dispatch_slot(step.lane_of(step.rank), step.epoch, source, token);
    u64* key_word = reinterpret_cast<u64*>(DispatchWire::chunk(slot, c));
    u64 row = static_cast<u64>(source) * config::kMaxTokens + token;
    u64 header[kHeaderLoads];
    LaneUnits data;
    Poll poll = await_chunk(step, source, key_word, DispatchWire::body(slot, c), units, data,
                            [&] { return c == 0 && load_header(slot, header); });
    if (poll == Poll::kGivenUp) return false;
    if (poll == Poll::kNothing) {
      if (c == 0) land_nothing(step, row);
      if (lane == 0) store_relaxed_system(key_word, kEmpty);
      return true;
    }
    if (c == 0) land_header(step, slot, row, header);
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane + 32 * i < units) {
        *payload_unit<0>(row, c * kChunkUnits + lane + 32 * i,
                         [&](u32 p) { return step.local + config::payload_offset(p); }) = data.unit[i];
      }
    }
    rearm_chunk(key_word, DispatchWire::body(slot, c), units);
    return true;
  }

  // True if a header unit of this lane has not arrived.
  __device__ static bool load_header(u64 slot, u64 (&header)[kHeaderLoads]) {
    bool missing = false;
#pragma unroll
    for (u32 i = 0; i < kHeaderLoads; ++i) {
      u32 k = threadIdx.x % 32 + 32 * i;
      if (k < config::kTopK) {
        header[i] = load_relaxed_system(DispatchWire::header(slot) + k);
        missing |= header[i] == kEmpty;
      }
    }
    return missing;
  }

  __device__ static void land_header(const Step& step, u64 slot, u64 row, const u64 (&header)[kHeaderLoads]) {
    i32* ids = reinterpret_cast<i32*>(landing_ids(step)) + row * config::kTopK;
    float* weights = step.local_region<float>(local::kLandingWeightsOffset) + row * config::kTopK;
#pragma unroll
    for (u32 i = 0; i < kHeaderLoads; ++i) {
      u32 k = threadIdx.x % 32 + 32 * i;
      if (k < config::kTopK) {
        i32 id = static_cast<i32>(static_cast<u32>(header[i]));
        ids[k] = id < 0 ? config::kInvalidExpert : id;
        weights[k] = __uint_as_float(static_cast<u32>(header[i] >> 32));
        store_relaxed_system(DispatchWire::header(slot) + k, kEmpty);
      }
    }
  }

  __device__ static void land_nothing(const Step& step, u64 row) {
    i32* ids = reinterpret_cast<i32*>(landing_ids(step)) + row * config::kTopK;
    for (u32 k = threadIdx.x % 32; k < config::kTopK; k += 32) ids[k] = config::kInvalidExpert;
  }
};

}  // namespace nvep
