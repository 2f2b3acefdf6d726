// Down projection, routing weights and the sum over a rank's local experts, in top-k order: one block per row, one output
// element per thread, written straight into the partial rows that combine exposes.
#include "moe/expert_rows.cuh"

using namespace nvep;

extern "C" __global__ void moe_down(const __grid_constant__ ExpertArguments arguments) {
  const i32* ids = reinterpret_cast<const i32*>(arguments.expert_ids);
  const float* weights = reinterpret_cast<const float*>(arguments.expert_weights);
  for (u32 row = blockIdx.x; row < moe::kRows; row += gridDim.x) {
    bool used = false;
    for (u32 k = 0; k < moe::kTopK; ++k) used |= local_expert(arguments, load_weak(ids + row * moe::kTopK + k)) >= 0;
    if (!used) continue;
    for (u32 n = threadIdx.x; n < moe::kHidden; n += blockDim.x) {
      float sum = 0.0f;
      for (u32 k = 0; k < moe::kTopK; ++k) {
        u32 pair = row * moe::kTopK + k;
        i32 expert = local_expert(arguments, load_weak(ids + pair));
        if (expert < 0) continue;
        const uint4* hidden = reinterpret_cast<const uint4*>(arguments.intermediate + static_cast<u64>(pair) * moe::kIntermediate * 2);
        u64 weight_row = static_cast<u64>(expert) * moe::kHidden + n;
        float value = dot_bf16<moe::kIntermediate>(hidden, arguments.down + weight_row * moe::kIntermediate);
        sum = __fadd_rn(sum, __fmul_rn(load_weak(weights + pair), value));
      }
      moe::Partial::store(arguments.partial_rows, static_cast<u64>(row) * moe::kHidden + n, sum);
    }
  }
}
