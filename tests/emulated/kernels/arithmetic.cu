// Rounded products and sums, fused and not, and the integer intrinsics.
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void arithmetic(const __grid_constant__ ArithmeticArguments arguments) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= arguments.count) return;
  const float a = arguments.a[i], b = arguments.b[i], c = arguments.c[i];
  float* f = arguments.floats + i * 8;
  f[0] = __fadd_rn(__fmul_rn(a, b), c);
  f[1] = __fmaf_rn(a, b, c);
  f[2] = a * b + c;
  f[3] = min(a, b);
  f[4] = max(a, b);
  f[5] = __fdividef(a, b);
  f[6] = rsqrtf(a * a);
  f[7] = __expf(c) - expf(c);
  const u32 bits = __float_as_uint(a);
  i32* n = arguments.integers + i * 8;
  n[0] = __popc(bits);
  n[1] = __ffs(static_cast<i32>(bits));
  n[2] = __clz(static_cast<i32>(bits));
  n[3] = __popcll(static_cast<u64>(bits) * bits);
  n[4] = __ffsll(static_cast<i64>(static_cast<u64>(bits) << 20));
  n[5] = min(static_cast<i32>(bits), 5);
  n[6] = static_cast<i32>(max(bits, 5u));
  n[7] = static_cast<i32>(warpSize);
}
