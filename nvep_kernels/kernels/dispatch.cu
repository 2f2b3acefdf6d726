// D.send and D.recv in one launch: every warp sends its share before it polls, and no send waits for a poll.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    dispatch(const __grid_constant__ DispatchArguments arguments) {
  grid_dependency_wait();
  grid_dependency_launch();
  NVEP_SHARED(Transport::Shared, shared);
  auto ahead = Transport::dispatch_ahead(arguments);
  Step step = open_dispatch(arguments);
  Transport::dispatch_send(arguments, step, ahead, shared);
  Transport::dispatch_recv(step, shared);
}
