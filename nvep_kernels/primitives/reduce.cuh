// Reductions over a full warp: every lane calls them and every lane gets the result.
#pragma once

#include "primitives/types.cuh"

namespace nvep {

constexpr u32 kFullWarp = 0xffffffffu;

__device__ __forceinline__ u32 warp_max(u32 v) {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 800
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
#else
  for (int lanes = 16; lanes > 0; lanes /= 2) v = max(v, __shfl_xor_sync(kFullWarp, v, lanes));
  return v;
#endif
}

__device__ __forceinline__ u32 warp_min(u32 v) {
  return ~warp_max(~v);
}

// In a fixed order: halves are added to halves.
__device__ __forceinline__ float warp_sum(float v) {
  for (int lanes = 16; lanes > 0; lanes /= 2) v = __fadd_rn(v, __shfl_xor_sync(kFullWarp, v, lanes));
  return v;
}

}  // namespace nvep
