// Rows of floats to a payload format: encoded rows and their scales, in the layout that dispatch sends. One unit of
// eight elements a thread and round; the lanes of a block of elements stand side by side in a warp.
#include "formats/elements.cuh"
#include "formats/scales.cuh"

using namespace nvep;

namespace {

constexpr u32 kBlockUnits = Format::kBlock / kUnitElements;
constexpr u32 kUnitBytes = sizeof(Format::Unit);
constexpr u32 kRowUnits = config::kRowBytes / kUnitBytes;  // with the padding to 16 bytes
constexpr u32 kWorkUnits = (kRowUnits + kBlockUnits - 1) / kBlockUnits * kBlockUnits;
constexpr u32 kSourceUnits = config::kHidden / kUnitElements;
constexpr u32 kScales = Format::kScaleBytes ? (config::kHidden + Format::kBlock - 1) / Format::kBlock : 0;
constexpr u32 kLastScale = kScales ? kScales - 1 : 0;
constexpr u32 kScalePadding = config::kScaleRowBytes / sizeof(Format::Scale) - kScales;

// By the first lane of a block; that of the last block also clears the padding behind the scales.
__device__ inline void store_scale(u64 row, u32 block, Format::Scale scale) {
  Format::Scale* scales = reinterpret_cast<Format::Scale*>(row);
  if (block > kLastScale) return;  // a unit of padding only
  scales[block] = scale;
  if (block != kLastScale) return;
  for (u32 i = 0; i != kScalePadding; ++i) scales[kScales + i] = 0;
}

}  // namespace

extern "C" __global__ void quantise(const __grid_constant__ QuantiseArguments arguments) {
  u32 tokens = arguments.num_tokens;
  if (arguments.num_tokens_device) tokens = min(tokens, load_weak(arguments.num_tokens_device));
  const float tensor_scale = arguments.tensor_scale ? load_weak(arguments.tensor_scale) : 1.0f;
  const u64 work = static_cast<u64>(tokens) * kWorkUnits;
  const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
  const u32 lane = threadIdx.x & 31u;
  const u64 warp_first = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x - lane;
  for (u64 first = warp_first; first < work; first += stride) {  // the same for all lanes: they shuffle
    const u64 i = first + lane;
    const u64 token = i / kWorkUnits;
    const u32 unit = static_cast<u32>(i % kWorkUnits);
    const bool inside = i < work && unit < kSourceUnits;
    float x[kUnitElements] = {};
    if (inside) Source::load(arguments.rows + (token * kSourceUnits + unit) * Source::kBytes, x);
    Format::Scale scale = 0;
    const Format::Unit encoded = Format::encode(x, tensor_scale, scale);
    if (i >= work) continue;
    if (unit < kRowUnits) {
      Format::Unit* row = reinterpret_cast<Format::Unit*>(arguments.payload + token * config::kRowBytes);
      row[unit] = inside ? encoded : Format::padding();
    }
    if (kScales && unit % kBlockUnits == 0) {
      store_scale(arguments.scales + token * config::kScaleRowBytes, unit / kBlockUnits, scale);
    }
  }
}
