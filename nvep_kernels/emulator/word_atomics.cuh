// Emulated twins of primitives/atomics.cuh, included by it only.
#pragma once

#ifdef NVEP_SIMULATED
#include "emulator/simulation/word_atomics.cuh"
#else
#include "emulator/sanitizers.h"
#include "primitives/types.cuh"

namespace nvep {

inline u64 fetch_add_relaxed_device(u64* p, u64 v) {
  emulated::storing_relaxed(p);
  const u64 old = __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  emulated::loaded_relaxed(p);
  return old;
}

inline u64 fetch_add_relaxed_system(u64* p, u64 v) {
  return fetch_add_relaxed_device(p, v);
}

inline u32 exchange_acquire_device(u32* p, u32 v) {
  return __atomic_exchange_n(p, v, __ATOMIC_ACQUIRE);
}

inline void fence_sc_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  emulated::fenced();
}

}  // namespace nvep

#endif
