// Needs more local memory than a context sets aside at first.
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void deep_stack(const __grid_constant__ ScaleAddArguments arguments) {
  volatile float stack[2048];
  for (u32 i = 0; i < arguments.count; ++i) stack[i] = arguments.values[i];
  for (u32 i = 0; i < arguments.count; ++i) arguments.values[i] = stack[arguments.count - 1 - i] * arguments.factor;
}
