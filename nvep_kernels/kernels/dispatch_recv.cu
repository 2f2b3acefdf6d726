// D.recv: wait for the record of every peer; mark the rows that hold no token.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    dispatch_recv(const __grid_constant__ DispatchArguments arguments) {
  grid_dependency_wait();
  grid_dependency_launch();
  NVEP_SHARED(Transport::Shared, shared);
  Step step = open_phase(arguments, kPhaseDispatch);
  Transport::dispatch_recv(step, shared);
}
