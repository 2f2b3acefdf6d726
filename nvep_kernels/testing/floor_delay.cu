// Keeps a stream busy for a while, so that what follows is enqueued before it can start.
#include "primitives/time.cuh"
#include "primitives/types.cuh"

extern "C" __global__ void floor_delay(const __grid_constant__ FloorArguments a) {
  nvep::u64 until = nvep::global_timer_ns() + a.nanoseconds;
  while (nvep::global_timer_ns() < until) nvep::spin_pause();
}
