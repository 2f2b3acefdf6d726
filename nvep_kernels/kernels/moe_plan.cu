// Which pairs (row, k) each local expert computes, in ascending order whatever the launch: one block per expert. Every
// warp counts the matches in its own stretch of the received ids, then writes them behind those of earlier warps.
#include "moe/experts.cuh"
#include "primitives/launch.cuh"

using namespace nvep;

namespace {

constexpr u32 kAtOnce = 8;  // ids that a thread loads before it looks at the first
constexpr u32 kUnknown = 0xffffffffu;

struct PlanShared {
  u32 first[moe::kRanks + 1];  // rows received from lower ranks
  u32 matches[32];             // of each warp
  i32 index[moe::kExperts];    // local expert of each id
};

__device__ inline void load_tables(const PlanArguments& a, PlanShared& shared) {
  const i32* counts = reinterpret_cast<const i32*>(a.counts);
  for (u32 id = threadIdx.x; id < moe::kExperts; id += blockDim.x) shared.index[id] = a.local_experts[id];
  if (threadIdx.x < 32) {
    u32 before = 0;
    for (u32 base = 0; base < moe::kRanks; base += 32) {
      const u32 rank = base + threadIdx.x;
      const i32 count = rank < moe::kRanks ? load_weak(counts + rank) : 0;
      const u32 rows = count < 0 ? 0 : min(static_cast<u32>(count), moe::kMaxTokens);
      const u32 sum = before + warp_prefix(rows, threadIdx.x);
      if (rank < moe::kRanks) shared.first[rank + 1] = sum;
      before = __shfl_sync(kFullWarp, sum, 31);
    }
    if (threadIdx.x == 0) shared.first[0] = 0;
  }
  __syncthreads();
}

// Row number of received row `i`, counted over all ranks.
__device__ inline u32 row_of(const PlanShared& shared, u32 i) {
  u32 low = 0, high = moe::kRanks;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (shared.first[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low * moe::kMaxTokens + (i - shared.first[low]);
}

__device__ inline u32 expert_at(const PlanArguments& a, const PlanShared& shared, u32 pair) {
  const i32 id = load_weak(reinterpret_cast<const i32*>(a.expert_ids) + pair);
  return id < 0 || id >= static_cast<i32>(moe::kExperts) ? kUnknown : static_cast<u32>(shared.index[id]);
}

// Passes the pairs of `expert` among received pairs [begin, end) to `found(pair, number)`; returns how many there are.
template <class Found>
__device__ inline u32 for_matches(const PlanArguments& a, const PlanShared& shared, u32 expert, u32 begin, u32 end,
                                  const Found& found) {
  const u32 lane = threadIdx.x & 31u;
  u32 number = 0;
  for (u32 base = begin; base < end; base += 32 * kAtOnce) {
    u32 pair[kAtOnce], owner[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 at = base + 32 * i + lane;
      owner[i] = kUnknown;
      pair[i] = 0;
      if (at < end) {
        pair[i] = row_of(shared, at / moe::kTopK) * moe::kTopK + at % moe::kTopK;
        owner[i] = expert_at(a, shared, pair[i]);
      }
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 lanes = __ballot_sync(kFullWarp, owner[i] == expert);
      const u32 place = number + static_cast<u32>(__popc(lanes & ((1u << lane) - 1u)));
      if (owner[i] == expert && place < moe::kRows) found(pair[i], place);
      number += static_cast<u32>(__popc(lanes));
    }
  }
  return number;
}

}  // namespace

extern "C" __global__ void moe_plan(const __grid_constant__ PlanArguments arguments) {
  NVEP_SHARED(PlanShared, shared);
  grid_dependency_launch();
  const StepPlan plan = step_plan(arguments.plan);
  load_tables(arguments, shared);
  const u32 rows = shared.first[moe::kRanks], total = rows * moe::kTopK;
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x & 31u;
  const u32 stretch = (total + 32 * warps - 1) / (32 * warps) * 32;
  const u32 begin = min(warp * stretch, total), end = min(begin + stretch, total);
  for (u32 expert = blockIdx.x; expert < moe::kLocalExperts; expert += gridDim.x) {
    const u32 mine = for_matches(arguments, shared, expert, begin, end, [](u32, u32) {});
    if (lane == 0) shared.matches[warp] = mine;
    __syncthreads();
    u32 before = 0;
    for (u32 w = 0; w < warp; ++w) before += shared.matches[w];
    for_matches(arguments, shared, expert, begin, end, [&](u32 pair, u32 number) {
      const u32 place = before + number;
      if (place >= moe::kRows) return;  // a token that names an expert twice cannot write past the list
      store_weak(plan.pairs + expert * moe::kRows + place, pair);
      store_weak(plan.positions + pair, place);
    });
    if (warp == warps - 1 && lane == 0) store_weak(plan.counts + expert, min(before + mine, moe::kRows));
    __syncthreads();
  }
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += gridDim.x * blockDim.x) {
    const u32 row = row_of(shared, i);
    u32 owners = 0;
    for (u32 k = 0; k < moe::kTopK; ++k) {
      owners += static_cast<i32>(expert_at(arguments, shared, row * moe::kTopK + k)) >= 0;
    }
    store_weak(plan.owners + row, owners);
  }
}
