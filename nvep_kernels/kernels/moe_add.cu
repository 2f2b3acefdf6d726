// Adds the rows of shared experts to the routed ones, in place; both in the partial format.
#include "formats/elements.cuh"

using namespace nvep;

extern "C" __global__ void moe_add(const __grid_constant__ AddArguments arguments) {
  constexpr u64 row_units = moe::kHidden / kUnitElements;
  const i32 count = load_weak(reinterpret_cast<const i32*>(arguments.count));
  const u64 rows = count < 0 ? 0 : min(static_cast<u32>(count), moe::kMaxTokens);
  const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * row_units; i += stride) {
    float sum[kUnitElements], more[kUnitElements];
    moe::Elements::load(arguments.rows + i * moe::Elements::kBytes, sum);
    moe::Elements::load(arguments.shared + i * moe::Elements::kBytes, more);
#pragma unroll
    for (u32 e = 0; e < kUnitElements; ++e) sum[e] = __fadd_rn(sum[e], more[e]);
    moe::Elements::store(arguments.rows + i * moe::Elements::kBytes, sum);
  }
}
