// C.send and C.recv in one launch: every block exposes its share before it polls.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void combine(const __grid_constant__ CombineArguments arguments) {
  grid_dependency_wait();
  Step step = open_step(arguments);
  NVEP_SHARED(Transport::Shared, shared);
  u32 epoch = step.counters()->dispatched;
  step.active = unmasked(Transport::mask_snapshot(step));
  if (!dead_before(step, epoch, kPhaseCombine)) Transport::combine_send(arguments, step, epoch, shared);
  Transport::combine_recv(arguments, step, epoch, shared);
}
