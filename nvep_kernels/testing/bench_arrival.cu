// Ends when every signal of this rank's step is there, `count` words from `words`, and reads nothing else. `round` is the
// address of the lane's epoch as D.send wrote it.
#include "primitives/memory.cuh"
#include "primitives/time.cuh"
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void bench_arrival(const __grid_constant__ BenchNetworkArguments a) {
  const u32 epoch = *reinterpret_cast<const u32*>(a.round);
  const u64 deadline = global_timer_ns() + a.nanoseconds;
  for (u32 i = threadIdx.x; i < a.count; i += blockDim.x) {
    const u64* word = reinterpret_cast<const u64*>(a.words) + i;
    for (u32 looks = 1; static_cast<u32>(load_relaxed_system(word)) != epoch; ++looks) {
      if (looks % 1024 == 0 && global_timer_ns() > deadline) {
        store_relaxed_system(reinterpret_cast<u64*>(a.late), i + 1ull);
        break;
      }
      spin_pause();
    }
  }
}
