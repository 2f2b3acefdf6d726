// Steps that every rank can recompute: counts, routing, rows and partial rows are hashes of (step, rank, token).
#pragma once
#include "primitives/convert.cuh"
#include "primitives/memory.cuh"
#include "primitives/time.cuh"
#include "primitives/types.cuh"

namespace nvep {
namespace stress {

__device__ inline u32 hash(u32 a, u32 b, u32 c, u32 d) {
  u32 h = 0x9e3779b9u;
  const u32 words[4] = {a, b, c, d};
  for (u32 i = 0; i < 4; ++i) {
    h ^= words[i];
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
  }
  return h;
}

__device__ inline u32 count_of(u32 step, u32 rank) {
  u32 h = hash(step, rank, 1, 0);
  return h % 8 == 0 ? 0 : (h >> 3) % (kMaxTokens + 1);
}

// Distinct experts: a start and a stride small enough not to wrap; now and then none.
__device__ inline i32 expert_of(u32 step, u32 rank, u32 token, u32 k) {
  if (hash(step, rank, token, 100 + k) % 16 == 0) return -1;
  u32 start = hash(step, rank, token, 2) % kNumExperts;
  u32 stride = 1 + hash(step, rank, token, 3) % (kNumExperts / kTopK);
  return static_cast<i32>((start + k * stride) % kNumExperts);
}

__device__ inline float weight_of(u32 step, u32 rank, u32 token, u32 k) {
  return static_cast<float>(hash(step, rank, token, 200 + k) >> 8);
}

// One row in eight is made of the word that marks empty memory.
__device__ inline u32 word_of(u32 step, u32 rank, u32 token, u32 word) {
  return hash(step, rank, token, 4) % 8 == 0 ? 0x80808080u : hash(step, rank, token, 1000 + word);
}

// Small integers: their sums are exact in any order.
__device__ inline float partial_of(u32 step, u32 rank, u32 token, u32 target, u32 element) {
  return static_cast<float>(hash(step, rank * 1024 + target, token, 5000 + element) % 8);
}

__device__ inline bool goes_to(const i32* expert_ranks, u32 step, u32 rank, u32 token, u32 target) {
  for (u32 k = 0; k < kTopK; ++k) {
    i32 id = expert_of(step, rank, token, k);
    if (id >= 0 && static_cast<u32>(expert_ranks[id]) == target) return true;
  }
  return false;
}

// Keep a rank back by up to 4 us, so that others run ahead.
__device__ inline void linger(u32 step, u32 rank, u32 place) {
  u32 h = hash(step, rank, place, 6);
  u64 until = global_timer_ns() + (h % 2 ? 0 : (h >> 8) % kLongestPauseNs);
  while (global_timer_ns() < until) spin_pause();
}

// What went wrong: errors[0] counts, errors[1..3] hold step, place and detail of one of them.
__device__ inline void complain(u32* errors, u32 step, u32 place, u32 detail) {
  if (fetch_add_relaxed_device(errors, 1u) != 0) return;
  errors[1] = step;
  errors[2] = place;
  errors[3] = detail;
}

}  // namespace stress
}  // namespace nvep
