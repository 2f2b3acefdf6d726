// exp and the logistic function in float32 from single rounded operations, so that every device and NumPy give the same
// bits. Within two units in the last place of the exact value.
#pragma once
#include "primitives/convert.cuh"
#include "primitives/types.cuh"

namespace nvep {

// For x <= 0; zero below -87, where the exact value is less than 2e-38. NaN gives zero.
__device__ __forceinline__ float exp_nonpositive(float x) {
  if (!(x >= -87.0f)) return 0.0f;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), magic);
  const float n = __fsub_rn(shifted, magic);
  // ln 2 in two parts; n times the first is exact.
  const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
  float p = 1.0f / 5040.0f;
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6.0f);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
}

__device__ __forceinline__ float logistic(float x) {
  const float e = exp_nonpositive(x > 0.0f ? -x : x);
  return __fdiv_rn(x >= 0.0f ? 1.0f : e, __fadd_rn(1.0f, e));
}

}  // namespace nvep
