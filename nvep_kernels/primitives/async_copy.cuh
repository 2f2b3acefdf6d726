// Copies from global to shared memory that a thread starts and waits for later (sm_80 and up), past L1. A group is what
// a thread started since its last commit; what other threads copied is there after their wait and a block barrier.
// The emulated device copies at once.
#pragma once
#include "primitives/types.cuh"

namespace nvep {

// 16 bytes, both addresses aligned to them; zeros, and nothing read, where not `valid`.
__device__ __forceinline__ void async_copy_16(void* shared, const void* global, bool valid) {
#ifdef NVEP_EMULATED
  if (valid) {
    __builtin_memcpy(shared, global, 16);
  } else {
    __builtin_memset(shared, 0, 16);
  }
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<u32>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16u : 0u)
               : "memory");
#endif
}

// 4 bytes, through L1: for what no kernel of the same launch writes.
__device__ __forceinline__ void async_copy_4(void* shared, const void* global) {
#ifdef NVEP_EMULATED
  __builtin_memcpy(shared, global, 4);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global))
               : "memory");
#endif
}

__device__ __forceinline__ void async_commit() {
#ifndef NVEP_EMULATED
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most kLeft of this thread's groups are unfinished.
template <u32 kLeft>
__device__ __forceinline__ void async_wait() {
#ifndef NVEP_EMULATED
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

}  // namespace nvep
