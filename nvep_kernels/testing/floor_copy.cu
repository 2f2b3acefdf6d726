// Copies 16-byte words, four in flight to a thread: what plain loads and stores reach, on this GPU or into a peer's.
#include "primitives/memory.cuh"
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void floor_copy(const __grid_constant__ FloorArguments a) {
  const uint4* source = reinterpret_cast<const uint4*>(a.source);
  uint4* target = reinterpret_cast<uint4*>(a.target);
  u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
  u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < a.count; i += 4 * stride) {
    uint4 words[4];
    for (u32 k = 0; k < 4; ++k) words[k] = load_weak(source + i + k * stride);
    for (u32 k = 0; k < 4; ++k) store_weak(target + i + k * stride, words[k]);
  }
  for (; i < a.count; i += stride) store_weak(target + i, load_weak(source + i));
}
