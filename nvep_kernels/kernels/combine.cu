// C.send and C.recv in one launch: every warp sends its share before it polls, and no send waits for a poll.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    combine(const __grid_constant__ CombineArguments arguments) {
  grid_dependency_wait();
  grid_dependency_launch();
  NVEP_SHARED(Transport::Shared, shared);
  auto ahead = Transport::combine_ahead(arguments, true);
  Step step = open_phase(arguments, kPhaseCombine);
  step.joined = true;
  Transport::combine_send(arguments, step, ahead, shared);
  Transport::combine_recv(arguments, step, ahead, shared);
}
