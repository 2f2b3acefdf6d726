// Encoded rows and their scales back to rows of floats: for expert kernels that take no quantised rows.
#include "formats/elements.cuh"
#include "formats/scales.cuh"

using namespace nvep;

extern "C" __global__ void dequantise(const __grid_constant__ DequantiseArguments arguments) {
  constexpr u32 row_units = config::kHidden / kUnitElements;
  const float tensor_scale = arguments.tensor_scale ? load_weak(arguments.tensor_scale) : 1.0f;
  const u64 work = static_cast<u64>(arguments.num_rows) * row_units;
  const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < work; i += stride) {
    const u64 row = i / row_units;
    const u32 unit = static_cast<u32>(i % row_units);
    Format::Scale scale = 0;
    if (Format::kScaleBytes) {
      const u64 scales = arguments.scales + row * config::kScaleRowBytes;
      scale = reinterpret_cast<const Format::Scale*>(scales)[unit * kUnitElements / Format::kBlock];
    }
    const u64 encoded = arguments.payload + row * config::kRowBytes;
    float x[kUnitElements];
    Format::decode(reinterpret_cast<const Format::Unit*>(encoded)[unit], scale, tensor_scale, x);
    Target::store(arguments.rows + i * Target::kBytes, x);
  }
}
