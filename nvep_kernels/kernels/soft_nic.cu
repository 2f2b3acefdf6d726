// Soft NIC (emulated): executes send queues and descriptor rings of the ranks of one device until it is idle or told to
// stop. A persistent kernel on a stream of its own; see nic/engine.cuh.
#include "nic/engine.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void soft_nic(const __grid_constant__ SoftNicArguments a) {
  NVEP_SHARED(EngineShared, shared);
  run_engine(a, shared);
}
