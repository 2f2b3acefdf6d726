// C.recv: wait for every peer, then pull this rank's partial rows and sum them.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void combine_recv(const __grid_constant__ CombineArguments arguments) {
  grid_dependency_wait();
  Step step = open_step(arguments);
  NVEP_SHARED(Transport::Shared, shared);
  step.active = unmasked(Transport::mask_snapshot(step));
  Transport::combine_recv(arguments, step, step.counters()->dispatched, shared);
}
