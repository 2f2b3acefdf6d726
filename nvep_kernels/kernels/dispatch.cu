// D.send and D.recv in one launch: every block sends before it polls.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void dispatch(const __grid_constant__ DispatchArguments arguments) {
  grid_dependency_wait();
  Step step = open_step(arguments);
  NVEP_SHARED(Transport::Shared, shared);
  u32 epoch = step.counters()->completed + 1;
  step.active = unmasked(arguments.masked);
  if (!dead_before(step, epoch, kPhaseDispatch)) Transport::dispatch_send(arguments, step, epoch, shared);
  Transport::dispatch_recv(step, epoch, shared);
}
