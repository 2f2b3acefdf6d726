// Random streams of messages, computed alike by sender and receiver, so that nothing about them has to be exchanged.
#pragma once
#include "primitives/memory.cuh"

namespace nvep {
namespace stream {

constexpr u32 kSlotWords = kSlotBytes / 8;

__device__ inline u32 draw(u32 a, u32 b, u32 c, u32 d) {
  u32 x = a * 0x9e3779b9u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u ^ d * 0x27d4eb2fu ^ kSeed;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Message m of a warp of `source`: its size, and where target i of it is.
__device__ inline u32 bytes_of(u32 source, u32 warp, u32 m) {
  u32 x = draw(source, warp, m, 1);
  if (kInline && x % 4 == 0) return x % 8 < 4 ? 4 : 8;
  return kUnit * (1 + x / 8 % (kSlotBytes / kUnit));
}
__device__ inline u32 target_of(u32 source, u32 warp, u32 m, u32 i) {
  return draw(source, warp, m, 2 + i) % kRanks;
}
__device__ inline u64 slot_of(u32 source, u32 warp, u32 m, u32 i) {
  return (((static_cast<u64>(source) * kWarps + warp) * kMessages + m) * kTargets + i) * kSlotBytes;
}
__device__ inline u32 word_of(u32 source, u32 warp, u32 m, u32 word) {
  return draw(source * kWarps + warp, m, word, 77);
}
__device__ inline u32 signal_of(u32 source, u32 warp) {
  return source * kWarps + warp;
}

// Does message m have a target on `rank`?
__device__ inline bool reaches(u32 source, u32 warp, u32 m, u32 rank) {
  bool any = false;
  for (u32 i = 0; i < kTargets; ++i) any |= target_of(source, warp, m, i) == rank;
  return any;
}

__device__ inline u32 warp_index() {
  return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

}  // namespace stream
}  // namespace nvep
