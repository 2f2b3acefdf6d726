// A tree in shared memory, reducing barriers, and two shared objects; grid-strided, many barriers per thread.
#include "primitives/shared.cuh"
#include "primitives/types.cuh"

using namespace nvep;

struct Tree {
  i32 part[1024];
};
struct Extremes {
  i32 highest;
  u32 seen;
};

extern "C" __global__ void block_reduce(const __grid_constant__ ReduceArguments arguments) {
  NVEP_SHARED(Tree, tree);
  NVEP_SHARED(Extremes, extremes);
  const u32 t = threadIdx.x;
  for (u32 row = blockIdx.x; row < arguments.rows; row += gridDim.x) {
    i32 value = t < arguments.columns ? arguments.values[row * arguments.columns + t] : 0;
    if (t == 0) {
      extremes.highest = -2147483647;
      extremes.seen = 0;
    }
    tree.part[t] = value;
    __syncthreads();
    if (t < arguments.columns) atomicMax(&extremes.highest, value);
    atomicOr(&extremes.seen, 1u << (value & 31));
    for (u32 half = blockDim.x / 2; half; half /= 2) {
      if (t < half) tree.part[t] += tree.part[t + half];
      __syncthreads();
    }
    int negative = __syncthreads_count(value < 0);
    int any = __syncthreads_or(value == 7);
    int all = __syncthreads_and(value > -1000);
    if (t == 0) {
      i32* out = arguments.results + row * 6;
      out[0] = tree.part[0];
      out[1] = extremes.highest;
      out[2] = static_cast<i32>(extremes.seen);
      out[3] = negative;
      out[4] = any;
      out[5] = all;
    }
    __syncthreads();
  }
}
