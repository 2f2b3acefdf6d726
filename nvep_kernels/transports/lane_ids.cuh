// A token's expert ids spread over a warp: a lone warp that waits for memory is slow in instructions, so each lane does one
// id's worth of them.
#pragma once
#include "transports/slots.cuh"

namespace nvep {

// Lane l holds ids l and l + 32: valid and distinct within the token, or -1.
struct LaneIds {
  static constexpr u32 kLoads = (config::kTopK + 31) / 32;
  i32 id[kLoads];
};

// Ids as they were given: halves of 64-bit ids, or twice the same 32 bits. Nothing here waits for a load.
struct RawIds {
  u32 low[LaneIds::kLoads], high[LaneIds::kLoads];
};

template <class Arguments>
__device__ inline void load_lane_ids(const Arguments& a, u32 token, RawIds& raw) {
  u32 bytes = a.ids_are_64_bit ? 8 : 4;
#pragma unroll
  for (u32 i = 0; i < LaneIds::kLoads; ++i) {
    u32 k = min(threadIdx.x % 32 + 32 * i, config::kTopK - 1);
    const char* id = reinterpret_cast<const char*>(a.expert_ids) + static_cast<u64>(token * config::kTopK + k) * bytes;
    raw.low[i] = *reinterpret_cast<const u32*>(id);
    raw.high[i] = *reinterpret_cast<const u32*>(id + bytes - 4);
  }
}

// Valid ids, repeated or not: enough to know a token's targets.
template <class Arguments>
__device__ inline LaneIds valid_lane_ids(const Arguments& a, const RawIds& raw) {
  LaneIds ids;
#pragma unroll
  for (u32 i = 0; i < LaneIds::kLoads; ++i) {
    bool mine = threadIdx.x % 32 + 32 * i < config::kTopK;
    bool fits = !a.ids_are_64_bit || raw.high[i] == 0;
    bool valid = mine && fits && raw.low[i] < static_cast<u32>(config::kNumExperts);
    ids.id[i] = valid ? static_cast<i32>(raw.low[i]) : -1;
  }
  return ids;
}

// The whole warp checks a token's ids. Returns how many were neither valid nor -1, the same to all lanes.
template <class Arguments>
__device__ inline u32 check_lane_ids(const Arguments& a, const RawIds& raw, LaneIds& ids) {
  u32 bad = 0;
  const LaneIds valid = valid_lane_ids(a, raw);
#pragma unroll
  for (u32 i = 0; i < LaneIds::kLoads; ++i) {
    i32 id = valid.id[i], given = static_cast<i32>(raw.low[i]);
    bool repeated = (__match_any_sync(kWarp, id) & ((1u << threadIdx.x % 32) - 1)) != 0;
    for (int other = 0; i == 1 && other < 32; ++other) repeated |= __shfl_sync(kWarp, valid.id[0], other) == id;
    repeated &= id >= 0;
    bool negative = given < 0 && (!a.ids_are_64_bit || raw.high[i] == ~0u);
    bool none = negative && (given == -1 || given == config::kInvalidExpert);
    bool mine = threadIdx.x % 32 + 32 * i < config::kTopK;
    bad += static_cast<u32>(__popc(__ballot_sync(kWarp, mine && ((id < 0 && !none) || repeated))));
    ids.id[i] = repeated ? -1 : id;
  }
  return bad;
}

// Distinct ranks that own a token's experts, masked or not, the same to all lanes.
__device__ inline RankSet targets_of(const LaneIds& ids, const i32* expert_ranks) {
  RankSet set = {};
#pragma unroll
  for (u32 i = 0; i < LaneIds::kLoads; ++i) {
    if (ids.id[i] >= 0) set.add(config::expert_rank(ids.id[i], expert_ranks));
  }
#pragma unroll
  for (u32 w = 0; w < kMaskWords; ++w) set.bits[w] = __reduce_or_sync(kWarp, set.bits[w]);
  return set;
}

}  // namespace nvep
