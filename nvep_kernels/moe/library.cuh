// Around the grouped GEMMs of a library, which take pointers to their operands: where an expert's results for a row lie.
// A place is a row of the projections' results, [place][kIntermediate] and [place][kHidden].
#pragma once
#include "moe/experts.cuh"

namespace nvep {

struct PlacePairs {  // one product for each (row, k), also for those of other ranks
  static constexpr u32 kEntries = moe::kRows * moe::kTopK;
  static constexpr bool kOfPairs = true, kCopies = false;
  __device__ static u64 of(const LibraryArguments&, u32 pair, u32) { return pair; }
};
struct PlaceSlices {  // one product for each expert, over the whole receive buffer
  static constexpr u32 kEntries = moe::kLocalExperts;
  static constexpr bool kOfPairs = false, kCopies = false;
  __device__ static u64 of(const LibraryArguments&, u32 pair, u32 expert) {
    return static_cast<u64>(expert) * moe::kRows + pair / moe::kTopK;
  }
};
struct PlacePacked {  // one product for each expert, over copies of its rows
  static constexpr u32 kEntries = moe::kLocalExperts;
  static constexpr bool kOfPairs = false, kCopies = true;
  __device__ static u64 of(const LibraryArguments& a, u32 pair, u32 expert) {
    return load_weak(reinterpret_cast<const u32*>(a.firsts) + expert) + load_weak(step_plan(a.plan).positions + pair);
  }
};

// Local expert of a pair, or -1; rows that hold no token have no ids.
__device__ __forceinline__ i32 expert_of(const LibraryArguments& a, u32 pair) {
  return local_expert(a.local_experts, load_weak(reinterpret_cast<const i32*>(a.expert_ids) + pair));
}

// Passes every pair that this block has to do, and its local expert, to `work`; all threads together.
template <class Work>
__device__ __forceinline__ void for_pairs(const LibraryArguments& a, const Work& work) {
  for (u32 pair = blockIdx.x; pair < moe::kRows * moe::kTopK; pair += gridDim.x) {
    const i32 expert = expert_of(a, pair);
    if (expert >= 0) work(pair, static_cast<u32>(expert));
  }
}

}  // namespace nvep
