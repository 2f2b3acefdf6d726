// Threads return one after another. Thread t takes part in t + 1 barriers and full-mask votes, or with `reversed` in
// blockDim.x - 1 - t, so that the last thread returns while all others wait.
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void early_return(const __grid_constant__ ReturnArguments arguments) {
  const u32 rounds = arguments.reversed ? blockDim.x - 1 - threadIdx.x : threadIdx.x + 1;
  for (u32 i = 0; i < rounds; ++i) {
    int here = __syncthreads_count(1);
    u32 lanes = __ballot_sync(0xffffffffu, 1);
    if (threadIdx.x == (arguments.reversed ? 0 : blockDim.x - 1)) {
      arguments.counts[i] = here;
      arguments.ballots[i] = lanes;
    }
  }
}
