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

// Loads of a token's ids, as they are.
template <class Arguments>
__device__ inline void load_lane_ids(const Arguments& a, u32 token, i64 (&raw)[LaneIds::kLoads]) {
#pragma unroll
  for (u32 i = 0; i < LaneIds::kLoads; ++i) {
    u32 k = threadIdx.x % 32 + 32 * i;
    raw[i] = k < config::kTopK ? raw_expert_id(a, token * config::kTopK + k) : -1;
  }
}

// The whole warp checks a token's ids. Returns how many were neither valid nor -1, the same to all lanes.
__device__ inline u32 check_lane_ids(const i64 (&raw)[LaneIds::kLoads], LaneIds& ids) {
  u32 bad = 0;
  i32 first = -1;  // as given
#pragma unroll
  for (u32 i = 0; i < LaneIds::kLoads; ++i) {
    bool valid = static_cast<u64>(raw[i]) < static_cast<u64>(config::kNumExperts);
    i32 id = valid ? static_cast<i32>(raw[i]) : -1;
    bool repeated = (__match_any_sync(kWarp, id) & ((1u << threadIdx.x % 32) - 1)) != 0;
    for (int other = 0; i == 1 && other < 32; ++other) repeated |= __shfl_sync(kWarp, first, other) == id;
    repeated &= valid;
    bool wrong = !valid && raw[i] != -1 && raw[i] != config::kInvalidExpert;
    bad += static_cast<u32>(__popc(__ballot_sync(kWarp, wrong || repeated)));
    ids.id[i] = repeated ? -1 : id;
    first = id;
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
