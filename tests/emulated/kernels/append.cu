// Appends a value to a log: shows in which order launches ran, and what they read when they ran.
#include "primitives/launch.cuh"
#include "primitives/memory.cuh"

using namespace nvep;

extern "C" __global__ void append(const __grid_constant__ AppendArguments arguments) {
  grid_dependency_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    u32 at = fetch_add_relaxed_device(arguments.length, 1u);
    store_weak(arguments.log + at, arguments.value + load_weak(arguments.input));
  }
  grid_dependency_launch();
}
