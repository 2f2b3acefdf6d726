// D.recv: wait for the record of every peer; mark the rows that hold no token.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void dispatch_recv(const __grid_constant__ DispatchArguments arguments) {
  grid_dependency_wait();
  Step step = open_step(arguments);
  NVEP_SHARED(Transport::Shared, shared);
  step.active = unmasked(Transport::mask_snapshot(step));
  Transport::dispatch_recv(step, step.counters()->dispatched, shared);
}
