// Barriers, votes and shuffles. The source line of a call is recorded, for messages and to tell barriers apart.
#pragma once

#include "emulator/fiber.h"

namespace nvep {
namespace emulated {

inline int block_collective(Collective kind, int predicate, const char* file, int line) {
  Fiber* fiber = current();
  return fiber->operations->block(fiber, kind, predicate, {file, line});
}

inline unsigned vote(Collective kind, unsigned mask, unsigned long long value, const char* file, int line) {
  Fiber* fiber = current();
  return static_cast<unsigned>(fiber->operations->warp(fiber, kind, mask, value, 0, 32, {file, line}));
}

template <class T>
inline T shuffle(Collective kind, unsigned mask, T value, int lane, int width, const char* file, int line) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  Fiber* fiber = current();
  bits = fiber->operations->warp(fiber, kind, mask, bits, lane, width, {file, line});
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulated
}  // namespace nvep

#define NVEP_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NVEP_KIND(name) ::nvep::emulated::Collective::name

inline void __syncthreads(NVEP_SITE) {
  nvep::emulated::block_collective(NVEP_KIND(kBlockSync), 0, file, line);
}
inline int __syncthreads_or(int predicate, NVEP_SITE) {
  return nvep::emulated::block_collective(NVEP_KIND(kBlockOr), predicate, file, line);
}
inline int __syncthreads_and(int predicate, NVEP_SITE) {
  return nvep::emulated::block_collective(NVEP_KIND(kBlockAnd), predicate, file, line);
}
inline int __syncthreads_count(int predicate, NVEP_SITE) {
  return nvep::emulated::block_collective(NVEP_KIND(kBlockCount), predicate, file, line);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, NVEP_SITE) {
  nvep::emulated::vote(NVEP_KIND(kWarpSync), mask, 0, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, NVEP_SITE) {
  return nvep::emulated::vote(NVEP_KIND(kBallot), mask, predicate != 0, file, line);
}
inline int __any_sync(unsigned mask, int predicate, NVEP_SITE) {
  return static_cast<int>(nvep::emulated::vote(NVEP_KIND(kAny), mask, predicate != 0, file, line));
}
inline int __all_sync(unsigned mask, int predicate, NVEP_SITE) {
  return static_cast<int>(nvep::emulated::vote(NVEP_KIND(kAll), mask, predicate != 0, file, line));
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, NVEP_SITE) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4- or 8-byte values");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return nvep::emulated::vote(NVEP_KIND(kMatchAny), mask, bits, file, line);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, NVEP_SITE) {
  return nvep::emulated::vote(NVEP_KIND(kReduceOr), mask, value, file, line);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, NVEP_SITE) {
  return nvep::emulated::vote(NVEP_KIND(kReduceMax), mask, value, file, line);
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, NVEP_SITE) {
  return nvep::emulated::shuffle(NVEP_KIND(kShuffle), mask, value, lane, width, file, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, NVEP_SITE) {
  return nvep::emulated::shuffle(NVEP_KIND(kShuffleUp), mask, value, static_cast<int>(delta), width, file, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, NVEP_SITE) {
  return nvep::emulated::shuffle(NVEP_KIND(kShuffleDown), mask, value, static_cast<int>(delta), width, file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, NVEP_SITE) {
  return nvep::emulated::shuffle(NVEP_KIND(kShuffleXor), mask, value, lane_mask, width, file, line);
}

// Lanes that happen to run together: emulated threads run one at a time, so only the caller.
inline unsigned __activemask() {
  return 1u << (nvep::emulated::current()->thread_index.x & 31u);
}

#undef NVEP_SITE
#undef NVEP_KIND
