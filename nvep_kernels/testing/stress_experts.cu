// Check every row that arrived, its header and every count; write the partial rows. One block.
#include "testing/stress.cuh"

using namespace nvep;

namespace {

__device__ void check_row(const StressArguments& a, u32 step, u32 source, u32 token, u32 slot) {
  u64 row = static_cast<u64>(source) * stress::kMaxTokens + slot;
  for (u32 k = 0; k < stress::kTopK; ++k) {
    i32 id = stress::expert_of(step, source, token, k);
    if (load_weak(a.arrived_ids + row * stress::kTopK + k) != id) stress::complain(a.errors, step, 1, source);
    if (load_weak(a.arrived_weights + row * stress::kTopK + k) != stress::weight_of(step, source, token, k)) {
      stress::complain(a.errors, step, 2, source);
    }
  }
  for (u32 w = 0; w < stress::kRowWords; ++w) {
    u32 got = load_weak(a.arrived_rows + row * stress::kRowWords + w);
    if (got != stress::word_of(step, source, token, w)) stress::complain(a.errors, step, 3, source);
  }
  for (u32 e = 0; e < stress::kElements; ++e) {
    store_weak(a.partial_rows + row * stress::kElements + e,
               float_to_bf16(stress::partial_of(step, source, token, a.rank, e)));
  }
}

}  // namespace

extern "C" __global__ void stress_experts(const __grid_constant__ StressArguments a) {
  u32 step = *a.step;
  if (threadIdx.x == 0) stress::linger(step, a.rank, 1);
  __syncthreads();
  for (u32 i = threadIdx.x; i < stress::kRanks * stress::kMaxTokens; i += blockDim.x) {
    u32 source = i / stress::kMaxTokens, token = i % stress::kMaxTokens;
    u32 count = stress::count_of(step, source);
    u32 before = 0, routed = 0;
    for (u32 t = 0; t < count; ++t) {
      bool here = stress::goes_to(a.expert_ranks, step, source, t, a.rank);
      before += here && t < token;
      routed += here;
    }
    bool here = token < count && stress::goes_to(a.expert_ranks, step, source, token, a.rank);
    if (here) check_row(a, step, source, token, a.compact ? before : token);
    u32 expected = a.compact ? routed : count;
    if (static_cast<u32>(a.counts[source]) != expected) stress::complain(a.errors, step, 4, source);
    // This thread's slot holds no token under Fence beyond the count, under Sentinel where the token went elsewhere.
    if (a.compact ? token >= routed : !here) {
      i32 id = load_weak(a.arrived_ids + static_cast<u64>(i) * stress::kTopK);
      if (id >= 0) stress::complain(a.errors, step, 5, source);
    }
  }
}
