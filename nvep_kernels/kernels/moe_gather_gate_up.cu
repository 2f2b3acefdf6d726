// Gate and up projections with their activation, rows read in place by index from the rank-major receive buffer. The
// sixteen weight rows of a warp are eight of gate and the same eight of up: both meet in one thread.
#include "moe/activation.cuh"
#include "moe/gather.cuh"

using namespace nvep;

namespace {

struct GateUp : Division<moe::kHidden, moe::kIntermediate, 64, moe::Weights> {
  using Weights = moe::Weights;
  using Rows = moe::Rows;
  static constexpr u32 kInner = moe::kHidden;

  __device__ __forceinline__ static u64 any_weight(const GatherArguments& a) { return a.gate; }

  __device__ __forceinline__ static u64 weight_row(const GatherArguments& a, const Cursor<GateUp>& at, u32 row) {
    const u32 output = at.output + row / 16 * 8 + row % 8;
    if (output >= moe::kIntermediate) return 0;
    const u64 matrix_row = static_cast<u64>(at.expert) * moe::kIntermediate + output;
    return (row % 16 < 8 ? a.gate : a.up) + matrix_row * moe::kHidden * Weights::kElementBytes;
  }

  __device__ __forceinline__ static const float* weight_scale(const GatherArguments& a, const Cursor<GateUp>& at,
                                                              u32 which) {
    constexpr u32 block = Weights::kScaleBlock ? Weights::kScaleBlock : 1, columns = (kInner + block - 1) / block;
    constexpr u32 rows = (moe::kIntermediate + block - 1) / block;
    const u64 scale_row = static_cast<u64>(at.expert) * rows + at.output / block;
    return reinterpret_cast<const float*>(which ? a.up_scales : a.gate_scales) + scale_row * columns + at.chunk;
  }

  __device__ __forceinline__ static u32 token_row(const GatherArguments& a, const TileOffsets&,
                                                  const Cursor<GateUp>& at, u32 token) {
    return load_weak(step_plan(a.plan).pairs + at.expert * moe::kRows + at.token + token) / moe::kTopK;
  }

  template <u32 kGroups>
  __device__ __forceinline__ static void finish(const GatherArguments& a, GatherShared& shared,
                                                const Cursor<GateUp>& at, const float (&total)[kGroups][4]) {
    const u32 lane = threadIdx.x & 31u, output = at.output + threadIdx.x / 32 * 8 + lane / 4;
    if (output >= moe::kIntermediate) return;
    float gate_bias = 0.0f, up_bias = 0.0f;
    if (moe::kBiases) {
      const u64 element = static_cast<u64>(at.expert) * moe::kIntermediate + output;
      gate_bias = load_weak(reinterpret_cast<const float*>(a.gate_biases) + element);
      up_bias = load_weak(reinterpret_cast<const float*>(a.up_biases) + element);
    }
    u16* target = reinterpret_cast<u16*>(a.intermediate) + output;
    const u64 first = shared.offsets.pairs[at.expert] + at.token;
#pragma unroll
    for (u32 j = 0; j < kGroups; ++j) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 token = 8 * j + 2 * (lane % 4) + i;
        if (token >= at.tokens) continue;
        float gate = total[j][i], up = total[j][2 + i];
        if (moe::kBiases) {
          gate = __fadd_rn(gate, gate_bias);
          up = __fadd_rn(up, up_bias);
        }
        store_weak(target + (first + token) * moe::kIntermediate, float_to_bf16(moe::Activation::apply(gate, up)));
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 2)
    moe_gather_gate_up(const __grid_constant__ GatherArguments arguments) {
  NVEP_SHARED(GatherShared, shared);
  NVEP_DYNAMIC_SHARED(memory);
  gather_tiles<GateUp>(arguments, shared, memory, {arguments.rows, arguments.row_scales});
}
