// An exchange whose rows travel as messages of a network adapter: one per (token, target rank) out, one per row back.
// Ranks of the same NVLink domain store to one another directly; a step may mix both.
//
// Sources and inboxes are never written too early, by the order of a lane alone: D.send n+1 follows C.recv n, which saw
// every peer's signal of step n, sent after that peer had all rows of this rank; so staging of step n has been read. The
// same holds for partial rows, whose next writer follows D.recv n+1.
#pragma once
#include "transports/network_parts.cuh"

namespace nvep {

// Scheme::send_token(sender, routes, message) posts one token to its far targets, by one warp; Scheme::Poster posts the
// rest.
template <class Partial, class Scheme>
struct Network : NvlinkStep {
  using Protocol = Signals;
  using Shared = NetworkShared;
  using Poster = typename Scheme::Poster;
  using Sender = NetworkSender<Poster>;

  // --- D.send ---------------------------------------------------------------------------------------------------------

  template <class Arguments>
  __device__ static Nothing dispatch_ahead(const Arguments&) {
    return {};
  }

  template <class Arguments>
  __device__ static void dispatch_send(const Arguments& a, const Step& step, Nothing, Shared& shared) {
    if (!step.alive) return;
    StepClock clock = step_clock(step);
    u32 tokens = token_count(a);
    u32 first = static_cast<u32>(static_cast<u64>(tokens) * blockIdx.x / gridDim.x);
    u32 end = static_cast<u32>(static_cast<u64>(tokens) * (blockIdx.x + 1) / gridDim.x);
    bool totals = blockIdx.x == gridDim.x - 1;  // the last range ends with the counts of the whole step
    RowCounts before;
    before.count(a, first);
    before.add_up(shared.sent);
    for (u32 at = first; at < end; at += kTileTokens) {
      u32 n = min(kTileTokens, end - at);
      if (threadIdx.x < 32) {
        const u32 token = at + threadIdx.x;
        TokenIds ids = {};
        if (threadIdx.x < n) ids = given_ids(a, token);
        assign_tile(a, step, ids, at, n, shared.sent, shared.tile);
      }
      __syncthreads();
      clock.note(kSendRoute, threadIdx.x == 0);
      stage_headers(a, step, at, n, shared.tile);
      stage_payloads<0>(a, step, at, n, shared.tile);
      __syncthreads();
      clock.note(kSendStage, threadIdx.x == 0);
      post_tile(step, at, n, shared.tile, clock);
      __syncthreads();
      clock.note(kSendPost, threadIdx.x == 0);
    }
    u32* sent = step.local_region<u32>(local::kSendCountsOffset);
    if (totals) {
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) store_relaxed_device(sent + r, shared.sent[r]);
    }
    auto count = [&](u32 r) { return load_relaxed_device(sent + r); };
    bool ends = announce(step, Signals::kOut, &step.counters()->send_arrivals, count, clock);
    if (ends) close_dispatch_send(a, step, tokens);
    if (threadIdx.x == 0) clock.finish();
  }

  // Headers, the same for every target: ids, then weights.
  template <class Arguments>
  __device__ static void stage_headers(const Arguments& a, const Step& step, u32 first, u32 n, const SlotTile& tile) {
    for (u32 i = threadIdx.x; i < n * config::kTopK; i += blockDim.x) {
      u32 token = i / config::kTopK, k = i % config::kTopK;
      float weight = a.expert_weights[static_cast<u64>(first) * config::kTopK + i];
      u32 id = static_cast<u32>(tile.ids[token].id[k]);
      for_each_place(step, first + token, tile.routes[token], [&](u64 slot) {
        store_weak(reinterpret_cast<u32*>(slot) + k, id);
        store_weak(reinterpret_cast<float*>(slot) + config::kTopK + k, weight);
      });
    }
  }

  // Each 16-byte unit is read once, and stored to staging and to every near target of its token.
  template <u32 kPayload, class Arguments>
  __device__ static void stage_payloads(const Arguments& a, const Step& step, u32 first, u32 n, const SlotTile& tile) {
    if constexpr (kPayload < config::kPayloads) {
      constexpr u32 units = config::payload_bytes(kPayload) / 16;
      const uint4* rows = reinterpret_cast<const uint4*>(a.payloads[kPayload]) + static_cast<u64>(first) * units;
      for (u32 i = threadIdx.x; i < n * units; i += blockDim.x) {
        u32 token = i / units, unit = i % units;
        uint4 value = rows[i];
        for_each_place(step, first + token, tile.routes[token], [&](u64 slot) {
          store_weak(reinterpret_cast<uint4*>(slot + slot_payload_offset(kPayload)) + unit, value);
        });
      }
      stage_payloads<kPayload + 1>(a, step, first, n, tile);
    }
  }

  // One warp a token. Its fence puts what the block staged before the descriptors that it posts.
  __device__ static void post_tile(const Step& step, u32 first, u32 n, const SlotTile& tile, StepClock& clock) {
    u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (warp >= n) return;
    fence_acq_rel_system();
    clock.note(kSendFence, threadIdx.x == 0);
    Sender sender(step);
    for (u32 token = warp; token < n; token += warps) {
      sender.queue = (first + token) % config::kQueues;
      Message message = {0, config::kSlotBytes, {kHeapHandle, 0}, {kLocalHandle, staging_offset(step, first + token)}};
      Scheme::send_token(sender, tile.routes[token], message);
    }
  }

  // The last block to come here posts the signals, one thread a peer: every message of the grid is in its ring then.
  // True in the one thread that ends the phase.
  template <class Count>
  __device__ static bool announce(const Step& step, Signals::Direction direction, u32* arrivals, Count count,
                                  StepClock& clock) {
    __syncthreads();
    bool last = threadIdx.x == 0 && fetch_add_acq_rel_device(arrivals, 1u) == gridDim.x - 1;
    const bool ends = __syncthreads_or(last);
    clock.note(kSendArrive, threadIdx.x == 0);
    if (!ends) return false;
    if (last) store_relaxed_device(arrivals, 0u);
    if (load_relaxed_device(&step.counters()->dead) != 0ull) return last;  // some message was not posted
    if (threadIdx.x < config::kRanks) fence_acq_rel_system();
    Sender sender(step);
    sender.waiter.clock.mute();  // signals are one stage
    for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) {
      if (!step.active.has(r)) continue;
      u64 value = make_record(step.epoch, count(r), Signals::kCode);
      for (u32 queue = 0; queue < config::kQueues; ++queue) {
        u32 index = Signals::word_index(step, direction, step.rank, queue);
        sender.queue = queue;
        if (is_near(step.rank, r)) {
          store_relaxed_system(Signals::word(step, r, index), value);
        } else {
          Poster::signal(sender.ring_to(r), {r, index, value}, false, sender.waiter);
        }
      }
    }
    if constexpr (config::kAccountSends != 0) __syncwarp();  // the first thread speaks for its warp
    clock.note(kSendSignal, threadIdx.x == 0);
    return last;
  }

  // --- D.recv ---------------------------------------------------------------------------------------------------------

  __device__ static void dispatch_recv(const Step& step, Shared& shared) {
    for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) shared.count[r] = 0;
    __syncthreads();
    auto seen = [&](u32 r, u64 word) {
      shared.count[r] = min(record_count(word), static_cast<u32>(config::kMaxTokens));
    };
    bool alive = step.alive && Signals::await_all(step, Signals::kOut, seen);
    if (!alive) {  // outputs are undefined; ids are valid or invalid, never out of range
      __syncthreads();
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) shared.count[r] = 0;
      __syncthreads();
    }
    for (u32 r = 0; r < config::kRanks; ++r) {
      land_headers(step, r, shared.count[r]);
      land_payloads<0>(step, r, shared.count[r]);
    }
    fill_invalid(step.local + local::kLandedExpertIdsOffset, shared);
    if (blockIdx.x == 0) {
      i32* counts = step.local_region<i32>(local::kCountsOffset);
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) counts[r] = static_cast<i32>(shared.count[r]);
    }
  }

  __device__ static void land_headers(const Step& step, u32 source, u32 count) {
    const u64 first = static_cast<u64>(source) * config::kMaxTokens * config::kTopK;
    u32* ids = step.local_region<u32>(local::kLandedExpertIdsOffset) + first;
    float* weights = step.local_region<float>(local::kLandedExpertWeightsOffset) + first;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count * config::kTopK; i += gridDim.x * blockDim.x) {
      u64 slot = inbox_slot(step, step.rank, source, i / config::kTopK);
      u32 k = i % config::kTopK;
      store_weak(ids + i, load_weak(reinterpret_cast<const u32*>(slot) + k));
      store_weak(weights + i, load_weak(reinterpret_cast<const float*>(slot) + config::kTopK + k));
    }
  }

  template <u32 kPayload>
  __device__ static void land_payloads(const Step& step, u32 source, u32 count) {
    if constexpr (kPayload < config::kPayloads) {
      constexpr u32 bytes = config::payload_bytes(kPayload), units = bytes / 16;
      uint4* rows = step.local_region<uint4>(config::payload_offset(kPayload)) +
                    static_cast<u64>(source) * config::kMaxTokens * units;
      for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count * units; i += gridDim.x * blockDim.x) {
        u64 from = inbox_slot(step, step.rank, source, i / units) + slot_payload_offset(kPayload);
        store_weak(rows + i, load_weak(reinterpret_cast<const uint4*>(from) + i % units));
      }
      land_payloads<kPayload + 1>(step, source, count);
    }
  }

  // --- C.send ---------------------------------------------------------------------------------------------------------

  template <class Arguments>
  __device__ static Nothing combine_ahead(const Arguments&, bool) {
    return {};
  }

  template <class Arguments>
  __device__ static void combine_send(const Arguments& a, const Step& step, Nothing, const Shared&) {
    if (!step.alive) return;
    const i32* counts = step.local_region<i32>(local::kCountsOffset);
    StepClock clock = step_clock(step);
    Sender sender(step);
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
    for (u32 r = 0; r < config::kRanks; ++r) {
      u32 count = static_cast<u32>(counts[r]);
      for (u32 first = kRowsAtATime * warp; first < count; first += kRowsAtATime * warps) {
        sender.queue = first / kRowsAtATime % config::kQueues;
        return_rows(a, step, sender, clock, r, first, min(kRowsAtATime, count - first));
      }
    }
    announce(step, Signals::kBack, &step.counters()->combine_arrivals, [](u32) { return 0u; }, clock);
    if (threadIdx.x == 0) clock.finish();
  }

  // One warp: rows [first, first + n) of `source`'s tokens, straight to its inbox or as messages of one posting.
  template <class Arguments>
  __device__ static void return_rows(const Arguments& a, const Step& step, Sender& sender, StepClock& clock, u32 source,
                                     u32 first, u32 n) {
    clock.start();
    const u64 row = static_cast<u64>(source) * config::kMaxTokens + first;
    const u64 landed = step.local + local::kLandedPartialRowsOffset + row * config::kPartialBytes;
    const u64 given = a.partial_rows == 0 ? landed : a.partial_rows + row * config::kPartialBytes;
    const bool near = is_near(step.rank, source);
    const u64 to = near ? combine_slot(step, source, step.rank, first) : landed;
    if (given != to) {
      const uint4* from = reinterpret_cast<const uint4*>(given);
      for (u32 i = threadIdx.x % 32; i < n * (config::kPartialBytes / 16); i += 32) {
        store_weak(reinterpret_cast<uint4*>(to) + i, from[i]);
      }
    }
    clock.note(kSendStage, threadIdx.x == 0);
    if (near) return;
    __syncwarp();
    fence_acq_rel_system();
    clock.note(kSendFence, threadIdx.x == 0);
    u32 i = threadIdx.x % 32;
    u64 at = combine_slot(step, source, step.rank, first + i) - step.arguments->peers[source];
    Message message = {source,
                       config::kPartialBytes,
                       {kHeapHandle, at},
                       {kLocalHandle, local_offset(step, landed) + static_cast<u64>(i) * config::kPartialBytes}};
    Poster::put_by_warp(sender.ring_to(source), message, i < n, sender.waiter);
    clock.note(kSendPost, threadIdx.x == 0);
  }

  // --- C.recv ---------------------------------------------------------------------------------------------------------

  __device__ static bool await_combine(const Step& step) {
    return step.alive && Signals::await_all(step, Signals::kBack, [](u32, u64) {});
  }

  // Ends a step without combine: the signals of combine with zero rows.
  __device__ static void release(const Step& step, const Shared&) {
    StepClock clock = step_clock(step);
    if (step.alive) announce(step, Signals::kBack, &step.counters()->combine_arrivals, [](u32) { return 0u; }, clock);
    await_combine(step);
    complete(step);
  }

  template <class Arguments>
  __device__ static void combine_recv(const Arguments& a, const Step& step, Nothing, const Shared&) {
    if (await_combine(step)) sum_rows(a, step);
    complete(step);
  }

  // Targets ascending, in float32, rounded once: the order never depends on arrival.
  template <class Arguments>
  __device__ static void sum_rows(const Arguments& a, const Step& step) {
    constexpr u32 units = config::kPartialBytes / 16;
    const Route* routes = step.local_region<Route>(local::kRoutesOffset);
    uint4* out = reinterpret_cast<uint4*>(a.output);
    u64 n = static_cast<u64>(step.counters()->tokens) * units;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
      u32 unit = static_cast<u32>(i % units);
      const Route* route = routes + i / units * config::kMaxTargets;
      float sum[Partial::kElements];
#pragma unroll
      for (int e = 0; e < Partial::kElements; ++e) sum[e] = 0.0f;
      for (u32 j = 0; j < config::kMaxTargets && route[j].slot >= 0; ++j) {
        u32 slot = static_cast<u32>(route[j].slot & ~kMoreTargets);
        u64 row = combine_slot(step, step.rank, static_cast<u32>(route[j].target), slot);
        uint4 value = load_weak(reinterpret_cast<const uint4*>(row) + unit);
        if (j == 0) {
          Partial::start(sum, value);
        } else {
          Partial::add(sum, value);
        }
      }
      out[i] = Partial::round(sum);
    }
  }
};

}  // namespace nvep
