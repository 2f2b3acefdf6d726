// Slots of a step: which targets a token goes to and which row it takes there. Compact, in token order, so the same
// routing always gives the same rows.
#pragma once
#include "protocols/lane.cuh"

namespace nvep {

// The targets of a token, ascending, and its slot at each; a target below 0 ends the list.
struct alignas(8) Route {
  i32 target;
  i32 slot;
};

// Ids as they go out: global, with every id that is out of range or repeated within its token replaced.
struct TokenIds {
  i32 id[config::kTopK];
};

template <class Arguments>
__device__ inline i64 raw_expert_id(const Arguments& a, u32 index) {
  return a.ids_are_64_bit ? reinterpret_cast<const i64*>(a.expert_ids)[index]
                          : static_cast<i64>(reinterpret_cast<const i32*>(a.expert_ids)[index]);
}

// Reads a token's ids. Returns how many were neither valid nor -1.
template <class Arguments>
__device__ inline u32 read_token_ids(const Arguments& a, u32 token, TokenIds& ids) {
  u32 bad = 0;
#pragma unroll
  for (u32 k = 0; k < config::kTopK; ++k) {
    i64 raw = raw_expert_id(a, token * config::kTopK + k);
    bool valid = raw >= 0 && raw < config::kNumExperts;
    bool repeated = false;
#pragma unroll
    for (u32 before = 0; before < k; ++before) repeated |= valid && ids.id[before] == static_cast<i32>(raw);
    bad += (!valid && raw != -1 && raw != config::kInvalidExpert) || repeated;
    ids.id[k] = valid && !repeated ? static_cast<i32>(raw) : config::kInvalidExpert;
  }
  return bad;
}

// Distinct ranks that own a token's experts, masked or not.
__device__ inline RankSet targets_of(const TokenIds& ids, const i32* expert_ranks) {
  RankSet set = {};
#pragma unroll
  for (u32 k = 0; k < config::kTopK; ++k) {
    if (ids.id[k] >= 0) set.add(config::expert_rank(ids.id[k], expert_ranks));
  }
  return set;
}

}  // namespace nvep
