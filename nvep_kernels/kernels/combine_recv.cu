// C.recv: wait for every peer, then pull this rank's partial rows and sum them.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    combine_recv(const __grid_constant__ CombineArguments arguments) {
  grid_dependency_wait();
  grid_dependency_launch();
  NVEP_SHARED(Transport::Shared, shared);
  auto ahead = Transport::combine_ahead(arguments, false);
  Step step = open_phase(arguments, kPhaseCombine);
  Transport::combine_recv(arguments, step, ahead, shared);
}
