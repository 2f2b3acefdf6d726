// Every atomic once per thread, so that lost updates show in the totals.
#include "primitives/memory.cuh"

using namespace nvep;

extern "C" __global__ void atomics(const __grid_constant__ AtomicArguments arguments) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  AtomicTotals& t = *arguments.totals;
  for (u32 n = 0; n < arguments.repeats; ++n) {
    atomicAdd(&t.signed_sum, -1);
    atomicAdd(&t.unsigned_sum, 3u);
    atomicAdd(&t.float_sum, 0.5f);
    atomicOr(&t.bits, 1u << (i % 32));
    atomicMax(&t.highest, static_cast<i32>(i));
    fetch_add_relaxed_device(&t.relaxed, 1u);
    fetch_add_acq_rel_device(&t.ordered, 2u);
    u64 seen = load_relaxed_device(&t.swapped);
    while (true) {
      u64 now = compare_swap_relaxed_device(&t.swapped, seen, seen + 5);
      if (now == seen) break;
      seen = now;
    }
    // A chain: every value but the last is handed out once.
    u32 previous = exchange_relaxed_device(&t.last, (i + 1) * arguments.repeats + n);
    atomicAdd(&t.handed_out, static_cast<u64>(previous));
  }
}
