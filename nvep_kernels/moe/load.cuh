// Load statistics: tokens that a rank received for each physical expert. Meant for the warps of D.recv that look at
// headers anyway, so that counting takes no launch of its own; counters are never reset and wrap at 2^32.
#pragma once
#include "primitives/memory.cuh"
#include "primitives/reduce.cuh"

namespace nvep {

// Every lane of a warp calls it, each with the id of one local expert of one received token, or below 0 for nothing to
// count. Equal ids of a warp are added at once: a popular expert costs one atomic a warp, not one a token.
__device__ __forceinline__ void count_expert(u32* load, i32 expert) {
  const u32 same = __match_any_sync(kFullWarp, expert);
  const u32 lane = threadIdx.x & 31u;
  const bool first = lane == static_cast<u32>(__ffs(static_cast<int>(same))) - 1;
  if (expert >= 0 && first) fetch_add_relaxed_device(load + expert, static_cast<u32>(__popc(same)));
}

}  // namespace nvep
