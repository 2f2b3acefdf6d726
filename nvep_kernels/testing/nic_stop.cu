// Tells a simulated adapter and its host thread that nothing more will come.
#include "primitives/memory.cuh"

using namespace nvep;

extern "C" __global__ void nic_stop(const __grid_constant__ NicStopArguments a) {
  store_relaxed_system(reinterpret_cast<u64*>(a.engine), a.when_idle);
  store_relaxed_system(reinterpret_cast<u64*>(a.host_thread), 1ull);
}
