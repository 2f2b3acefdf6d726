// CUDA's atomic functions and thread fences, on shared or global memory. Relaxed order, as on a GPU.
#pragma once

#include "emulator/sanitizers.h"

#define NVEP_ATOMIC(name, builtin)                                              \
  inline int name(int* p, int v) {                                              \
    return builtin(p, v, __ATOMIC_RELAXED);                                     \
  }                                                                             \
  inline unsigned name(unsigned* p, unsigned v) {                               \
    return builtin(p, v, __ATOMIC_RELAXED);                                     \
  }                                                                             \
  inline unsigned long long name(unsigned long long* p, unsigned long long v) { \
    return builtin(p, v, __ATOMIC_RELAXED);                                     \
  }

NVEP_ATOMIC(atomicAdd, __atomic_fetch_add)
NVEP_ATOMIC(atomicOr, __atomic_fetch_or)
NVEP_ATOMIC(atomicAnd, __atomic_fetch_and)
NVEP_ATOMIC(atomicExch, __atomic_exchange_n)
#undef NVEP_ATOMIC

namespace nvep {
namespace emulated {

// Replaces *p by `update(*p)` atomically and returns what was there.
template <class T, class F>
inline T atomic_update(T* p, F update) {
  T old, next;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    next = update(old);
  } while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

}  // namespace emulated
}  // namespace nvep

inline float atomicAdd(float* p, float v) {
  return nvep::emulated::atomic_update(p, [v](float old) { return old + v; });
}

#define NVEP_ATOMIC_CHOICE(type)                                                                   \
  inline type atomicMax(type* p, type v) {                                                         \
    return nvep::emulated::atomic_update(p, [v](type old) { return old > v ? old : v; });          \
  }                                                                                                \
  inline type atomicMin(type* p, type v) {                                                         \
    return nvep::emulated::atomic_update(p, [v](type old) { return old < v ? old : v; });          \
  }                                                                                                \
  inline type atomicCAS(type* p, type expected, type desired) {                                    \
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
    return expected;                                                                               \
  }

NVEP_ATOMIC_CHOICE(int)
NVEP_ATOMIC_CHOICE(unsigned)
NVEP_ATOMIC_CHOICE(unsigned long long)
#undef NVEP_ATOMIC_CHOICE

inline void __threadfence_block() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  nvep::emulated::fenced();
}
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  nvep::emulated::fenced();
}
inline void __threadfence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  nvep::emulated::fenced();
}
