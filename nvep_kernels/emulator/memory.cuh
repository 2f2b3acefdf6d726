// Emulated twins of primitives/memory.cuh. Scopes collapse: every access is visible to all threads and processes
// that map the memory. Included by primitives/memory.cuh only. Under simulation the memory model takes their place.
#pragma once

#ifdef NVEP_SIMULATED
#include "emulator/simulation/memory.cuh"
#else
#include "emulator/sanitizers.h"
#include "primitives/types.cuh"

namespace nvep {

#define NVEP_LOAD(name, type, order)          \
  inline type name(const type* p) {           \
    const type v = __atomic_load_n(p, order); \
    emulated::loaded_relaxed(p);              \
    return v;                                 \
  }
#define NVEP_STORE(name, type, order) \
  inline void name(type* p, type v) { \
    emulated::storing_relaxed(p);     \
    __atomic_store_n(p, v, order);    \
  }
#define NVEP_BOTH(macro, name, order) macro(name, u32, order) macro(name, u64, order)

NVEP_BOTH(NVEP_LOAD, load_relaxed_system, __ATOMIC_RELAXED)
NVEP_BOTH(NVEP_STORE, store_relaxed_system, __ATOMIC_RELAXED)
NVEP_BOTH(NVEP_LOAD, load_acquire_system, __ATOMIC_ACQUIRE)
NVEP_BOTH(NVEP_STORE, store_release_system, __ATOMIC_RELEASE)
NVEP_BOTH(NVEP_LOAD, load_relaxed_device, __ATOMIC_RELAXED)
NVEP_BOTH(NVEP_STORE, store_relaxed_device, __ATOMIC_RELAXED)
NVEP_BOTH(NVEP_LOAD, load_acquire_device, __ATOMIC_ACQUIRE)
NVEP_BOTH(NVEP_STORE, store_release_device, __ATOMIC_RELEASE)

#undef NVEP_BOTH
#undef NVEP_LOAD
#undef NVEP_STORE

inline u64x2 load_relaxed_system(const u64x2* p) {
  return {load_relaxed_system(&p->a), load_relaxed_system(&p->b)};
}

inline void store_relaxed_system(u64x2* p, u64x2 v) {
  store_relaxed_system(&p->a, v.a);
  store_relaxed_system(&p->b, v.b);
}

#define NVEP_WEAK(type)                     \
  inline type load_weak(const type* p) {    \
    return *p;                              \
  }                                         \
  inline void store_weak(type* p, type v) { \
    *p = v;                                 \
  }
NVEP_WEAK(u16)
NVEP_WEAK(u32)
NVEP_WEAK(i32)
NVEP_WEAK(u64)
NVEP_WEAK(float)
NVEP_WEAK(uint4)
#undef NVEP_WEAK

inline u32 fetch_add_relaxed_device(u32* p, u32 v) {
  emulated::storing_relaxed(p);
  const u32 old = __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  emulated::loaded_relaxed(p);
  return old;
}
inline u32 fetch_add_acq_rel_device(u32* p, u32 v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
inline u32 exchange_relaxed_device(u32* p, u32 v) {
  emulated::storing_relaxed(p);
  const u32 old = __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
  emulated::loaded_relaxed(p);
  return old;
}
inline u64 compare_swap_relaxed_device(u64* p, u64 expected, u64 desired) {
  emulated::storing_relaxed(p);
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  emulated::loaded_relaxed(p);
  return expected;
}

inline void fence_acq_rel_system() {
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
  emulated::fenced();
}
inline void fence_acq_rel_device() {
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
  emulated::fenced();
}

}  // namespace nvep

#endif
