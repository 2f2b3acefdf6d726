// Clock and the pause of a polling loop.
#pragma once

#include "primitives/types.cuh"

#ifdef NVEP_EMULATED
#include "emulator/fiber.h"
#endif

namespace nvep {

// Nanoseconds of a clock that only runs forward; its zero is arbitrary, its step up to about a microsecond.
__device__ __forceinline__ u64 global_timer_ns() {
#ifdef NVEP_EMULATED
  return emulated::current()->operations->timer_ns();
#else
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
#endif
}

// Counts a multiprocessor's cycles (emulated: nanoseconds): for differences within a thread, and cheap to read.
__device__ __forceinline__ u64 cycle_counter() {
#ifdef NVEP_EMULATED
  return emulated::current()->operations->timer_ns();
#else
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
#endif
}

// Belongs into every loop that waits for memory: lets the other emulated threads run. Free on a GPU.
__device__ __forceinline__ void spin_pause() {
#ifdef NVEP_EMULATED
  emulated::Fiber* fiber = emulated::current();
  fiber->operations->spin(fiber);
#endif
}

}  // namespace nvep
