// Where the tokens of a projection come from: a thread fetches eight elements at a time, and later puts them into shared
// memory as bf16.
#pragma once
#include "formats/elements.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/memory.cuh"

namespace nvep {

struct RowSource {
  u64 rows;
  u64 scales;
};

// bf16 rows of kRowBytes: copied while the thread goes on.
template <u32 kRowBytes>
struct RowsBf16 {
  struct Pending {};
  __device__ __forceinline__ static void fetch(Pending&, uint4* shared, const RowSource& from, u32 row, u32 element,
                                               bool inside) {
    const u64 address = from.rows + static_cast<u64>(row) * kRowBytes + (inside ? element : 0) * 2;
    async_copy_16(shared, reinterpret_cast<const void*>(address), inside);
  }
  __device__ __forceinline__ static void settle(const Pending&, uint4*) {}
};

// Encoded rows, decoded on the way and rounded to bf16.
template <class Format, u32 kRowBytes, u32 kScaleRowBytes>
struct RowsDecoded {
  struct Pending {
    typename Format::Unit unit;
    typename Format::Scale scale;
    bool inside;
  };
  __device__ __forceinline__ static void fetch(Pending& pending, uint4*, const RowSource& from, u32 row, u32 element,
                                               bool inside) {
    pending.inside = inside;
    if (!inside) return;
    using Unit = typename Format::Unit;
    using Scale = typename Format::Scale;
    const u64 encoded = from.rows + static_cast<u64>(row) * kRowBytes;
    pending.unit = reinterpret_cast<const Unit*>(encoded)[element / kUnitElements];
    pending.scale = 0;
    if (Format::kScaleBytes == 0) return;
    const u64 scales = from.scales + static_cast<u64>(row) * kScaleRowBytes;
    pending.scale = reinterpret_cast<const Scale*>(scales)[element / Format::kBlock];
  }
  __device__ __forceinline__ static void settle(const Pending& pending, uint4* shared) {
    float x[kUnitElements] = {};
    if (pending.inside) Format::decode(pending.unit, pending.scale, moe::kTensorScale, x);
    *shared = ElementsBf16::pack(x);
  }
};

}  // namespace nvep
