// Partial rows in 16-byte units: widen to float32, add, and round once. `start` is `add` to -0, the identity of addition.
#pragma once
#include "primitives/convert.cuh"
#include "primitives/types.cuh"

namespace nvep {

// Two 16-bit elements a word; Convert supplies widen(u16) and narrow(low, high).
template <class Convert>
struct Partial16 {
  static constexpr int kElements = 8;

  // No addition: where it would matter, to a NaN, narrowing does the same.
  __device__ static void start(float (&sum)[kElements], const uint4& unit) {
    const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] = Convert::widen(static_cast<u16>(words[i] & 0xffffu));
      sum[2 * i + 1] = Convert::widen(static_cast<u16>(words[i] >> 16));
    }
  }

  __device__ static void add(float (&sum)[kElements], const uint4& unit) {
    const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] = __fadd_rn(sum[2 * i], Convert::widen(static_cast<u16>(words[i] & 0xffffu)));
      sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], Convert::widen(static_cast<u16>(words[i] >> 16)));
    }
  }

  __device__ static uint4 round(const float (&sum)[kElements]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Convert::narrow(sum[2 * i], sum[2 * i + 1]);
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

struct ConvertBf16 {
  __device__ static float widen(u16 v) { return bf16_to_float(v); }
  __device__ static u32 narrow(float low, float high) { return floats_to_bf16(low, high); }
};

struct ConvertFp16 {
  __device__ static float widen(u16 v) { return half_to_float(v); }
  __device__ static u32 narrow(float low, float high) { return floats_to_halves(low, high); }
};

using PartialBf16 = Partial16<ConvertBf16>;
using PartialFp16 = Partial16<ConvertFp16>;

struct PartialFp32 {
  static constexpr int kElements = 4;

  __device__ static void start(float (&sum)[kElements], const uint4& unit) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[e] = -0.0f;
    add(sum, unit);
  }

  __device__ static void add(float (&sum)[kElements], const uint4& unit) {
    sum[0] = __fadd_rn(sum[0], __uint_as_float(unit.x));
    sum[1] = __fadd_rn(sum[1], __uint_as_float(unit.y));
    sum[2] = __fadd_rn(sum[2], __uint_as_float(unit.z));
    sum[3] = __fadd_rn(sum[3], __uint_as_float(unit.w));
  }

  __device__ static uint4 round(const float (&sum)[kElements]) {
    return make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                      __float_as_uint(sum[3]));
  }
};

}  // namespace nvep
