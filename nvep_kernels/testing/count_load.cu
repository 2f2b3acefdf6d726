// Counts experts as D.recv does: ids in device memory, those below `first` or from `end` on belong to other ranks.
#include "moe/load.cuh"

using namespace nvep;

extern "C" __global__ void count_load(const __grid_constant__ CountLoadArguments arguments) {
  const u32 stride = gridDim.x * blockDim.x;
  const u32 lane = threadIdx.x & 31u;
  for (u32 base = blockIdx.x * blockDim.x + threadIdx.x - lane; base < arguments.count; base += stride) {
    const u32 i = base + lane;
    const i32 expert = i < arguments.count ? load_weak(arguments.expert_ids + i) : -1;
    count_expert(arguments.load, expert >= arguments.first && expert < arguments.end ? expert : -1);
  }
}
