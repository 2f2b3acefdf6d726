// Each conversion over a range of inputs.
#include "primitives/convert.cuh"

using namespace nvep;

extern "C" __global__ void conversions(const __grid_constant__ ConversionArguments arguments) {
  const u32 start = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 stride = gridDim.x * blockDim.x;
  for (u32 i = start; i < 65536; i += stride) {
    arguments.from_bf16[i] = bf16_to_float(static_cast<u16>(i));
    arguments.from_half[i] = half_to_float(static_cast<u16>(i));
    if (i < 256) arguments.from_e4m3[i] = e4m3_to_float(static_cast<u8>(i));
  }
  for (u32 i = start; i < arguments.count; i += stride) {
    arguments.to_bf16[i] = float_to_bf16(arguments.values[i]);
    arguments.to_half[i] = float_to_half(arguments.values[i]);
    arguments.to_e4m3[i] = float_to_e4m3(arguments.values[i]);
  }
}
