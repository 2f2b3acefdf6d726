// Rows of 16-bit or 32-bit floats, eight elements at a time: what is quantised, and what dequantisation gives.
#pragma once
#include "primitives/convert_small.cuh"
#include "primitives/memory.cuh"
#include "primitives/types.cuh"

namespace nvep {

constexpr u32 kUnitElements = 8;  // a thread's share: 16 bytes of a 16-bit format

// Eight 16-bit elements; Convert supplies widen(u16) and narrow(low, high).
template <class Convert>
struct Elements16 {
  static constexpr u32 kBytes = 16;

  __device__ __forceinline__ static void unpack(const uint4& words, float (&x)[kUnitElements]) {
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      x[2 * i] = Convert::widen(static_cast<u16>(word[i] & 0xffffu));
      x[2 * i + 1] = Convert::widen(static_cast<u16>(word[i] >> 16));
    }
  }

  __device__ __forceinline__ static uint4 pack(const float (&x)[kUnitElements]) {
    u32 word[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) word[i] = Convert::narrow(x[2 * i], x[2 * i + 1]);
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  __device__ __forceinline__ static void load(u64 address, float (&x)[kUnitElements]) {
    unpack(load_weak(reinterpret_cast<const uint4*>(address)), x);
  }

  __device__ __forceinline__ static void store(u64 address, const float (&x)[kUnitElements]) {
    store_weak(reinterpret_cast<uint4*>(address), pack(x));
  }
};

struct NarrowBf16 {
  __device__ __forceinline__ static float widen(u16 v) { return bf16_to_float(v); }
  __device__ __forceinline__ static u32 narrow(float low, float high) { return float2_to_bf16x2(low, high); }
};

struct NarrowFp16 {
  __device__ __forceinline__ static float widen(u16 v) { return half_to_float(v); }
  __device__ __forceinline__ static u32 narrow(float low, float high) { return float2_to_half2(low, high); }
};

using ElementsBf16 = Elements16<NarrowBf16>;
using ElementsFp16 = Elements16<NarrowFp16>;

struct ElementsFp32 {
  static constexpr u32 kBytes = 32;

  __device__ __forceinline__ static void load(u64 address, float (&x)[kUnitElements]) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const uint4 v = load_weak(reinterpret_cast<const uint4*>(address) + half);
      const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) x[4 * half + i] = bits_to_float(word[i]);
    }
  }

  __device__ __forceinline__ static void store(u64 address, const float (&x)[kUnitElements]) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const float* from = x + 4 * half;
      const uint4 v =
          make_uint4(float_to_bits(from[0]), float_to_bits(from[1]), float_to_bits(from[2]), float_to_bits(from[3]));
      store_weak(reinterpret_cast<uint4*>(address) + half, v);
    }
  }
};

}  // namespace nvep
