// One element of a partial row, rounded from float32.
#pragma once
#include "primitives/convert.cuh"
#include "primitives/memory.cuh"
#include "primitives/types.cuh"

namespace nvep {

struct StoreBf16 {
  __device__ static void store(u64 base, u64 element, float v) {
    store_weak(reinterpret_cast<u16*>(base) + element, float_to_bf16(v));
  }
};
struct StoreFp16 {
  __device__ static void store(u64 base, u64 element, float v) {
    store_weak(reinterpret_cast<u16*>(base) + element, float_to_half(v));
  }
};
struct StoreFp32 {
  __device__ static void store(u64 base, u64 element, float v) {
    store_weak(reinterpret_cast<float*>(base) + element, v);
  }
};

}  // namespace nvep
