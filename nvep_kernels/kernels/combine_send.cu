// C.send: expose the partial rows and tell every peer.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void combine_send(const __grid_constant__ CombineArguments arguments) {
  grid_dependency_wait();
  Step step = open_step(arguments);
  NVEP_SHARED(Transport::Shared, shared);
  u32 epoch = step.counters()->dispatched;
  if (dead_before(step, epoch, kPhaseCombine)) return;
  step.active = unmasked(Transport::mask_snapshot(step));
  Transport::combine_send(arguments, step, epoch, shared);
}
