// Gate and up projections with SwiGLU, rows read in place from the rank-major receive buffer: one block per
// (row, expert) pair, one output element per thread.
#include "moe/expert_rows.cuh"

using namespace nvep;

extern "C" __global__ void moe_gate_up(const __grid_constant__ ExpertArguments arguments) {
  constexpr u32 pairs = moe::kRows * moe::kTopK;
  const i32* ids = reinterpret_cast<const i32*>(arguments.expert_ids);
  for (u32 pair = blockIdx.x; pair < pairs; pair += gridDim.x) {
    i32 expert = local_expert(arguments, load_weak(ids + pair));
    if (expert < 0) continue;
    const uint4* row = reinterpret_cast<const uint4*>(arguments.rows + static_cast<u64>(pair / moe::kTopK) * moe::kHidden * 2);
    u16* hidden = reinterpret_cast<u16*>(arguments.intermediate) + static_cast<u64>(pair) * moe::kIntermediate;
    for (u32 n = threadIdx.x; n < moe::kIntermediate; n += blockDim.x) {
      u64 weight_row = static_cast<u64>(expert) * moe::kIntermediate + n;
      float gate = dot_bf16<moe::kHidden>(row, arguments.gate + weight_row * moe::kHidden);
      float up = dot_bf16<moe::kHidden>(row, arguments.up + weight_row * moe::kHidden);
      hidden[n] = float_to_bf16(gate / (1.0f + expf(-gate)) * up);
    }
  }
}
