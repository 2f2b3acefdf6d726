// Memory operations on global memory that another thread, block, device or process may touch.
//
// *_system: scope is every device and host thread. *_device: scope is the threads of this GPU.
// relaxed: single-copy atomic per element (8 bytes, or 4 for u32), no order with other locations.
// acquire / release: order as in the PTX memory model. weak: ordinary cacheable access; conflicting ones need a
// happens-before edge. Every access to symmetric memory goes through here, so a memory-model simulation sees them all.
// Pointers are global (not shared) addresses aligned to the access size.
#pragma once

#include "primitives/types.cuh"

#ifdef NVEP_EMULATED
#include "emulator/memory.cuh"
#else

namespace nvep {

#define NVEP_LOAD(name, type, op, constraint)                                    \
  __device__ __forceinline__ type name(const type* p) {                          \
    type v;                                                                      \
    asm volatile("ld." op " %0, [%1];" : "=" constraint(v) : "l"(p) : "memory"); \
    return v;                                                                    \
  }
#define NVEP_STORE(name, type, op, constraint)                              \
  __device__ __forceinline__ void name(type* p, type v) {                   \
    asm volatile("st." op " [%0], %1;" ::"l"(p), constraint(v) : "memory"); \
  }

NVEP_LOAD(load_relaxed_system, u32, "relaxed.sys.global.b32", "r")
NVEP_LOAD(load_relaxed_system, u64, "relaxed.sys.global.b64", "l")
NVEP_STORE(store_relaxed_system, u32, "relaxed.sys.global.b32", "r")
NVEP_STORE(store_relaxed_system, u64, "relaxed.sys.global.b64", "l")
NVEP_LOAD(load_acquire_system, u32, "acquire.sys.global.b32", "r")
NVEP_LOAD(load_acquire_system, u64, "acquire.sys.global.b64", "l")
NVEP_STORE(store_release_system, u32, "release.sys.global.b32", "r")
NVEP_STORE(store_release_system, u64, "release.sys.global.b64", "l")

NVEP_LOAD(load_relaxed_device, u32, "relaxed.gpu.global.b32", "r")
NVEP_LOAD(load_relaxed_device, u64, "relaxed.gpu.global.b64", "l")
NVEP_STORE(store_relaxed_device, u32, "relaxed.gpu.global.b32", "r")
NVEP_STORE(store_relaxed_device, u64, "relaxed.gpu.global.b64", "l")
NVEP_LOAD(load_acquire_device, u32, "acquire.gpu.global.b32", "r")
NVEP_LOAD(load_acquire_device, u64, "acquire.gpu.global.b64", "l")
NVEP_STORE(store_release_device, u32, "release.gpu.global.b32", "r")
NVEP_STORE(store_release_device, u64, "release.gpu.global.b64", "l")

NVEP_LOAD(load_weak, u32, "weak.global.b32", "r")
NVEP_LOAD(load_weak, i32, "weak.global.b32", "r")
NVEP_LOAD(load_weak, u64, "weak.global.b64", "l")
NVEP_LOAD(load_weak, u16, "weak.global.b16", "h")
NVEP_LOAD(load_weak, float, "weak.global.f32", "f")
NVEP_STORE(store_weak, u32, "weak.global.b32", "r")
NVEP_STORE(store_weak, i32, "weak.global.b32", "r")
NVEP_STORE(store_weak, u64, "weak.global.b64", "l")
NVEP_STORE(store_weak, u16, "weak.global.b16", "h")
NVEP_STORE(store_weak, float, "weak.global.f32", "f")

#undef NVEP_LOAD
#undef NVEP_STORE

__device__ __forceinline__ u64x2 load_relaxed_system(const u64x2* p) {
  u64x2 v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.a), "=l"(v.b) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed_system(u64x2* p, u64x2 v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.a), "l"(v.b) : "memory");
}

__device__ __forceinline__ uint4 load_weak(const uint4* p) {
  uint4 v;
  asm volatile("ld.weak.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_weak(uint4* p, uint4 v) {
  asm volatile("st.weak.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ u32 fetch_add_relaxed_device(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Acquires what earlier increments of the chain released, and releases what this thread (and, through a block
// barrier, its block) did before.
__device__ __forceinline__ u32 fetch_add_acq_rel_device(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

__device__ __forceinline__ u32 exchange_relaxed_device(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Returns what was there; `desired` was stored if that equals `expected`.
__device__ __forceinline__ u64 compare_swap_relaxed_device(u64* p, u64 expected, u64 desired) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

__device__ __forceinline__ void fence_acq_rel_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ void fence_acq_rel_device() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

}  // namespace nvep

#endif
