// Ends a step that has no combine, so that peers may overwrite its arrivals.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void release(const __grid_constant__ CombineArguments arguments) {
  grid_dependency_wait();
  Step step = open_step(arguments);
  NVEP_SHARED(Transport::Shared, shared);
  u32 epoch = step.counters()->dispatched;
  step.active = unmasked(Transport::mask_snapshot(step));
  Transport::release(step, epoch, shared);
}
