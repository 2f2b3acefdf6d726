// A lane's step: where its state lives, its record words, and waits that always end.
//
// Counters (declared in nvep/exchange/plan.py) hold the device-resident epoch: D.send reads `completed` (c) and writes
// `dispatched` (d = c + 1); D.recv, C.send and C.recv read d; C.recv or release writes c = d. No kernel reads a
// word that another block of the same kernel may be advancing.
#pragma once
#include "primitives/memory.cuh"
#include "primitives/time.cuh"
#include "primitives/types.cuh"

namespace nvep {

enum Phase : u32 { kPhaseDispatch = 1, kPhaseCombine = 2, kPhaseRelease = 3 };  // 4: a host that leaves
enum StatusCode : u32 { kStatusExpired = 1, kStatusPoisoned = 2, kStatusProtocol = 3 };

constexpr u32 kWarp = 0xffffffffu;
constexpr u32 kMaskWords = (config::kRanks + 63) / 64;

// Ranks as bits.
struct RankSet {
  u64 bits[kMaskWords];

  __device__ bool has(u32 rank) const { return (bits[rank / 64] >> (rank % 64)) & 1ull; }
  __device__ void add(u32 rank) { bits[rank / 64] |= 1ull << (rank % 64); }

  // Members below `rank`: the position of `rank` among them.
  __device__ u32 below(u32 rank) const {
    u32 n = 0;
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) {
      u64 word = w < rank / 64 ? bits[w] : w == rank / 64 ? bits[w] & ((1ull << (rank % 64)) - 1) : 0ull;
      n += static_cast<u32>(__popcll(word));
    }
    return n;
  }
};

// What every phase knows. Addresses of heap regions are lane-relative offsets from a rank's slice.
struct Step {
  const u64* peers;   // slice of each rank, mapped here; an argument of the kernel
  u64 local;          // private state of this lane
  u64 status;         // Status, in memory the host reads
  u64 lane_offset;    // start of this lane in every slice
  const u32* masked;  // the live mask: what a rank that is left out says no longer counts
  u64 deadline;       // nanoseconds
  u32 rank;
  u32 phase;
  u32 epoch;
  bool alive;      // the lane did not die before this phase
  RankSet active;  // ranks that take part in this step

  __device__ Counters* counters() const { return reinterpret_cast<Counters*>(local + local::kCountersOffset); }

  template <class T>
  __device__ T* local_region(u64 offset) const {
    return reinterpret_cast<T*>(local + offset);
  }

  __device__ u64 lane_of(u32 rank_of_slice) const { return peers[rank_of_slice] + lane_offset; }

  template <class T>
  __device__ T* region(u32 rank_of_slice, u64 offset) const {
    return reinterpret_cast<T*>(lane_of(rank_of_slice) + offset);
  }

  // Poison words serve all lanes: they sit in lane 0, one for each rank that may write here.
  __device__ u64* poison(u32 rank_of_slice, u32 reporter) const {
    return reinterpret_cast<u64*>(peers[rank_of_slice] + heap::kPoisonOffset) + reporter;
  }
};

// Ranks whose mask word is zero. Whole warps call this.
__device__ inline RankSet unmasked(const u32* masked) {
  RankSet set = {};
#pragma unroll
  for (u32 first = 0; first < config::kRanks; first += 32) {
    u32 r = first + threadIdx.x % 32;
    u64 bits = __ballot_sync(kWarp, r < config::kRanks && masked[r] == 0);
    set.bits[first / 64] |= bits << (first % 64);
  }
  return set;
}

// Record word: epoch in the low half, then 24 bits of count, then the protocol.
__device__ inline u64 make_record(u32 epoch, u32 count, u32 protocol) {
  return static_cast<u64>(epoch) | (static_cast<u64>(count) << 32) | (static_cast<u64>(protocol) << 56);
}
__device__ inline u32 record_epoch(u64 record) {
  return static_cast<u32>(record);
}
__device__ inline u32 record_count(u64 record) {
  return static_cast<u32>(record >> 32) & 0xffffffu;
}
__device__ inline u32 record_protocol(u64 record) {
  return static_cast<u32>(record >> 56);
}

// Poison word: epoch, then 14 bits each of suspect and reporter, 3 of phase, and a set top bit.
__device__ inline u64 make_poison(u32 epoch, u32 suspect, u32 reporter, u32 phase) {
  return static_cast<u64>(epoch) | (static_cast<u64>(suspect) << 32) | (static_cast<u64>(reporter) << 46) |
         (static_cast<u64>(phase) << 60) | (1ull << 63);
}

// Counters::dead: when the lane died; 0 while it lives.
__device__ inline u64 dead_mark(u32 epoch, u32 phase) {
  return (static_cast<u64>(phase) << 32) | epoch;
}

struct Failure {
  u32 code, suspect, reporter, epoch, phase;
};

// The first failure of a lane wins: it marks the lane dead as of this phase and tells the host. True to the winner.
__device__ inline bool report(const Step& step, const Failure& failure) {
  u64 mark = dead_mark(step.epoch, step.phase);
  if (compare_swap_relaxed_device(&step.counters()->dead, 0ull, mark) != 0ull) return false;
  Status* status = reinterpret_cast<Status*>(step.status);
  store_relaxed_system(&status->suspect, failure.suspect);
  store_relaxed_system(&status->reporter, failure.reporter);
  store_relaxed_system(&status->phase, failure.phase);
  store_relaxed_system(&status->epoch, failure.epoch);
  store_release_system(&status->code, failure.code);
  return true;
}

// A wait passed its deadline: end the waits of every rank, of all lanes.
__device__ inline void expire(const Step& step, u32 suspect) {
  if (!report(step, {kStatusExpired, suspect, step.rank, step.epoch, step.phase})) return;
  u64 word = make_poison(step.epoch, suspect, step.rank, step.phase);
  for (u32 r = 0; r < config::kRanks; ++r) store_relaxed_system(step.poison(r, step.rank), word);
}

// Has `reporter` poisoned this rank?
__device__ inline bool poisoned_by(const Step& step, u32 reporter) {
  u64 word = load_relaxed_system(step.poison(step.rank, reporter));
  if (word == 0 || step.masked[reporter] != 0) return false;
  report(step, {kStatusPoisoned, static_cast<u32>(word >> 32) & 0x3fffu, reporter, static_cast<u32>(word),
                static_cast<u32>(word >> 60) & 7u});
  return true;
}

__device__ inline bool poisoned(const Step& step) {
  bool any = false;
  for (u32 r = 0; r < config::kRanks; ++r) any |= poisoned_by(step, r);
  return any;
}

// Opens a phase; whole warps call this. The loads do not depend on one another.
// A death in this very phase does not count: some blocks of the kernel may already wait while others still decide
// whether to send, and all must decide alike.
template <class Arguments>
__device__ inline Step open_step(const Arguments& a, u32 phase, bool next, const u32* masked) {
  Step step = {a.peers, a.local, a.status, a.lane * heap::kLaneBytes, a.masked, a.deadline, a.rank, phase, 0, true, {}};
  const Counters* counters = step.counters();
  u64 dead = load_relaxed_device(&counters->dead);
  step.epoch = next ? counters->completed + 1 : counters->dispatched;
  step.active = unmasked(masked);
  step.alive = dead == 0ull || dead == dead_mark(step.epoch, phase);
  return step;
}

// D.send, alone or with D.recv: the next epoch, and the mask as it is now.
template <class Arguments>
__device__ inline Step open_dispatch(const Arguments& a) {
  return open_step(a, kPhaseDispatch, true, a.masked);
}

// Every other phase: the epoch and the mask of D.send.
template <class Arguments>
__device__ inline Step open_phase(const Arguments& a, u32 phase) {
  return open_step(a, phase, false, reinterpret_cast<const u32*>(a.local + local::kMaskSnapshotOffset));
}

// Counts the polls of one wait. `passed` is called once a poll and says when to give up: the deadline passed, the
// lane died elsewhere, or the rank was poisoned.
struct Deadline {
  u32 polls = 0;
  u64 start = 0;

  __device__ bool passed(const Step& step, u32 suspect) {
    spin_pause();
    if ((++polls & 63u) != 0u) return false;
    if (load_relaxed_device(&step.counters()->dead) != 0ull || poisoned(step)) return true;
    u64 now = global_timer_ns();
    if (start == 0) start = now;
    if (now - start <= step.deadline) return false;
    expire(step, suspect);
    return true;
  }
};

// Spin until the word's epoch half is that of the step. With kAcquire, everything its writer released before is then
// visible to this thread (and, after a barrier, to its block). False when the wait was given up.
template <bool kAcquire>
__device__ inline bool await_word(const Step& step, const u64* word, u32 suspect, u64& value) {
  Deadline deadline;
  for (;;) {
    value = load_relaxed_system(word);
    if (record_epoch(value) == step.epoch) {
      if constexpr (kAcquire) value = load_acquire_system(word);
      return true;
    }
    if (deadline.passed(step, suspect)) return false;
  }
}

// Every block calls this: one thread per peer waits for that peer's word, then a barrier extends what was acquired to
// the block. `seen(rank, word)` runs in the waiting thread, with a count of zero for masked ranks. False in all
// threads of the block if any wait failed.
template <class Protocol, class Where, class Seen>
__device__ inline bool await_records(const Step& step, Where where, Seen seen) {
  bool failed = false;
  for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) {
    u64 word = 0;
    failed |= poisoned_by(step, r);
    if (!step.active.has(r)) {
      seen(r, make_record(step.epoch, 0, Protocol::kCode));
    } else if (!await_word<Protocol::kAcquires>(step, where(r), r, word)) {
      failed = true;
    } else if (record_protocol(word) != Protocol::kCode) {
      report(step, {kStatusProtocol, r, step.rank, step.epoch, step.phase});
      failed = true;
    } else {
      seen(r, word);
    }
  }
  return !__syncthreads_or(failed);
}

}  // namespace nvep
