// Conversions of e2m1 (4 bits) and ue8m0 (a power of two in 8 bits), and of pairs where one instruction does two. Both
// devices give the same bits.
#pragma once

#include "primitives/convert.cuh"
#include "primitives/types.cuh"

namespace nvep {

__device__ __forceinline__ bool is_finite(float v) {
  return (float_to_bits(v) & 0x7fffffffu) < 0x7f800000u;
}

// To nearest, ties to even, in the low four bits; anything beyond 6 becomes 6 with its sign. NaN gives a zero.
__device__ __forceinline__ u32 float_to_e2m1(float v) {
  const u32 bits = float_to_bits(v);
  const float m = bits_to_float(bits & 0x7fffffffu);
  const u32 code = static_cast<u32>(m > 0.25f) + static_cast<u32>(m >= 0.75f) + static_cast<u32>(m > 1.25f) +
                   static_cast<u32>(m >= 1.75f) + static_cast<u32>(m > 2.5f) + static_cast<u32>(m >= 3.5f) +
                   static_cast<u32>(m > 5.0f);
  return ((bits >> 28) & 8u) | code;
}

// Only the low four bits of `v` count.
__device__ __forceinline__ float e2m1_to_float(u32 v) {
  const u32 sign = (v & 8u) << 28;
  const u32 magnitude = v & 7u;
  if (magnitude < 2) return bits_to_float(sign | (magnitude ? 0x3f000000u : 0u));
  return bits_to_float(sign | ((magnitude << 22) + (126u << 23)));
}

// The smallest power of two that is not below `v`, a normal number up to 2^127.
__device__ __forceinline__ u8 float_to_ue8m0(float v) {
  const u32 bits = float_to_bits(v);
  return static_cast<u8>((bits >> 23) + ((bits & 0x7fffffu) ? 1u : 0u));
}

// 2^(v - 127); 255 is NaN.
__device__ __forceinline__ float ue8m0_to_float(u8 v) {
  const u32 exponent = v;
  return bits_to_float(exponent == 255u ? 0x7fffffffu : exponent ? exponent << 23 : 0x00400000u);
}

// Two at a time, the first in the low half; as float_to_bf16.
__device__ __forceinline__ u32 float2_to_bf16x2(float low, float high) {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 800
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return float_to_bf16(low) | (static_cast<u32>(float_to_bf16(high)) << 16);
#endif
}

// Two at a time, the first in the low half; as float_to_half.
__device__ __forceinline__ u32 float2_to_half2(float low, float high) {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 800
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return float_to_half(low) | (static_cast<u32>(float_to_half(high)) << 16);
#endif
}

// Two at a time, the first in the low byte; as float_to_e4m3.
__device__ __forceinline__ u16 float2_to_e4m3x2(float low, float high) {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#else
  return static_cast<u16>(float_to_e4m3(low) | (static_cast<u32>(float_to_e4m3(high)) << 8));
#endif
}

// Both e4m3 of a word, the low byte first: one instruction where there is one, since GEMMs do this in their load stage.
__device__ __forceinline__ float2 e4m3x2_to_float2(u16 v) {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 890
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(v));
  return make_float2(half_to_float(static_cast<u16>(halves & 0xffffu)), half_to_float(static_cast<u16>(halves >> 16)));
#else
  return make_float2(e4m3_to_float(static_cast<u8>(v & 0xffu)), e4m3_to_float(static_cast<u8>(v >> 8)));
#endif
}

// Four finite e4m3, the first in the low byte, as bf16, which holds them exactly: three integer operations and half a
// multiplication each, where conversions through float take twice as many. The bits of e4m3, moved to the place of bf16's
// exponent and fraction, are the value times 2^-120, also where it is subnormal.
__device__ __forceinline__ uint2 e4m3x4_to_bf16x4(u32 v) {
#ifdef NVEP_EMULATED
  const u32 low = (v & 0xffu) << 8 | (v & 0xff00u) << 16, high = (v & 0xff0000u) >> 8 | (v & 0xff000000u);
#else
  const u32 low = __byte_perm(v, 0, 0x1404), high = __byte_perm(v, 0, 0x3424);
#endif
  const u32 halves[2] = {(low & 0x80008000u) | ((low >> 4) & 0x07f007f0u),
                         (high & 0x80008000u) | ((high >> 4) & 0x07f007f0u)};
  u32 result[2];
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result[i]) : "r"(halves[i]), "r"(0x7b807b80u), "r"(0x80008000u));
#else
    const float first = bf16_to_float(static_cast<u16>(halves[i])) * 0x1p120f;
    const float second = bf16_to_float(static_cast<u16>(halves[i] >> 16)) * 0x1p120f;
    result[i] = floats_to_bf16(first, second);
#endif
  }
  return make_uint2(result[0], result[1]);
}

}  // namespace nvep
