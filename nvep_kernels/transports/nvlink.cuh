// What both protocols do alike over peer load/store: the step record's place, rows without a token, what ends D.send and
// the step.
#pragma once
#include "protocols/lane.cuh"
#include "transports/slots.cuh"

namespace nvep {

struct NvlinkShared {
  u32 count[config::kRanks];  // rows to expect, by source
};

// What a phase loads before it opens the step, where a protocol loads nothing.
struct Nothing {};

constexpr u32 kDispatchRecordBytes = 16;  // two words per source

struct NvlinkStep {
  // Who is masked comes from the live mask in D.send, and from here in the other phases.
  __device__ static u32* mask_snapshot(const Step& step) { return step.local_region<u32>(local::kMaskSnapshotOffset); }

  // A count on the device cannot be checked before the launch: it is cut to the rows of the arrays here and reported by
  // close_dispatch_send.
  template <class Arguments>
  __device__ static u32 token_count(const Arguments& a) {
    return a.num_tokens_device ? min(*a.num_tokens_device, a.num_tokens) : a.num_tokens;
  }

  __device__ static u64* dispatch_record(u64 lane, u32 source, u32 epoch) {
    return reinterpret_cast<u64*>(lane + heap::kRecordOffset + source * kDispatchRecordBytes) + (epoch & 1u);
  }

  // One thread of the grid: what the later phases read instead of values that may have changed by then.
  template <class Arguments>
  __device__ static void close_dispatch_send(const Arguments& a, const Step& step, u32 tokens) {
    Counters* counters = step.counters();
    counters->dispatched = step.epoch;
    counters->tokens = tokens;
    if (a.num_tokens_device && *a.num_tokens_device > tokens) {
      store_relaxed_system(&step.status()->excess_tokens, *a.num_tokens_device);
    }
    for (u32 r = 0; r < config::kRanks; ++r) mask_snapshot(step)[r] = step.active.has(r) ? 0u : 1u;
  }

  // Ids of rows that hold no token, so that they lead nobody there.
  __device__ static void fill_invalid(u64 expert_ids, const NvlinkShared& shared) {
    u32* ids = reinterpret_cast<u32*>(expert_ids);
    constexpr u32 per_source = config::kMaxTokens * config::kTopK;
    u32 stride = gridDim.x * blockDim.x;
    for (u32 r = 0; r < config::kRanks; ++r) {
      u32 used = shared.count[r] * config::kTopK;
      for (u32 i = used + blockIdx.x * blockDim.x + threadIdx.x; i < per_source; i += stride) {
        store_weak(ids + static_cast<u64>(r) * per_source + i, static_cast<u32>(config::kInvalidExpert));
      }
    }
  }

  // The last thread of the grid has the least to do at few tokens.
  __device__ static bool is_last_thread() { return blockIdx.x == gridDim.x - 1 && threadIdx.x == blockDim.x - 1; }

  // The end of a step, whenever in the kernel. Stream order alone makes this safe: only the next D.send reads
  // `completed`, and only D.send counts what it could not send as given.
  __device__ static void complete(const Step& step) {
    if (!is_last_thread()) return;
    Counters* counters = step.counters();
    counters->completed = step.epoch;
    u32 invalid = load_relaxed_device(&counters->invalid_ids), dropped = load_relaxed_device(&counters->dropped_tokens);
    if (invalid) store_relaxed_system(&step.status()->invalid_ids, invalid);
    if (dropped) store_relaxed_system(&step.status()->dropped_tokens, dropped);
  }
};

}  // namespace nvep
