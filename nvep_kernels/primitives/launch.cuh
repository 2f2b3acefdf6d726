// Programmatic dependent launch. Memory of the preceding kernel may be touched only after the wait; both are no-ops
// in a launch without the attribute, and on the emulated device, where a kernel starts after its predecessor ended
// (under simulation it may start before).
#pragma once

#ifdef NVEP_SIMULATED
#include "emulator/simulation/memory.cuh"
#endif

namespace nvep {

__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#elif defined(NVEP_SIMULATED)
  simulated::dependency_wait();
#endif
}

__device__ __forceinline__ void grid_dependency_launch() {
#if !defined(NVEP_EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#elif defined(NVEP_SIMULATED)
  simulated::dependency_launch();
#endif
}

}  // namespace nvep
