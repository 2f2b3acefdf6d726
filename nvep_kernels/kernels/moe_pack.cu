// Rows of each local expert side by side: a block copies a row at a time.
#include "moe/library.cuh"

using namespace nvep;

extern "C" __global__ void moe_pack(const __grid_constant__ LibraryArguments arguments) {
  constexpr u32 units = moe::kHidden / 8;
  for_pairs(arguments, [&](u32 pair, u32 expert) {
    const u64 from = arguments.rows + static_cast<u64>(pair / moe::kTopK) * units * 16;
    const u64 to = arguments.packed + moe::Place::of(arguments, pair, expert) * units * 16;
    for (u32 i = threadIdx.x; i < units; i += blockDim.x) {
      store_weak(reinterpret_cast<uint4*>(to) + i, load_weak(reinterpret_cast<const uint4*>(from) + i));
    }
  });
}
