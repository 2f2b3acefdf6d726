// Free Flow's host thread as a kernel, for simulation: rings until told to stop, or until nothing was ready for a while.
#include "nic/ready_scan.cuh"
#include "primitives/time.cuh"

using namespace nvep;

extern "C" __global__ void nic_ready(const __grid_constant__ NicReadyArguments a) {
  ReadyQueue* queues = reinterpret_cast<ReadyQueue*>(a.queues);
  u64 since = global_timer_ns();
  const u64* stop = reinterpret_cast<const u64*>(a.stop);
  while (global_timer_ns() - since <= a.idle_ns && load_relaxed_system(stop) == 0) {
    for (u64 q = 0; q < a.count; ++q) {
      if (scan_ready(queues[q]) != 0) since = global_timer_ns();
    }
    spin_pause();
  }
}
