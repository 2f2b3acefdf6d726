// Free Flow: entries are built as for GDAKI, then one ready word each says so, in memory that the host reads. A host thread
// rings for contiguous ready entries (nvep_kernels/nic/ready_scan.cuh), so GPU threads never wait for one another.
#pragma once
#include "transports/ring_queue.cuh"

namespace nvep {

struct ReadyPublisher {
  // Entry `index` is ready once its word holds index + 1. Absolute, so a word of an earlier lap says nothing.
  __device__ static void mark(const Ring& ring, u64 index) {
    store_relaxed_system(reinterpret_cast<u64*>(ring.ready) + (index & (ring.depth - 1)), index + 1);
  }

  // The fence puts the entries, in GPU memory, before the words, in the host's.
  template <class Waiter>
  __device__ static bool publish(const Ring& ring, u64 first, u32 count, Waiter& waiter) {
    fence_acq_rel_system();
    for (u32 i = 0; i < count; ++i) mark(ring, first + i);
    waiter.clock.note(kPostReady);
    return true;
  }

  template <class Waiter>
  __device__ static bool publish_by_warp(const Ring& ring, u64, u32, u64 index, bool active, Waiter& waiter) {
    if (active) {
      fence_acq_rel_system();
      mark(ring, index);
    }
    waiter.clock.note(kPostReady, threadIdx.x % 32 == 0);
    return true;
  }
};

}  // namespace nvep
