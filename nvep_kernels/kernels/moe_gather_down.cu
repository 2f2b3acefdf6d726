// Down projection, routing weights and the sum over a rank's local experts, written straight into the partial rows that
// combine exposes. A row with one local expert is stored at once; of several the last to be done adds the products of all
// in top-k order.
#include "moe/gather.cuh"
#include "moe/partial_store.cuh"

using namespace nvep;

namespace {

struct Down : Division<moe::kIntermediate, moe::kHidden, 128, moe::Weights> {
  using Weights = moe::Weights;
  using Rows = RowsBf16<moe::kIntermediate * 2>;
  static constexpr u32 kInner = moe::kIntermediate;

  __device__ __forceinline__ static u64 any_weight(const GatherArguments& a) { return a.down; }

  __device__ __forceinline__ static u64 weight_row(const GatherArguments& a, const Cursor<Down>& at, u32 row) {
    if (at.output + row >= moe::kHidden) return 0;
    const u64 matrix_row = static_cast<u64>(at.expert) * moe::kHidden + at.output + row;
    return a.down + matrix_row * moe::kIntermediate * Weights::kElementBytes;
  }

  __device__ __forceinline__ static const float* weight_scale(const GatherArguments& a, const Cursor<Down>& at, u32) {
    constexpr u32 block = Weights::kScaleBlock ? Weights::kScaleBlock : 1, columns = (kInner + block - 1) / block;
    constexpr u32 rows = (moe::kHidden + block - 1) / block;
    const u64 scale_row = static_cast<u64>(at.expert) * rows + at.output / block;
    return reinterpret_cast<const float*>(a.down_scales) + scale_row * columns + at.chunk;
  }

  __device__ __forceinline__ static u32 token_row(const GatherArguments&, const TileOffsets& offsets,
                                                  const Cursor<Down>& at, u32 token) {
    return offsets.pairs[at.expert] + at.token + token;
  }

  __device__ __forceinline__ static u32 pair_of(const GatherArguments& a, const Cursor<Down>& at, u32 token) {
    return load_weak(step_plan(a.plan).pairs + at.expert * moe::kRows + at.token + token);
  }

  template <u32 kGroups>
  __device__ __forceinline__ static void finish(const GatherArguments& a, GatherShared& shared, const Cursor<Down>& at,
                                                const float (&total)[kGroups][4]) {
    const u32 lane = threadIdx.x & 31u, first = at.output + threadIdx.x / 32 * 16 + lane / 4;
    float bias[2] = {};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 output = first + 8 * half;
      if (!moe::kBiases || output >= moe::kHidden) continue;
      const u64 element = static_cast<u64>(at.expert) * moe::kHidden + output;
      bias[half] = load_weak(reinterpret_cast<const float*>(a.down_biases) + element);
    }
#pragma unroll
    for (u32 j = 0; j < kGroups; ++j) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 token = 8 * j + 2 * (lane % 4) + i;
        if (token >= at.tokens) continue;
        const float values[2] = {total[j][i], total[j][2 + i]};
        store_token(a, shared, at, token, first, values, bias);
      }
    }
    if (moe::kTopK > 1 && moe::kLocalExperts > 1) join_rows(a, shared, at);
  }

  // The outputs `first` and `first + 8` of one token.
  __device__ __forceinline__ static void store_token(const GatherArguments& a, const GatherShared& shared,
                                                     const Cursor<Down>& at, u32 token, u32 first,
                                                     const float (&values)[2], const float (&bias)[2]) {
    const u32 pair = pair_of(a, at, token), row = pair / moe::kTopK;
    const float weight = load_weak(reinterpret_cast<const float*>(a.expert_weights) + pair);
    const bool alone = load_weak(step_plan(a.plan).owners + row) == 1;
    const u64 position = token_row(a, shared.offsets, at, token);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 output = first + 8 * half;
      if (output >= moe::kHidden) continue;
      const float value = moe::kBiases ? __fadd_rn(values[half], bias[half]) : values[half];
      const float product = __fmul_rn(weight, value);
      if (alone) {
        moe::Partial::store(a.partial_rows, static_cast<u64>(row) * moe::kHidden + output, __fadd_rn(0.0f, product));
      } else {
        store_weak(reinterpret_cast<float*>(a.products) + position * moe::kHidden + output, product);
      }
    }
  }

  // Of rows with several local experts, those whose last product of this tile's outputs this block has just stored.
  __device__ __forceinline__ static void join_rows(const GatherArguments& a, GatherShared& shared,
                                                   const Cursor<Down>& at) {
    __syncthreads();
    bool last = false;
    if (threadIdx.x < at.tokens) {
      const u32 row = pair_of(a, at, threadIdx.x) / moe::kTopK;
      const u32 owners = load_weak(step_plan(a.plan).owners + row);
      if (owners > 1) {
        u32* counter = reinterpret_cast<u32*>(a.row_counters) + row * kOutputTiles + at.output / kTileOutputs;
        last = fetch_add_acq_rel_device(counter, 1) + 1 == owners;
        if (last) store_weak(counter, 0u);  // for the next step
      }
      shared.last_tokens[threadIdx.x] = last;
    }
    if (!__syncthreads_or(last)) return;
    for (u32 token = threadIdx.x / 32; token < at.tokens; token += kGatherThreads / 32) {
      if (shared.last_tokens[token]) join_row(a, shared, at, pair_of(a, at, token) / moe::kTopK);
    }
  }

  __device__ __forceinline__ static void join_row(const GatherArguments& a, const GatherShared& shared,
                                                  const Cursor<Down>& at, u32 row) {
    constexpr u32 each = kTileOutputs / 32;
    const u32 lane = threadIdx.x & 31u;
    float sum[each] = {};
    for (u32 k = 0; k < moe::kTopK; ++k) {
      const u32 pair = row * moe::kTopK + k;
      const i32 expert = local_expert(a.local_experts, load_weak(reinterpret_cast<const i32*>(a.expert_ids) + pair));
      if (expert < 0) continue;
      const u64 position = shared.offsets.pairs[expert] + load_weak(step_plan(a.plan).positions + pair);
      const float* products = reinterpret_cast<const float*>(a.products) + position * moe::kHidden + at.output;
#pragma unroll
      for (u32 i = 0; i < each; ++i) {
        if (at.output + lane + 32 * i < moe::kHidden) sum[i] = __fadd_rn(sum[i], load_weak(products + lane + 32 * i));
      }
    }
#pragma unroll
    for (u32 i = 0; i < each; ++i) {
      const u32 output = at.output + lane + 32 * i;
      if (output < moe::kHidden)
        moe::Partial::store(a.partial_rows, static_cast<u64>(row) * moe::kHidden + output, sum[i]);
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 2)
    moe_gather_down(const __grid_constant__ GatherArguments arguments) {
  NVEP_SHARED(GatherShared, shared);
  NVEP_DYNAMIC_SHARED(memory);
  gather_tiles<Down>(arguments, shared, memory, {arguments.intermediate, 0});
}
