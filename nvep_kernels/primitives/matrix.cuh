// Matrix instructions of a warp (sm_80 and up): D += A B with A 16 x 16, B 16 x 8 and D 16 x 8 in float32. All 32 lanes
// call them together. With g = lane / 4 and t = lane % 4 a lane holds
// - of A four words: rows g, g + 8, g, g + 8; columns 2t and 2t + 1 in the first two, 2t + 8 and 2t + 9 in the others;
// - of B two words: rows 2t and 2t + 1, then 2t + 8 and 2t + 9, of column g;
// - of D rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1.
// The sum over the inner dimension may take its elements in any order, as long as A and B agree on it.
#pragma once
#include "primitives/convert.cuh"
#include "primitives/shared.cuh"
#include "primitives/types.cuh"

namespace nvep {

#ifdef NVEP_EMULATED

namespace detail {

// What the lanes of each warp hold of A (words 0 to 3) and B.
struct MatrixWords {
  u32 of[32][32][6];
};

template <float (*kWiden)(u16)>
inline void matrix_multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  NVEP_SHARED(MatrixWords, words);
  const u32 lane = threadIdx.x & 31u, g = lane / 4, t = lane % 4;
  u32(*warp)[6] = words.of[threadIdx.x / 32];
  for (u32 i = 0; i < 4; ++i) warp[lane][i] = a[i];
  for (u32 i = 0; i < 2; ++i) warp[lane][4 + i] = b[i];
  __syncwarp();
  for (u32 k = 0; k < 16; ++k) {
    const u32 holder = k % 8 / 2, high = k / 8, shift = 16 * (k & 1);
    float left[2], right[2];
    for (u32 i = 0; i < 2; ++i) {
      left[i] = kWiden(static_cast<u16>(warp[4 * g + holder][2 * high + i] >> shift));
      right[i] = kWiden(static_cast<u16>(warp[4 * (2 * t + i) + holder][4 + high] >> shift));
    }
    for (u32 i = 0; i < 4; ++i) d[i] += left[i / 2] * right[i % 2];
  }
  __syncwarp();
}

}  // namespace detail

inline void multiply_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  detail::matrix_multiply<bf16_to_float>(d, a, b);
}
inline void multiply_fp16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  detail::matrix_multiply<half_to_float>(d, a, b);
}

#else

#define NVEP_MULTIPLY(name, type)                                                           \
  __device__ __forceinline__ void name(float (&d)[4], const u32(&a)[4], const u32(&b)[2]) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                              \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                               \
        "{%0, %1, %2, %3};"                                                                 \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                \
  }

NVEP_MULTIPLY(multiply_bf16, "bf16")
NVEP_MULTIPLY(multiply_fp16, "f16")

#undef NVEP_MULTIPLY

#endif

}  // namespace nvep
