// Simulated twins of primitives/memory.cuh: every access goes to the memory model with its order, scope, width and
// source line. Included by primitives/memory.cuh, through emulator/memory.cuh, only.
#pragma once

#include "emulator/simulation/operations.h"
#include "primitives/types.cuh"

namespace nvep {
namespace simulated {

inline const Operations* operations(emulated::Fiber* fiber) {
  return static_cast<const Operations*>(fiber->operations);
}

template <class T>
inline T load(const T* p, Order order, Scope scope, const char* file, int line) {
  emulated::Fiber* fiber = emulated::current();
  u64 bits = operations(fiber)->load(fiber, p, sizeof(T), {order, scope, {file, line}});
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
inline void store(T* p, T value, Order order, Scope scope, const char* file, int line) {
  emulated::Fiber* fiber = emulated::current();
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  operations(fiber)->store(fiber, p, bits, sizeof(T), {order, scope, {file, line}});
}

template <class T>
inline T update(Update kind, T* p, T operand, T expected, const Access& access) {
  emulated::Fiber* fiber = emulated::current();
  return static_cast<T>(operations(fiber)->update(fiber, p, sizeof(T), {kind, operand, expected}, access));
}

}  // namespace simulated

#define NVEP_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NVEP_LOAD(name, type, order, scope)                                                  \
  inline type name(const type* p, NVEP_SITE) {                                               \
    return simulated::load(p, simulated::Order::order, simulated::Scope::scope, file, line); \
  }
#define NVEP_STORE(name, type, order, scope)                                              \
  inline void name(type* p, type v, NVEP_SITE) {                                          \
    simulated::store(p, v, simulated::Order::order, simulated::Scope::scope, file, line); \
  }
#define NVEP_BOTH(macro, name, order, scope) macro(name, u32, order, scope) macro(name, u64, order, scope)

NVEP_BOTH(NVEP_LOAD, load_relaxed_system, kRelaxed, kSystem)
NVEP_BOTH(NVEP_STORE, store_relaxed_system, kRelaxed, kSystem)
NVEP_BOTH(NVEP_LOAD, load_acquire_system, kAcquire, kSystem)
NVEP_BOTH(NVEP_STORE, store_release_system, kRelease, kSystem)
NVEP_BOTH(NVEP_LOAD, load_relaxed_device, kRelaxed, kDevice)
NVEP_BOTH(NVEP_STORE, store_relaxed_device, kRelaxed, kDevice)
NVEP_BOTH(NVEP_LOAD, load_acquire_device, kAcquire, kDevice)
NVEP_BOTH(NVEP_STORE, store_release_device, kRelease, kDevice)

#undef NVEP_BOTH
#undef NVEP_LOAD
#undef NVEP_STORE

inline u64x2 load_relaxed_system(const u64x2* p, NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  u64 words[2];
  simulated::operations(fiber)->load_pair(fiber, p, words,
                                          {simulated::Order::kRelaxed, simulated::Scope::kSystem, {file, line}});
  return {words[0], words[1]};
}

inline void store_relaxed_system(u64x2* p, u64x2 v, NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  const u64 words[2] = {v.a, v.b};
  simulated::operations(fiber)->store_pair(fiber, p, words,
                                           {simulated::Order::kRelaxed, simulated::Scope::kSystem, {file, line}});
}

#define NVEP_WEAK(type)                                                                    \
  inline type load_weak(const type* p, NVEP_SITE) {                                        \
    emulated::Fiber* fiber = emulated::current();                                          \
    type value;                                                                            \
    simulated::operations(fiber)->load_weak(fiber, p, &value, sizeof(type), {file, line}); \
    return value;                                                                          \
  }                                                                                        \
  inline void store_weak(type* p, type v, NVEP_SITE) {                                     \
    emulated::Fiber* fiber = emulated::current();                                          \
    simulated::operations(fiber)->store_weak(fiber, p, &v, sizeof(type), {file, line});    \
  }
NVEP_WEAK(u16)
NVEP_WEAK(u32)
NVEP_WEAK(i32)
NVEP_WEAK(u64)
NVEP_WEAK(float)
NVEP_WEAK(uint4)
#undef NVEP_WEAK

#define NVEP_ACCESS(order, scope)                       \
  {                                                     \
    simulated::Order::order, simulated::Scope::scope, { \
      file, line                                        \
    }                                                   \
  }
inline u32 fetch_add_relaxed_device(u32* p, u32 v, NVEP_SITE) {
  return simulated::update(simulated::Update::kAdd, p, v, 0u, NVEP_ACCESS(kRelaxed, kDevice));
}
inline u32 fetch_add_acq_rel_device(u32* p, u32 v, NVEP_SITE) {
  return simulated::update(simulated::Update::kAdd, p, v, 0u, NVEP_ACCESS(kAcqRel, kDevice));
}
inline u32 exchange_relaxed_device(u32* p, u32 v, NVEP_SITE) {
  return simulated::update(simulated::Update::kExchange, p, v, 0u, NVEP_ACCESS(kRelaxed, kDevice));
}
inline u64 compare_swap_relaxed_device(u64* p, u64 expected, u64 desired, NVEP_SITE) {
  return simulated::update(simulated::Update::kCompareSwap, p, desired, expected, NVEP_ACCESS(kRelaxed, kDevice));
}

inline void fence_acq_rel_system(NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::operations(fiber)->fence(fiber, simulated::Scope::kSystem, {file, line});
}
inline void fence_acq_rel_device(NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::operations(fiber)->fence(fiber, simulated::Scope::kDevice, {file, line});
}

// Programmatic dependent launch: see primitives/launch.cuh.
namespace simulated {
inline void dependency_wait() {
  emulated::Fiber* fiber = emulated::current();
  operations(fiber)->dependency_wait(fiber);
}
inline void dependency_launch() {
  emulated::Fiber* fiber = emulated::current();
  operations(fiber)->dependency_launch(fiber);
}
}  // namespace simulated

#undef NVEP_ACCESS
#undef NVEP_SITE

}  // namespace nvep
