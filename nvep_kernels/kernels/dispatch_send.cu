// D.send: push this rank's tokens to every rank that owns one of their experts.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    dispatch_send(const __grid_constant__ DispatchArguments arguments) {
  grid_dependency_wait();
  grid_dependency_launch();
  NVEP_SHARED(Transport::Shared, shared);
  auto ahead = Transport::dispatch_ahead(arguments);
  Step step = open_dispatch(arguments);
  Transport::dispatch_send(arguments, step, ahead, shared);
}
