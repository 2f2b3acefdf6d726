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
constexpr u32 kMaxThreads = 512;  // of a block
constexpr u32 kMaskWords = (config::kRanks + 31) / 32;

// Ranks as bits. No index depends on a rank, which would send the words to memory.
struct RankSet {
  u32 bits[kMaskWords];

  __device__ bool has(u32 rank) const {
    u32 word = bits[0];
#pragma unroll
    for (u32 w = 1; w < kMaskWords; ++w) word = rank / 32 == w ? bits[w] : word;
    return (word >> (rank % 32)) & 1u;
  }
  __device__ void add(u32 rank) {
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) bits[w] |= kMaskWords == 1 || rank / 32 == w ? 1u << (rank % 32) : 0u;
  }

  // `visit(rank)` for every member, ascending.
  template <class Visit>
  __device__ void for_each(Visit visit) const {
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) {
      for (u32 left = bits[w]; left != 0; left &= left - 1)
        visit(w * 32 + static_cast<u32>(__ffs(static_cast<int>(left))) - 1);
    }
  }

  // Members below `rank`: the position of `rank` among them.
  __device__ u32 below(u32 rank) const {
    u32 n = 0;
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) {
      u32 word = w < rank / 32 ? bits[w] : w == rank / 32 ? bits[w] & ((1u << (rank % 32)) - 1) : 0u;
      n += static_cast<u32>(__popc(word));
    }
    return n;
  }
};

// What every phase knows. Addresses of heap regions are lane-relative offsets from a rank's slice.
struct Step {
  const CommonArguments* arguments;
  u64 local;        // private state of this lane
  u64 lane_offset;  // start of this lane in every slice
  u32 rank;
  u32 phase;
  u32 epoch;
  bool alive;      // the lane did not die before this phase
  bool joined;     // C.send and C.recv in one launch
  RankSet active;  // ranks that take part in this step

  __device__ Counters* counters() const { return reinterpret_cast<Counters*>(local + local::kCountersOffset); }

  template <class T>
  __device__ T* local_region(u64 offset) const {
    return reinterpret_cast<T*>(local + offset);
  }

  __device__ u64 lane_of(u32 rank_of_slice) const { return arguments->peers[rank_of_slice] + lane_offset; }

  __device__ Status* status() const { return reinterpret_cast<Status*>(arguments->status); }
};

// Ranks whose mask word is zero. Whole warps call this.
__device__ inline RankSet unmasked(const u32* masked) {
  RankSet set = {};
#pragma unroll
  for (u32 first = 0; first < config::kRanks; first += 32) {
    u32 r = first + threadIdx.x % 32;
    set.bits[first / 32] = __ballot_sync(kWarp, r < config::kRanks && masked[r] == 0);
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

// Who fails where. Reports are not inlined, and a Step whose address were taken would not stay in registers.
struct Post {
  const CommonArguments* arguments;
  u32 epoch, phase;

  __device__ Counters* counters() const {
    return reinterpret_cast<Counters*>(arguments->local + local::kCountersOffset);
  }

  // Poison words serve all lanes: they sit in lane 0, one for each rank that may write here.
  __device__ u64* poison(u32 rank_of_slice, u32 reporter) const {
    return reinterpret_cast<u64*>(arguments->peers[rank_of_slice] + heap::kPoisonOffset) + reporter;
  }
};

__device__ inline Post post_of(const Step& step) {
  return {step.arguments, step.epoch, step.phase};
}

// The first failure of a lane wins: it marks the lane dead as of this phase and tells the host. True to the winner.
__device__ inline bool report(Post post, const Failure& failure) {
  u64 mark = dead_mark(post.epoch, post.phase);
  if (compare_swap_relaxed_device(&post.counters()->dead, 0ull, mark) != 0ull) return false;
  Status* status = reinterpret_cast<Status*>(post.arguments->status);
  store_relaxed_system(&status->suspect, failure.suspect);
  store_relaxed_system(&status->reporter, failure.reporter);
  store_relaxed_system(&status->phase, failure.phase);
  store_relaxed_system(&status->epoch, failure.epoch);
  store_release_system(&status->code, failure.code);
  return true;
}

// `source` sent this step with another protocol.
__device__ __noinline__ void report_protocol(Post post, u32 source) {
  report(post, {kStatusProtocol, source, post.arguments->rank, post.epoch, post.phase});
}

// A wait passed its deadline: end the waits of every rank, of all lanes.
__device__ inline void expire(Post post, u32 suspect) {
  u32 rank = post.arguments->rank;
  if (!report(post, {kStatusExpired, suspect, rank, post.epoch, post.phase})) return;
  u64 word = make_poison(post.epoch, suspect, rank, post.phase);
  for (u32 r = 0; r < config::kRanks; ++r) store_relaxed_system(post.poison(r, rank), word);
}

// Has `reporter` poisoned this rank? What a masked rank says no longer counts.
__device__ __noinline__ bool poisoned_by(Post post, u32 reporter) {
  u64 word = load_relaxed_system(post.poison(post.arguments->rank, reporter));
  if (word == 0 || post.arguments->masked[reporter] != 0) return false;
  report(post, {kStatusPoisoned, static_cast<u32>(word >> 32) & 0x3fffu, reporter, static_cast<u32>(word),
                static_cast<u32>(word >> 60) & 7u});
  return true;
}

__device__ inline bool poisoned(Post post) {
  bool any = false;
  for (u32 r = 0; r < config::kRanks; ++r) any |= poisoned_by(post, r);
  return any;
}

// Opens a phase; whole warps call this. The loads do not depend on one another.
// A death in this very phase does not count: some blocks of the kernel may already wait while others still decide
// whether to send, and all must decide alike.
template <class Arguments>
__device__ inline Step open_step(const Arguments& a, u32 phase, bool next, const u32* masked) {
  const CommonArguments* common = reinterpret_cast<const CommonArguments*>(&a);
  Step step = {common, a.local, a.lane * heap::kLaneBytes, a.rank, phase, 0, true, false, {}};
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
    return (++polls & 63u) == 0u && over(step, suspect);
  }

  // The same for a whole warp, all of whose lanes call it; `suspect()` is asked for by all of them, now and then.
  template <class Suspect>
  __device__ bool passed_for_warp(const Step& step, Suspect suspect) {
    spin_pause();
    if ((++polls & 63u) != 0u) return false;
    u32 rank = suspect();
    return __any_sync(kWarp, threadIdx.x % 32 == 0 && over(step, rank));
  }

  __device__ bool over(const Step& step, u32 suspect) {
    u64 now = time_to_stop(post_of(step), suspect, start);
    if (start == 0) start = now;
    return now == kStop;
  }

  static constexpr u64 kStop = ~0ull;

  // The time, or kStop.
  __device__ __noinline__ static u64 time_to_stop(Post post, u32 suspect, u64 start) {
    if (load_relaxed_device(&post.counters()->dead) != 0ull || poisoned(post)) return kStop;
    u64 now = global_timer_ns();
    if (start == 0 || now - start <= post.arguments->deadline) return now;
    expire(post, suspect);
    return kStop;
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
    failed |= poisoned_by(post_of(step), r);
    if (!step.active.has(r)) {
      seen(r, make_record(step.epoch, 0, Protocol::kCode));
    } else if (!await_word<Protocol::kAcquires>(step, where(r), r, word)) {
      failed = true;
    } else if (record_protocol(word) != Protocol::kCode) {
      report_protocol(post_of(step), r);
      failed = true;
    } else {
      seen(r, word);
    }
  }
  return !__syncthreads_or(failed);
}

}  // namespace nvep
