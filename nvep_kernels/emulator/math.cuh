// Arithmetic that CUDA declares without a header. The *_rn functions are exactly the GPU's (contraction is off);
// expf, rsqrtf and the fast forms differ from it in the last bits.
#pragma once

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float tanhf(float) noexcept;
float sqrtf(float) noexcept;
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
float rintf(float) noexcept;
}

inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsqrt_rn(float a) {
  return sqrtf(a);
}
inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __expf(float a) {
  return expf(a);
}
inline float rsqrtf(float a) {
  return 1.0f / sqrtf(a);
}

#define NVEP_MIN_MAX(type)          \
  inline type min(type a, type b) { \
    return b < a ? b : a;           \
  }                                 \
  inline type max(type a, type b) { \
    return a < b ? b : a;           \
  }
NVEP_MIN_MAX(int)
NVEP_MIN_MAX(unsigned)
NVEP_MIN_MAX(long)
NVEP_MIN_MAX(unsigned long)
NVEP_MIN_MAX(long long)
NVEP_MIN_MAX(unsigned long long)
#undef NVEP_MIN_MAX
inline float min(float a, float b) {
  return fminf(a, b);
}
inline float max(float a, float b) {
  return fmaxf(a, b);
}

inline int __popc(unsigned v) {
  return __builtin_popcount(v);
}
inline int __popcll(unsigned long long v) {
  return __builtin_popcountll(v);
}
inline int __ffs(int v) {
  return __builtin_ffs(v);
}
inline int __ffsll(long long v) {
  return __builtin_ffsll(v);
}
inline int __clz(int v) {
  return v ? __builtin_clz(static_cast<unsigned>(v)) : 32;
}
inline int __clzll(long long v) {
  return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64;
}

template <class To, class From>
inline To nvep_bit_cast(From v) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To r;
  __builtin_memcpy(&r, &v, sizeof(r));
  return r;
}
inline unsigned __float_as_uint(float v) {
  return nvep_bit_cast<unsigned>(v);
}
inline int __float_as_int(float v) {
  return nvep_bit_cast<int>(v);
}
inline float __uint_as_float(unsigned v) {
  return nvep_bit_cast<float>(v);
}
inline float __int_as_float(int v) {
  return nvep_bit_cast<float>(v);
}
