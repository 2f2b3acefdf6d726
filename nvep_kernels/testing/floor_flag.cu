// Two threads on two ranks pass a number back and forth, a.count times. `target` is the peer's word, `source` ours.
// The first round brings the ranks together and is not timed.
#include "primitives/memory.cuh"
#include "primitives/time.cuh"
#include "primitives/types.cuh"

using namespace nvep;

namespace {

__device__ void tell(u64* word, u64 value, bool ordered) {
  if (ordered) {
    store_release_system(word, value);
  } else {
    store_relaxed_system(word, value);
  }
}

// False once the deadline is past. The clock is read now and then: reading it takes longer than a look at the word.
__device__ bool await(const u64* word, u64 value, bool ordered, u64 deadline) {
  for (u32 looks = 1;; ++looks) {
    u64 seen = ordered ? load_acquire_system(word) : load_relaxed_system(word);
    if (seen == value) return true;
    if (looks % 1024 == 0 && global_timer_ns() > deadline) return false;
    spin_pause();
  }
}

}  // namespace

extern "C" __global__ void floor_flag(const __grid_constant__ FloorArguments a) {
  u64* theirs = reinterpret_cast<u64*>(a.target);
  const u64* ours = reinterpret_cast<const u64*>(a.source);
  u64* result = reinterpret_cast<u64*>(a.result);
  bool first = a.first != 0, ordered = a.ordered != 0;
  u64 deadline = global_timer_ns() + a.nanoseconds, start = 0;
  for (u64 i = 0; i <= a.count; ++i) {
    if (i == 1) start = global_timer_ns();
    u64 value = a.base + i;
    if (first) tell(theirs, value, ordered);
    if (!await(ours, value, ordered, deadline)) return;
    if (!first) tell(theirs, value, ordered);
  }
  *result = global_timer_ns() - start;
}
