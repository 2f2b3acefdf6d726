// Addresses of the operands of a library's grouped GEMMs: one block. Gate products come first, then up, then down.
#include "moe/library.cuh"

using namespace nvep;

namespace {

struct Operands {
  u64* weights;
  u64* rows;
  u64* results;
  __device__ void set(u32 entry, u64 weight, u64 row, u64 result) const {
    store_weak(weights + entry, weight);
    store_weak(rows + entry, row);
    store_weak(results + entry, result);
  }
};

__device__ inline Operands operands(u64 base, u32 entries) {
  u64* first = reinterpret_cast<u64*>(base);
  return {first, first + entries, first + 2 * entries};
}

struct Entry {
  u32 expert;
  u32 number;  // among the entries
  u64 place;
  u64 row;  // address
};

__device__ inline void set_entry(const LibraryArguments& a, u32 entries, const Entry& entry) {
  constexpr u64 matrix = static_cast<u64>(moe::kHidden) * moe::kIntermediate * 2;
  const u64 weights = entry.expert * matrix, inner = entry.place * moe::kIntermediate * 2;
  const Operands first = operands(a.pointers, 2 * entries);
  first.set(entry.number, a.gate + weights, entry.row, a.projected + inner);
  first.set(entries + entry.number, a.up + weights, entry.row, a.projected + moe::kUpResults + inner);
  const Operands second = operands(a.pointers + 6ull * 8 * entries, entries);
  second.set(entry.number, a.down + weights, a.intermediate + inner, a.outputs + entry.place * moe::kHidden * 2);
}

// Experts without rows have no entry: the host leaves them out too.
__device__ inline void set_packed(const LibraryArguments& a, u32 entries) {
  const u32* counts = step_plan(a.plan).counts;
  u32 rows = 0, active = 0;
  for (u32 base = 0; base < moe::kLocalExperts; base += 32) {
    const u32 expert = base + threadIdx.x;
    const u32 count = expert < moe::kLocalExperts ? load_weak(counts + expert) : 0;
    const u32 rows_here = rows + warp_prefix(count, threadIdx.x);
    const u32 active_here = active + warp_prefix(count ? 1u : 0u, threadIdx.x);
    if (expert < moe::kLocalExperts) {
      const u64 place = rows_here - count;
      store_weak(reinterpret_cast<u32*>(a.firsts) + expert, rows_here - count);
      if (count) set_entry(a, entries, {expert, active_here - 1, place, a.packed + place * moe::kHidden * 2});
    }
    rows = __shfl_sync(kFullWarp, rows_here, 31);
    active = __shfl_sync(kFullWarp, active_here, 31);
  }
}

// Sizes are known beforehand.
__device__ inline void set_all(const LibraryArguments& a, u32 entries) {
  for (u32 i = threadIdx.x; i < moe::Place::kEntries; i += blockDim.x) {
    if (moe::Place::kOfPairs) {
      // A pair of another rank's expert is multiplied too, with the first local expert, and never looked at.
      const i32 expert = expert_of(a, i);
      const u64 row = a.rows + static_cast<u64>(i / moe::kTopK) * moe::kHidden * 2;
      set_entry(a, entries, {expert < 0 ? 0u : static_cast<u32>(expert), i, i, row});
    } else {
      set_entry(a, entries, {i, i, static_cast<u64>(i) * moe::kRows, a.rows});
    }
  }
}

}  // namespace

extern "C" __global__ void moe_pointers(const __grid_constant__ LibraryArguments arguments) {
  if (!moe::Place::kCopies) {
    set_all(arguments, arguments.entries);
  } else if (threadIdx.x < 32) {
    set_packed(arguments, arguments.entries);
  }
}
