// Read-modify-writes beyond those of memory.cuh, with its conventions: 64-bit counters, a lock word, additions that
// other devices see.
#pragma once

#include "primitives/memory.cuh"

#ifdef NVEP_EMULATED
#include "emulator/word_atomics.cuh"
#else

namespace nvep {

__device__ __forceinline__ u64 fetch_add_relaxed_device(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

__device__ __forceinline__ u64 fetch_add_relaxed_system(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

// Orders what follows behind the store that it read: takes a lock.
__device__ __forceinline__ u32 exchange_acquire_device(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acquire.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Sequentially consistent: of two threads that each store, fence and load the other's word, one sees the other's store.
__device__ __forceinline__ void fence_sc_system() {
  asm volatile("fence.sc.sys;" ::: "memory");
}

}  // namespace nvep

#endif

namespace nvep {

// Stores `v` unless something larger is there. Monotone words only.
__device__ __forceinline__ void raise_relaxed_device(u64* p, u64 v) {
  u64 seen = load_relaxed_device(p);
  while (seen < v) {
    u64 before = compare_swap_relaxed_device(p, seen, v);
    if (before == seen) return;
    seen = before;
  }
}

}  // namespace nvep
