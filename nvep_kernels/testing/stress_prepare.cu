// Write this step's inputs. One block.
#include "testing/stress.cuh"

using namespace nvep;

extern "C" __global__ void stress_prepare(const __grid_constant__ StressArguments a) {
  u32 step = *a.step, rank = a.rank;
  if (threadIdx.x == 0) stress::linger(step, rank, 0);
  __syncthreads();
  u32 count = stress::count_of(step, rank);
  if (threadIdx.x == 0) *a.num_tokens = count;
  for (u32 i = threadIdx.x; i < count * stress::kTopK; i += blockDim.x) {
    u32 token = i / stress::kTopK, k = i % stress::kTopK;
    a.expert_ids[i] = stress::expert_of(step, rank, token, k);
    a.expert_weights[i] = stress::weight_of(step, rank, token, k);
  }
  for (u32 i = threadIdx.x; i < count * stress::kRowWords; i += blockDim.x) {
    a.rows[i] = stress::word_of(step, rank, i / stress::kRowWords, i % stress::kRowWords);
  }
}
