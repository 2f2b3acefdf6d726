// One step of a recurrence that shows the order of its steps; waits for the kernel before it.
#include "primitives/launch.cuh"
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void append(const __grid_constant__ AppendArguments arguments) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) *arguments.value = *arguments.value * 31 + arguments.tag;
}
