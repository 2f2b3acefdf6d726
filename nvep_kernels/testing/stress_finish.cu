// Check the sums that came back, then go on to the next step. One block.
#include "testing/stress.cuh"

using namespace nvep;

extern "C" __global__ void stress_finish(const __grid_constant__ StressArguments a) {
  u32 step = *a.step, count = stress::count_of(step, a.rank);
  for (u32 i = threadIdx.x; i < count * stress::kElements; i += blockDim.x) {
    u32 token = i / stress::kElements, element = i % stress::kElements;
    float sum = 0.0f;
    for (u32 target = 0; target < stress::kRanks; ++target) {
      if (stress::goes_to(a.expert_ranks, step, a.rank, token, target)) {
        sum += stress::partial_of(step, a.rank, token, target, element);
      }
    }
    if (a.output[i] != float_to_bf16(sum)) stress::complain(a.errors, step, 6, token);
  }
  __syncthreads();
  if (threadIdx.x == 0) *a.step = step + 1;
}
