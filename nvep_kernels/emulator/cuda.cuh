// CUDA's vocabulary for the host compiler. Included before every emulated kernel; `__shared__` is left undefined on
// purpose, because shared memory is declared with NVEP_SHARED.
#pragma once

#include "emulator/fiber.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (::nvep::emulated::current()->thread_index)
#define blockIdx (::nvep::emulated::current()->block_index)
#define blockDim (::nvep::emulated::current()->block_dim)
#define gridDim (::nvep::emulated::current()->grid_dim)
#define warpSize 32

#define NVEP_VECTOR(type, scalar)                                         \
  struct alignas(2 * sizeof(scalar)) type##2 {                            \
    scalar x, y;                                                          \
  };                                                                      \
  struct alignas(sizeof(scalar) < 8 ? 4 * sizeof(scalar) : 16) type##4 {  \
    scalar x, y, z, w;                                                    \
  };                                                                      \
  inline type##2 make_##type##2(scalar x, scalar y) {                     \
    return {x, y};                                                        \
  }                                                                       \
  inline type##4 make_##type##4(scalar x, scalar y, scalar z, scalar w) { \
    return {x, y, z, w};                                                  \
  }

NVEP_VECTOR(char, signed char)
NVEP_VECTOR(uchar, unsigned char)
NVEP_VECTOR(short, short)
NVEP_VECTOR(ushort, unsigned short)
NVEP_VECTOR(int, int)
NVEP_VECTOR(uint, unsigned int)
NVEP_VECTOR(float, float)
#undef NVEP_VECTOR

struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) {
  return {x, y};
}

extern "C" int printf(const char* format, ...) __attribute__((format(printf, 1, 2)));

#include "emulator/atomics.cuh"
#include "emulator/collectives.cuh"
#include "emulator/math.cuh"
