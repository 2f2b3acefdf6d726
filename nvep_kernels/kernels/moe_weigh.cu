// Weighted sum of a library's results over the local experts of each row, in top-k order, into the partial rows.
#include "moe/library.cuh"
#include "moe/partial_store.cuh"

using namespace nvep;

extern "C" __global__ void moe_weigh(const __grid_constant__ LibraryArguments arguments) {
  const float* weights = reinterpret_cast<const float*>(arguments.expert_weights);
  for (u32 row = blockIdx.x; row < moe::kRows; row += gridDim.x) {
    bool used = false;
    for (u32 k = 0; k < moe::kTopK; ++k) used |= expert_of(arguments, row * moe::kTopK + k) >= 0;
    if (!used) continue;
    for (u32 i = threadIdx.x; i < moe::kHidden; i += blockDim.x) {
      float sum = 0.0f;
      for (u32 k = 0; k < moe::kTopK; ++k) {
        const u32 pair = row * moe::kTopK + k;
        const i32 expert = expert_of(arguments, pair);
        if (expert < 0) continue;
        const u64 place = moe::Place::of(arguments, pair, static_cast<u32>(expert));
        float value =
            bf16_to_float(load_weak(reinterpret_cast<const u16*>(arguments.outputs) + place * moe::kHidden + i));
        if (moe::kBiases) {
          const u64 element = static_cast<u64>(expert) * moe::kHidden + i;
          value = __fadd_rn(value, load_weak(reinterpret_cast<const float*>(arguments.down_biases) + element));
        }
        sum = __fadd_rn(sum, __fmul_rn(load_weak(weights + pair), value));
      }
      moe::Partial::store(arguments.partial_rows, static_cast<u64>(row) * moe::kHidden + i, sum);
    }
  }
}
