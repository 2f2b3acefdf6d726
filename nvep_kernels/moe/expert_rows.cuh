// What the plain expert kernels share: which experts are local, and a bf16 dot product in float32.
#pragma once
#include "primitives/convert.cuh"
#include "primitives/memory.cuh"
#include "primitives/types.cuh"

namespace nvep {

// Index among this rank's experts, or -1 for none and for experts of other ranks.
__device__ inline i32 local_expert(const ExpertArguments& a, i32 id) { return id < 0 ? -1 : a.local_experts[id]; }

// Eight running sums, added pairwise at the end: a fixed order. Both operands are 16-byte aligned.
template <u32 kElements>
__device__ inline float dot_bf16(const uint4* row, const unsigned short* weights) {
  const uint4* other = reinterpret_cast<const uint4*>(weights);
  float sum[8] = {};
  for (u32 i = 0; i < kElements / 8; ++i) {
    uint4 a = load_weak(row + i), b = other[i];
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum[2 * w] += __uint_as_float(left[w] << 16) * __uint_as_float(right[w] << 16);
      sum[2 * w + 1] += __uint_as_float(left[w] & 0xffff0000u) * __uint_as_float(right[w] & 0xffff0000u);
    }
  }
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

struct StoreBf16 {
  __device__ static void store(u64 base, u64 element, float v) { store_weak(reinterpret_cast<u16*>(base) + element, float_to_bf16(v)); }
};
struct StoreFp16 {
  __device__ static void store(u64 base, u64 element, float v) { store_weak(reinterpret_cast<u16*>(base) + element, float_to_half(v)); }
};
struct StoreFp32 {
  __device__ static void store(u64 base, u64 element, float v) { store_weak(reinterpret_cast<float*>(base) + element, v); }
};

}  // namespace nvep
