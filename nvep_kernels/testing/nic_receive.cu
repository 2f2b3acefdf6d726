// Waits for signals and checks that what they announce is there: one warp per warp of every source.
#include "testing/nic_stream.cuh"

namespace nvep {
namespace stream {

struct Receiver {
  const NicStreamArguments& a;
  RingWaiter waiter;
  u32 source, warp;

  // Until the signal has reached `value`. What its sender put before is then visible to the warp.
  __device__ bool await(u64 value) {
    const u64* word = reinterpret_cast<const u64*>(a.signals) + signal_of(source, warp);
    while (load_acquire_system(word) < value) {
      if (waiter.passed()) return false;
    }
    return true;
  }

  __device__ void check(u32 m, u32 i) {
    u32 words = bytes_of(source, warp, m) / 4;
    const u32* slot = reinterpret_cast<const u32*>(a.data + slot_of(source, warp, m, i));
    for (u32 w = threadIdx.x % 32; w < 2 * kSlotWords; w += 32) {
      u32 expected = w < words ? word_of(source, warp, m, w) : 0;
      if (load_weak(slot + w) != expected) fetch_add_relaxed_device(reinterpret_cast<u32*>(a.errors), 1u);
    }
  }

  __device__ bool receive_by_warp(u32 first, u64& count) {
    if (target_of(source, warp, first, 0) != a.rank) return true;
    u32 m = first + threadIdx.x % 32;
    u32 active = __ballot_sync(0xffffffffu, draw(source, warp, m, 99) % 4 != 0 && m < kMessages);
    count += static_cast<u32>(__popc(active));
    if (!__all_sync(0xffffffffu, await(kAdd ? count : first + 32ull))) return false;
    for (u32 left = active; left != 0; left &= left - 1) check(first + static_cast<u32>(__ffs(left)) - 1, 0);
    return true;
  }

  __device__ bool receive(u32 m, u64& count) {
    if (kByWarp) return receive_by_warp(m, count);
    if (!reaches(source, warp, m, a.rank)) return true;
    ++count;
    if (!__all_sync(0xffffffffu, await(kAdd ? count : m + 1ull))) return false;
    for (u32 i = 0; i < kTargets; ++i) {
      if (target_of(source, warp, m, i) == a.rank) check(m, i);
    }
    return true;
  }
};

}  // namespace stream
}  // namespace nvep

using namespace nvep;

extern "C" __global__ void nic_receive(const __grid_constant__ NicStreamArguments a) {
  u32 index = stream::warp_index();
  const Ring& first = *reinterpret_cast<const Ring*>(a.rings);
  RingWaiter waiter(a.deadline, first.alarm);
  stream::Receiver receiver = {a, waiter, index / stream::kWarps, index % stream::kWarps};
  u64 count = 0;
  for (u32 m = 0; m < stream::kMessages; m += stream::kByWarp ? 32 : 1) {
    if (!receiver.receive(m, count)) {
      if (threadIdx.x % 32 == 0) fetch_add_relaxed_device(reinterpret_cast<u32*>(a.errors) + 2, 1u);
      return;
    }
  }
}
