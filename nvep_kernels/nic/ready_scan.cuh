// Free Flow's host side: rings the doorbell for entries that GPU threads marked ready. Runs on a host thread; as a kernel
// under simulation.
#pragma once
#include "primitives/memory.cuh"

namespace nvep {

constexpr u32 kMostReady = 64;  // entries of one doorbell

// Contiguous ready entries from where the last scan stopped: it stops at the first that is not ready, or after 64.
// Returns how many it rang for.
__device__ inline u32 scan_ready(ReadyQueue& queue) {
  const u64* ready = reinterpret_cast<const u64*>(queue.ready);
  u32 n = 0;
  while (n < kMostReady && load_relaxed_system(ready + ((queue.next + n) & (queue.depth - 1))) == queue.next + n + 1)
    ++n;
  if (n == 0) return 0;
  fence_acq_rel_system();  // entries, then words, then this doorbell
  queue.next += n;
  ring::Doorbell bell = {};
  bell.set_index(static_cast<u32>(queue.next));
  bell.set_number(queue.number);
  store_relaxed_system(reinterpret_cast<u32*>(queue.record) + 1, swap_bytes(static_cast<u32>(queue.next & 0xffff)));
  store_release_system(reinterpret_cast<u64*>(queue.doorbell), bell.word[0]);
  return n;
}

}  // namespace nvep
