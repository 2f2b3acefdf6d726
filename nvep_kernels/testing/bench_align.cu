// Brings the ranks to the same point of their streams: every rank tells every other that it is here, and waits for all.
// `peers` is a table of the addresses of the ranks' words, one word for each rank; `round` counts calls.
#include "primitives/memory.cuh"
#include "primitives/time.cuh"
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void bench_align(const __grid_constant__ BenchNetworkArguments a) {
  u64* round = reinterpret_cast<u64*>(a.round);
  const u64 value = *round + 1;
  const u64 deadline = global_timer_ns() + a.nanoseconds;
  for (u32 r = threadIdx.x; r < a.ranks; r += blockDim.x) {
    u64* theirs = reinterpret_cast<u64*>(reinterpret_cast<const u64*>(a.peers)[r]);
    store_release_system(theirs + a.rank, value);
  }
  for (u32 r = threadIdx.x; r < a.ranks; r += blockDim.x) {
    const u64* ours = reinterpret_cast<const u64*>(a.words) + r;
    for (u32 looks = 1; load_acquire_system(ours) < value; ++looks) {
      if (looks % 1024 == 0 && global_timer_ns() > deadline) {
        store_relaxed_system(reinterpret_cast<u64*>(a.late), r + 1ull);
        break;
      }
      spin_pause();
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *round = value;
}
