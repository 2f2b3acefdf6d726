// Threads return one after another: thread t takes part in t + 1 barriers and full-mask votes, then leaves.
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void early_return(const __grid_constant__ ReturnArguments arguments) {
  for (u32 i = 0; i <= threadIdx.x; ++i) {
    int here = __syncthreads_count(1);
    u32 lanes = __ballot_sync(0xffffffffu, 1);
    if (threadIdx.x + 1 == blockDim.x) {
      arguments.counts[i] = here;
      arguments.ballots[i] = lanes;
    }
  }
}
