// Tells the host that it runs, then holds its stream until the host says go, or until a deadline.
#include "primitives/memory.cuh"
#include "primitives/time.cuh"

using namespace nvep;

extern "C" __global__ void hold(const __grid_constant__ HoldArguments arguments) {
  store_release_system(arguments.started, 1u);
  u64 start = global_timer_ns();
  while (load_acquire_system(arguments.go) == 0) {
    if (global_timer_ns() - start > arguments.deadline_ns) break;
    spin_pause();
  }
  store_release_system(arguments.started, 2u);
}
