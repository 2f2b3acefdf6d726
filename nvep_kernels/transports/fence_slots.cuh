// Fence's slots: compact and in token order, so the same routing always gives the same rows. A block counts the rows of
// all tokens before its own, then gives out slots tile by tile.
#pragma once
#include "transports/slots.cuh"

namespace nvep {

// Tokens assigned together, one per lane; two tiles fit in shared memory.
constexpr u32 kTileTokens = 8 * config::kMaxTargets + 4 * config::kTopK > 512 ? 16 : 32;
constexpr i32 kMoreTargets = 1 << 30;  // in the slot of a kept route: the token has a further target

struct SlotTile {
  Route routes[kTileTokens][config::kMaxTargets];
  TokenIds ids[kTileTokens];
};

// A given id that fits no i32 becomes one that no expert has.
__device__ inline i32 narrow_id(u64 id) {
  const i32 narrow = static_cast<i32>(id);
  return static_cast<u64>(static_cast<i64>(narrow)) == id ? narrow : config::kNumExperts;
}

// Ids as they were given, in 16-byte units where these hold whole rows.
template <class Arguments>
__device__ inline TokenIds given_ids(const Arguments& a, u32 token) {
  TokenIds ids;
  const u64 first = static_cast<u64>(token) * config::kTopK;
  const bool units = a.expert_ids % 16 == 0;
  if (a.ids_are_64_bit) {
    const u64* row = reinterpret_cast<const u64*>(a.expert_ids) + first;
    if constexpr (config::kTopK % 2 == 0) {
#pragma unroll
      for (u32 k = 0; units && k < config::kTopK; k += 2) {
        const u64x2 pair = *reinterpret_cast<const u64x2*>(row + k);
        ids.id[k] = narrow_id(pair.a);
        ids.id[k + 1] = narrow_id(pair.b);
      }
      if (units) return ids;
    }
#pragma unroll
    for (u32 k = 0; k < config::kTopK; ++k) ids.id[k] = narrow_id(row[k]);
    return ids;
  }
  const i32* row = reinterpret_cast<const i32*>(a.expert_ids) + first;
  if constexpr (config::kTopK % 4 == 0) {
#pragma unroll
    for (u32 k = 0; units && k < config::kTopK; k += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(row + k);
      ids.id[k] = static_cast<i32>(four.x);
      ids.id[k + 1] = static_cast<i32>(four.y);
      ids.id[k + 2] = static_cast<i32>(four.z);
      ids.id[k + 3] = static_cast<i32>(four.w);
    }
    if (units) return ids;
  }
#pragma unroll
  for (u32 k = 0; k < config::kTopK; ++k) ids.id[k] = row[k];
  return ids;
}

__device__ inline bool is_expert(i32 id) {
  return static_cast<u32>(id) < static_cast<u32>(config::kNumExperts);
}

// Distinct ranks that own experts among ids as they were given, masked or not.
__device__ inline RankSet given_targets(const TokenIds& given, const i32* expert_ranks) {
  RankSet set = {};
#pragma unroll
  for (u32 k = 0; k < config::kTopK; ++k) {
    if (is_expert(given.id[k])) set.add(config::expert_rank(given.id[k], expert_ranks));
  }
  return set;
}

// Replaces ids that are out of range or repeated. Returns how many were neither valid nor -1.
__device__ inline u32 clean(TokenIds& ids) {
  u32 bad = 0;
  const TokenIds given = ids;
#pragma unroll
  for (u32 k = 0; k < config::kTopK; ++k) {
    i32 id = given.id[k];
    bool valid = is_expert(id), repeated = false;
#pragma unroll
    for (u32 before = 0; before < k; ++before) repeated |= given.id[before] == id;
    bad += valid ? repeated : id != -1 && id != config::kInvalidExpert;
    ids.id[k] = valid && !repeated ? id : config::kInvalidExpert;
  }
  return bad;
}

// A warp's share of the rows that tokens [0, end) send to each rank, masked or not: lane l holds ranks l, l + 32, ...
struct RowCounts {
  static constexpr u32 kWords = (config::kRanks + 31) / 32;
  static constexpr u32 kBatch = config::kTopK <= 8 ? 4 : 1;  // tokens whose loads are under way together
  u32 rows[kWords];

  template <class Arguments>
  __device__ void count(const Arguments& a, u32 end) {
#pragma unroll
    for (u32 w = 0; w < kWords; ++w) rows[w] = 0;
    for (u32 first = 0; first < end; first += kBatch * blockDim.x) {
      RankSet sets[kBatch];
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        u32 token = first + b * blockDim.x + threadIdx.x;
        sets[b] = {};
        if (token < end) sets[b] = given_targets(given_ids(a, token), a.expert_ranks);
      }
#pragma unroll
      for (u32 w = 0; w < kWords; ++w) {
#pragma unroll 8
        for (u32 bit = 0; bit < min(32u, config::kRanks - 32 * w); ++bit) {
          u32 senders = 0;
#pragma unroll
          for (u32 b = 0; b < kBatch; ++b) {
            senders += static_cast<u32>(__popc(__ballot_sync(kWarp, sets[b].has(32 * w + bit))));
          }
          if (threadIdx.x % 32 == bit) rows[w] += senders;
        }
      }
    }
  }

  // All threads call this: the sum over the block, complete when it returns.
  __device__ void add_up(u32 (&total)[config::kRanks]) const {
    for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) total[r] = 0;
    __syncthreads();
#pragma unroll
    for (u32 w = 0; w < kWords; ++w) {
      u32 r = 32 * w + threadIdx.x % 32;
      if (r < config::kRanks && rows[w] != 0) atomicAdd(&total[r], rows[w]);
    }
    __syncthreads();
  }
};

// One warp assigns the slots of up to 32 tokens from `first`, whose ids as they were given its lanes hold, advances the
// counts and keeps the routes for C.recv.
template <class Arguments>
__device__ inline void assign_tile(const Arguments& a, const Step& step, TokenIds ids, u32 first, u32 tokens,
                                   u32 (&count)[config::kRanks], SlotTile& tile) {
  constexpr u32 words = (config::kRanks + 31) / 32;
  const u32 lane = threadIdx.x % 32;
  RankSet set = {};
  u32 bad = 0, next = 0;
  bool dropped = false;
  if (lane < tokens) {
    set = given_targets(ids, a.expert_ranks);
    bad = clean(ids);
    tile.ids[lane] = ids;
  }
#pragma unroll
  for (u32 w = 0; w < words; ++w) {
    u32 rows = 32 * w + lane < config::kRanks ? count[32 * w + lane] : 0;
#pragma unroll 8
    for (u32 bit = 0; bit < min(32u, config::kRanks - 32 * w); ++bit) {
      u32 target = 32 * w + bit;
      bool wanted = set.has(target), sent = wanted && step.active.has(target);
      dropped |= wanted && !sent;
      u32 senders = __ballot_sync(kWarp, sent), before = __shfl_sync(kWarp, rows, static_cast<int>(bit));
      if (sent) {
        u32 slot = before + static_cast<u32>(__popc(senders & ((1u << lane) - 1)));
        tile.routes[lane][next++] = {static_cast<i32>(target), static_cast<i32>(slot)};
      }
      if (lane == bit) rows += static_cast<u32>(__popc(senders));
    }
    if (32 * w + lane < config::kRanks) count[32 * w + lane] = rows;
  }
  if (bad) fetch_add_relaxed_device(&step.counters()->invalid_ids, bad);
  if (dropped) fetch_add_relaxed_device(&step.counters()->dropped_tokens, 1u);
  if (lane >= tokens) return;
  Route* kept = step.local_region<Route>(local::kRoutesOffset) + static_cast<u64>(first + lane) * config::kMaxTargets;
  for (u32 j = 0; j < config::kMaxTargets; ++j) {
    if (j >= next) tile.routes[lane][j] = {-1, -1};
    kept[j] = tile.routes[lane][j];
    if (j + 1 < next) kept[j].slot |= kMoreTargets;
  }
}

}  // namespace nvep
