// The synthetic experts of replay: expert e multiplies a bf16 row by 1 + e / 1024. A rank's partial row is the weighted
// sum over its own experts in top-k order; every product and every sum is rounded, as in nvep/reference/experts.py.
#include "formats/partial.cuh"
#include "primitives/memory.cuh"

using namespace nvep;

namespace {

constexpr u32 kUnitElements = 8;  // bf16 elements in the 16 bytes that one thread takes at a time

__device__ inline void widen(const uint4& unit, float (&row)[kUnitElements]) {
  const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    row[2 * i] = bf16_to_float(static_cast<u16>(words[i] & 0xffffu));
    row[2 * i + 1] = bf16_to_float(static_cast<u16>(words[i] >> 16));
  }
}

__device__ inline void store_partial(uint4* out, const float (&sum)[kUnitElements]) {
#pragma unroll
  for (u32 first = 0; first < kUnitElements; first += Partial::kElements) {
    float part[Partial::kElements];
#pragma unroll
    for (u32 i = 0; i < Partial::kElements; ++i) part[i] = sum[first + i];
    store_weak(out + first / Partial::kElements, Partial::round(part));
  }
}

}  // namespace

extern "C" __global__ void scale_experts(const __grid_constant__ ScaleExpertsArguments arguments) {
  constexpr u64 work = static_cast<u64>(config::kSlots) * config::kRowUnits;
  constexpr u32 units_out = kUnitElements / Partial::kElements;
  const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < work; i += stride) {
    const u64 slot = i / config::kRowUnits;
    float row[kUnitElements], sum[kUnitElements] = {};
    bool mine = false;  // a slot without one of this rank's experts holds no token
    for (u32 k = 0; k < config::kTopK; ++k) {
      const i32 expert = load_weak(arguments.expert_ids + slot * config::kTopK + k);
      if (expert < 0 || expert >= config::kNumExperts) continue;
      if (static_cast<u32>(arguments.expert_ranks[expert]) != arguments.rank) continue;
      if (!mine) widen(load_weak(reinterpret_cast<const uint4*>(arguments.rows) + i), row);
      mine = true;
      const float scale = __fadd_rn(1.0f, __fmul_rn(static_cast<float>(expert), 1.0f / 1024.0f));
      const float weight = load_weak(arguments.expert_weights + slot * config::kTopK + k);
#pragma unroll
      for (u32 e = 0; e < kUnitElements; ++e) {
        sum[e] = __fadd_rn(sum[e], __fmul_rn(weight, __fmul_rn(row[e], scale)));
      }
    }
    if (mine) store_partial(reinterpret_cast<uint4*>(arguments.partial_rows) + i * units_out, sum);
  }
}
