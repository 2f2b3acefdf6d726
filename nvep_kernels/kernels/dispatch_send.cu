// D.send: push this rank's tokens to every rank that owns one of their experts.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void dispatch_send(const __grid_constant__ DispatchArguments arguments) {
  grid_dependency_wait();
  Step step = open_step(arguments);
  NVEP_SHARED(Transport::Shared, shared);
  u32 epoch = step.counters()->completed + 1;
  if (dead_before(step, epoch, kPhaseDispatch)) return;
  step.active = unmasked(arguments.masked);
  Transport::dispatch_send(arguments, step, epoch, shared);
}
