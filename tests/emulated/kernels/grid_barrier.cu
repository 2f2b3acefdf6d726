// Every block waits, up to a deadline, until `expected` blocks have arrived; then it leaves. `most` holds how many were
// inside at once.
#include "primitives/memory.cuh"
#include "primitives/time.cuh"

using namespace nvep;

extern "C" __global__ void grid_barrier(const __grid_constant__ BarrierArguments arguments) {
  if (threadIdx.x == 0) {
    u32 here = fetch_add_relaxed_device(arguments.arrived, 1u) + 1;
    atomicMax(reinterpret_cast<i32*>(arguments.most), static_cast<i32>(here));
    const u64 start = global_timer_ns();
    while (load_acquire_device(arguments.arrived) < arguments.expected) {
      if (global_timer_ns() - start > arguments.deadline_ns) break;
      spin_pause();
    }
    arguments.seen[blockIdx.x] = load_relaxed_device(arguments.arrived);
  }
  __syncthreads();
}
