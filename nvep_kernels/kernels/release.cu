// Ends a step that has no combine, so that peers may overwrite its arrivals.
#include "primitives/launch.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    release(const __grid_constant__ CombineArguments arguments) {
  grid_dependency_wait();
  grid_dependency_launch();
  NVEP_SHARED(Transport::Shared, shared);
  Step step = open_phase(arguments, kPhaseRelease);
  Transport::release(step, shared);
}
