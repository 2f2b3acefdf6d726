// Conversions between float and 16-bit or 8-bit formats held as raw bits, rounding to nearest even. Both devices
// give the same bits: every NaN becomes the format's canonical one (0x7fffffff, 0x7fff, 0x7f).
#pragma once

#include "primitives/types.cuh"

namespace nvep {

__device__ __forceinline__ float bits_to_float(u32 bits) {
#ifdef NVEP_EMULATED
  float v;
  __builtin_memcpy(&v, &bits, sizeof(v));
  return v;
#else
  return __uint_as_float(bits);
#endif
}

__device__ __forceinline__ u32 float_to_bits(float v) {
#ifdef NVEP_EMULATED
  u32 bits;
  __builtin_memcpy(&bits, &v, sizeof(bits));
  return bits;
#else
  return __float_as_uint(v);
#endif
}

namespace detail {

// `magnitude` holds a finite float without sign. Rounds it to `mantissa_bits` fraction bits with exponent bias
// `bias`, subnormals included, and returns exponent and fraction side by side (which may exceed the format's range).
__device__ __forceinline__ u32 round_to_format(u32 magnitude, u32 mantissa_bits, u32 bias) {
  const i32 exponent = static_cast<i32>(magnitude >> 23) - 127 + static_cast<i32>(bias);
  u32 drop = 23 - mantissa_bits;
  u32 significand = magnitude & 0x7fffffu;
  u32 kept = 0;
  if (exponent >= 1) {
    kept = static_cast<u32>(exponent) << mantissa_bits;
  } else {
    if (magnitude >> 23) significand |= 0x800000u;
    drop += static_cast<u32>(1 - exponent);
    if (drop > 31) return 0;
  }
  const u32 half = 1u << (drop - 1);
  const u32 rest = significand & ((1u << drop) - 1);
  kept += significand >> drop;
  return kept + ((rest > half || (rest == half && (kept & 1))) ? 1u : 0u);
}

__device__ __forceinline__ float e4m3_bits_to_float(u32 v) {
  const u32 sign = (v & 0x80u) << 24;
  const u32 exponent = (v >> 3) & 0xfu;
  const u32 fraction = v & 7u;
  if ((v & 0x7fu) == 0x7fu) return bits_to_float(0x7fffffffu);
  if (exponent) return bits_to_float(sign | ((exponent + 120u) << 23) | (fraction << 20));
  const float magnitude = static_cast<float>(fraction) * 0x1p-9f;
  return sign ? -magnitude : magnitude;
}

__device__ __forceinline__ u8 float_to_e4m3_bits(u32 bits) {
  const u32 sign = (bits >> 24) & 0x80u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  const u32 rounded = magnitude == 0x7f800000u ? 0x7eu : round_to_format(magnitude, 3, 7);
  return static_cast<u8>(sign | (rounded > 0x7eu ? 0x7eu : rounded));
}

}  // namespace detail

__device__ __forceinline__ float bf16_to_float(u16 v) {
  return bits_to_float(static_cast<u32>(v) << 16);
}

__device__ __forceinline__ u16 float_to_bf16(float v) {
#ifdef NVEP_EMULATED
  const u32 bits = float_to_bits(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#else
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
#endif
}

// Two at once, `low` in the lower half.
__device__ __forceinline__ u32 floats_to_bf16(float low, float high) {
#ifdef NVEP_EMULATED
  return float_to_bf16(low) | static_cast<u32>(float_to_bf16(high)) << 16;
#else
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#endif
}

__device__ __forceinline__ float half_to_float(u16 v) {
  const u32 magnitude = v & 0x7fffu;
  if (magnitude > 0x7c00u) return bits_to_float(0x7fffffffu);
#ifdef NVEP_EMULATED
  const u32 sign = (v & 0x8000u) << 16;
  if (magnitude == 0x7c00u) return bits_to_float(sign | 0x7f800000u);
  if (magnitude >= 0x400u) return bits_to_float(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
#else
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
#endif
}

__device__ __forceinline__ u16 float_to_half(float v) {
#ifdef NVEP_EMULATED
  const u32 bits = float_to_bits(v);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  const u32 rounded = magnitude == 0x7f800000u ? 0x7c00u : detail::round_to_format(magnitude, 10, 15);
  return static_cast<u16>(sign | (rounded > 0x7c00u ? 0x7c00u : rounded));
#else
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
#endif
}

__device__ __forceinline__ u32 floats_to_halves(float low, float high) {
#ifdef NVEP_EMULATED
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
#else
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#endif
}

__device__ __forceinline__ float e4m3_to_float(u8 v) {
  return detail::e4m3_bits_to_float(v);
}

// Finite saturation: anything beyond 448, infinities included, becomes 448 with its sign.
__device__ __forceinline__ u8 float_to_e4m3(float v) {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(v));
  return static_cast<u8>(r);
#else
  return detail::float_to_e4m3_bits(float_to_bits(v));
#endif
}

}  // namespace nvep
