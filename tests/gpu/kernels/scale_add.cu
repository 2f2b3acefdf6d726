// values = values * factor + addend, as written: a product, then a sum.
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void scale_add(const __grid_constant__ ScaleAddArguments arguments) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < arguments.count) arguments.values[i] = arguments.values[i] * arguments.factor + arguments.addend;
}
