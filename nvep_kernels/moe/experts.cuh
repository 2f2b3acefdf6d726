// What the row-gathering expert kernels know of a step: for each local expert the pairs (row, k) that chose it, in
// ascending order. `moe_plan` writes it; the sizes, in namespace moe, come from the prelude (nvep/moe/grouped_gemm).
#pragma once
#include "primitives/memory.cuh"
#include "primitives/reduce.cuh"
#include "primitives/shared.cuh"
#include "primitives/types.cuh"

namespace nvep {

constexpr u32 kNoPosition = 0xffffffffu;

// A pair is row * kTopK + k. Memory of a lane, written once a step.
struct StepPlan {
  u32* counts;     // [kLocalExperts] pairs of each
  u32* pairs;      // [kLocalExperts][kRows]
  u32* positions;  // [kRows * kTopK] place of a pair among its expert's, for pairs of local experts
  u32* owners;     // [kRows] local experts of each row
};

__device__ __forceinline__ StepPlan step_plan(u64 address) {
  StepPlan plan;
  plan.counts = reinterpret_cast<u32*>(address);
  plan.pairs = plan.counts + moe::kLocalExperts;
  plan.positions = plan.pairs + moe::kLocalExperts * moe::kRows;
  plan.owners = plan.positions + moe::kRows * moe::kTopK;
  return plan;
}

// Index among this rank's experts, or -1 for none and for experts of other ranks.
__device__ __forceinline__ i32 local_expert(const i32* index, i32 id) {
  return id < 0 || id >= static_cast<i32>(moe::kExperts) ? -1 : load_weak(index + id);
}

// Sum of `v` over this and the lower lanes.
__device__ __forceinline__ u32 warp_prefix(u32 v, u32 lane) {
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 below = __shfl_up_sync(kFullWarp, v, distance);
    if (lane >= distance) v += below;
  }
  return v;
}

}  // namespace nvep
