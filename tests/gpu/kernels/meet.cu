// Every block waits until all blocks have come: completes before the deadline only if all are resident at once.
#include "primitives/memory.cuh"
#include "primitives/time.cuh"

using namespace nvep;

extern "C" __global__ void meet(const __grid_constant__ MeetArguments arguments) {
  if (threadIdx.x != 0) return;
  fetch_add_acq_rel_device(arguments.come, 1u);
  u64 start = global_timer_ns();
  while (load_acquire_device(arguments.come) < gridDim.x) {
    if (global_timer_ns() - start > arguments.deadline_ns) {
      fetch_add_relaxed_device(arguments.missed, 1u);
      return;
    }
    spin_pause();
  }
}
