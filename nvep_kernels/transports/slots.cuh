// Slots of a step: which targets a token goes to and which row it takes there. Compact, in token order, so the same
// routing always gives the same rows.
#pragma once
#include "protocols/lane.cuh"

namespace nvep {

constexpr u32 kTileTokens = 32;  // one token per lane of the assigning warp

// The targets of a token, ascending, and its slot at each; a target below 0 ends the list.
struct Route {
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

// Per-block scratch of D.send.
struct SlotTile {
  u32 count[config::kRanks];  // rows before the current token, by target
  Route routes[kTileTokens][config::kMaxTargets];
  TokenIds ids[kTileTokens];
};

// Rows that tokens [0, end) send to each target. Integer sums, so the order of the adds does not matter.
template <class Arguments>
__device__ inline void count_before(const Arguments& a, u32 end, const RankSet& active, SlotTile& tile) {
  for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) tile.count[r] = 0;
  __syncthreads();
  for (u32 token = threadIdx.x; token < end; token += blockDim.x) {
    TokenIds ids;
    read_token_ids(a, token, ids);
    RankSet set = targets_of(ids, a.expert_ranks);
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) {
      for (u64 left = set.bits[w]; left != 0; left &= left - 1) {
        u32 target = w * 64 + static_cast<u32>(__ffsll(static_cast<long long>(left))) - 1;
        if (active.has(target)) atomicAdd(&tile.count[target], 1u);
      }
    }
  }
  __syncthreads();
}

// Warp 0 assigns the slots of up to 32 tokens from `first` and advances the counts; the caller barriers after it.
template <class Arguments>
__device__ inline void assign_tile(const Arguments& a, const Step& step, u32 first, u32 tokens, SlotTile& tile) {
  u32 lane = threadIdx.x;
  if (lane >= 32) return;
  RankSet set = {};
  u32 bad = 0;
  bool dropped = false;
  if (lane < tokens) {
    bad = read_token_ids(a, first + lane, tile.ids[lane]);
    set = targets_of(tile.ids[lane], a.expert_ranks);
  }
  u32 next = 0;
  for (u32 target = 0; target < config::kRanks; ++target) {
    bool sent = set.has(target) && step.active.has(target);
    dropped |= set.has(target) && !step.active.has(target);
    u32 senders = __ballot_sync(0xffffffffu, sent);
    if (sent) {
      u32 before = static_cast<u32>(__popc(senders & ((1u << lane) - 1)));
      tile.routes[lane][next++] = {static_cast<i32>(target), static_cast<i32>(tile.count[target] + before)};
    }
    __syncwarp();
    if (lane == 0) tile.count[target] += static_cast<u32>(__popc(senders));
    __syncwarp();
  }
  if (bad) fetch_add_relaxed_device(&step.counters()->invalid_ids, bad);
  if (dropped) fetch_add_relaxed_device(&step.counters()->dropped_tokens, 1u);
  if (lane < tokens) {
    Route* kept = step.local_region<Route>(local::kRoutesOffset) + (first + lane) * config::kMaxTargets;
    for (u32 j = 0; j < config::kMaxTargets; ++j) {
      if (j >= next) tile.routes[lane][j] = {-1, -1};
      kept[j] = tile.routes[lane][j];
    }
  }
}

}  // namespace nvep
