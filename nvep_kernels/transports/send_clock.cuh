// Where the time of a send over rings goes. Nothing of it is compiled unless the configuration asks for it
// (config::kAccountSends): a clock that is off has no state and no code.
#pragma once
#include "primitives/atomics.cuh"
#include "primitives/time.cuh"

namespace nvep {

// Mirrored in nvep/bench/network_account.py. First those of a block, noted by its first thread; then, inside `kSendPost`,
// those of a thread that posts. A claim holds the wait for room, which `stalled_ns` of the ring counts apart.
enum SendStage : u32 {
  kSendRoute,
  kSendStage,
  kSendFence,
  kSendPost,
  kSendArrive,
  kSendSignal,
  kPostClaim,
  kPostBuild,
  kPostOrder,
  kPostLock,
  kPostDoorbell,
  kPostReady,
  kSendCycles,       // of blocks as a whole, in cycles
  kSendNanoseconds,  // and by the clock
  kSendBlocks,
  kSendStages
};

template <bool kOn>
struct SendClock {
  __device__ explicit SendClock(u64) {}
  __device__ void start() {}
  __device__ void mute() {}
  __device__ void note(SendStage, bool = true) {}
  __device__ void finish() {}
};

// `sums` is the address of kSendStages words, the same for all threads of a phase.
template <>
struct SendClock<true> {
  u64 sums;
  u64 last;
  u64 began;
  u64 began_ns;

  __device__ explicit SendClock(u64 address) : sums(address), began_ns(global_timer_ns()) {
    start();
    began = last;
  }

  __device__ void add(SendStage stage, u64 amount) {
    if (sums != 0) fetch_add_relaxed_device(reinterpret_cast<u64*>(sums) + stage, amount);
  }

  __device__ void mute() { sums = 0; }

  __device__ void start() { last = cycle_counter(); }

  // The time since the last note, or the start, was spent on `stage`.
  __device__ void note(SendStage stage, bool counts = true) {
    u64 now = cycle_counter();
    if (counts) add(stage, now - last);
    start();
  }

  // Of the thread that speaks for its block: all of its time, on both clocks.
  __device__ void finish() {
    add(kSendCycles, cycle_counter() - began);
    add(kSendNanoseconds, global_timer_ns() - began_ns);
    add(kSendBlocks, 1);
  }
};

}  // namespace nvep
