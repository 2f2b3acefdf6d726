// Peer load/store under Fence. Dispatch pushes rows and headers into the targets' rank-major buffers; combine exposes
// partial rows, and the source pulls and sums them. The four phases are device functions, used by split and joined
// kernels alike.
#pragma once
#include "formats/partial.cuh"
#include "protocols/fence.cuh"
#include "transports/nvlink.cuh"

namespace nvep {

struct NvlinkFenceShared : NvlinkShared {
  SlotTile tile;
};

template <class Partial>
struct NvlinkFence : NvlinkStep {
  using Protocol = Fence;
  using Shared = NvlinkFenceShared;

  // --- D.send ---------------------------------------------------------------------------------------------------------

  template <class Arguments>
  __device__ static void dispatch_send(const Arguments& a, const Step& step, Shared& shared) {
    if (!step.alive) return;
    u32 tokens = token_count(a);
    u32 first = static_cast<u32>(static_cast<u64>(tokens) * blockIdx.x / gridDim.x);
    u32 end = static_cast<u32>(static_cast<u64>(tokens) * (blockIdx.x + 1) / gridDim.x);
    bool totals = blockIdx.x == gridDim.x - 1;  // the last range ends with the counts of the whole step
    if (first < end || totals) count_before(a, first, step.active, shared.tile);
    for (u32 at = first; at < end; at += kTileTokens) {
      u32 n = min(kTileTokens, end - at);
      assign_tile(a, step, at, n, shared.tile);
      __syncthreads();
      push_headers(a, step, at, n, shared);
      push_payloads<0>(a, step, at, n, shared);
      __syncthreads();
    }
    u32* sent = step.local_region<u32>(local::kSendCountsOffset);
    if (totals) {
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x)
        store_relaxed_device(sent + r, shared.tile.count[r]);
    }
    bool announced = Protocol::announce(
        &step.counters()->send_arrivals, step.active,
        [&](u32 r) { return make_record(step.epoch, load_relaxed_device(sent + r), Protocol::kCode); },
        [&](u32 r) { return dispatch_record(step.lane_of(r), step.rank, step.epoch); });
    if (announced) close_dispatch_send(a, step, tokens);
  }

  template <class Arguments>
  __device__ static void push_headers(const Arguments& a, const Step& step, u32 first, u32 n, const Shared& shared) {
    constexpr u32 per_token = config::kMaxTargets * config::kTopK;
    for (u32 i = threadIdx.x; i < n * per_token; i += blockDim.x) {
      u32 token = i / per_token, j = i % per_token / config::kTopK, k = i % config::kTopK;
      Route route = shared.tile.routes[token][j];
      if (route.target < 0) continue;
      u64 entry = (static_cast<u64>(step.rank) * config::kMaxTokens + static_cast<u32>(route.slot)) * config::kTopK + k;
      u64 lane = step.lane_of(route.target);
      store_weak(reinterpret_cast<u32*>(lane + heap::kExpertIdsOffset) + entry,
                 static_cast<u32>(shared.tile.ids[token].id[k]));
      store_weak(reinterpret_cast<float*>(lane + heap::kExpertWeightsOffset) + entry,
                 a.expert_weights[(first + token) * config::kTopK + k]);
    }
  }

  // Each 16-byte unit is read once and stored to every target of its token.
  template <u32 kPayload, class Arguments>
  __device__ static void push_payloads(const Arguments& a, const Step& step, u32 first, u32 n, const Shared& shared) {
    if constexpr (kPayload < config::kPayloads) {
      constexpr u32 bytes = config::payload_bytes(kPayload), units = bytes / 16;
      const uint4* rows = reinterpret_cast<const uint4*>(a.payloads[kPayload]) + static_cast<u64>(first) * units;
      const u64 base = config::payload_offset(kPayload) + static_cast<u64>(step.rank) * config::kMaxTokens * bytes;
      for (u32 i = threadIdx.x; i < n * units; i += blockDim.x) {
        u32 token = i / units, unit = i % units;
        const Route* routes = shared.tile.routes[token];
        if (routes[0].target < 0) continue;
        uint4 value = rows[i];
        for (u32 j = 0; j < config::kMaxTargets && routes[j].target >= 0; ++j) {
          u64 row = step.lane_of(routes[j].target) + base + static_cast<u64>(routes[j].slot) * bytes;
          store_weak(reinterpret_cast<uint4*>(row) + unit, value);
        }
      }
      push_payloads<kPayload + 1>(a, step, first, n, shared);
    }
  }

  // --- D.recv ---------------------------------------------------------------------------------------------------------

  __device__ static void dispatch_recv(const Step& step, Shared& shared) {
    for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) shared.count[r] = 0;
    __syncthreads();
    bool alive = step.alive && await_records<Protocol>(
                                   step, [&](u32 r) { return dispatch_record(step.lane_of(step.rank), r, step.epoch); },
                                   [&](u32 r, u64 word) {
                                     shared.count[r] = min(record_count(word), static_cast<u32>(config::kMaxTokens));
                                   });
    if (!alive) {  // outputs are undefined; ids are valid or invalid, never out of range
      __syncthreads();
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) shared.count[r] = 0;
      __syncthreads();
    }
    fill_invalid(step.lane_of(step.rank) + heap::kExpertIdsOffset, shared);
    if (blockIdx.x == 0) {
      i32* counts = step.local_region<i32>(local::kCountsOffset);
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) counts[r] = static_cast<i32>(shared.count[r]);
    }
  }

  // --- C.send ---------------------------------------------------------------------------------------------------------

  template <class Arguments>
  __device__ static void combine_send(const Arguments& a, const Step& step, Shared& shared) {
    if (!step.alive) return;
    const u64 exposed = step.lane_of(step.rank) + heap::kPartialRowsOffset;
    if (a.partial_rows != 0 && a.partial_rows != exposed) copy_partial_rows(a.partial_rows, exposed, step);
    announce_combine(step, shared);
  }

  __device__ static void announce_combine(const Step& step, const Shared& shared) {
    Protocol::announce(
        &step.counters()->combine_arrivals, step.active,
        [&](u32) { return make_record(step.epoch, 0, Protocol::kCode); },
        [&](u32 r) { return combine_record(step.lane_of(r), step.rank); });
  }

  __device__ static u64* combine_record(u64 lane, u32 source) {
    return reinterpret_cast<u64*>(lane + heap::kCombineRecordOffset) + source;
  }

  __device__ static void copy_partial_rows(u64 from, u64 to, const Step& step) {
    constexpr u64 units = config::kPartialBytes / 16;
    const i32* counts = step.local_region<i32>(local::kCountsOffset);
    u32 stride = gridDim.x * blockDim.x;
    for (u32 r = 0; r < config::kRanks; ++r) {
      u64 start = static_cast<u64>(r) * config::kMaxTokens * units;
      const uint4* source = reinterpret_cast<const uint4*>(from) + start;
      uint4* target = reinterpret_cast<uint4*>(to) + start;
      u64 n = static_cast<u64>(counts[r]) * units;
      for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) store_weak(target + i, source[i]);
    }
  }

  // --- C.recv ---------------------------------------------------------------------------------------------------------

  __device__ static bool await_combine(const Step& step, const Shared& shared) {
    return step.alive && await_records<Protocol>(
                             step, [&](u32 r) { return combine_record(step.lane_of(step.rank), r); }, [](u32, u64) {});
  }

  // Ends a step without combine: the records of combine with zero rows.
  __device__ static void release(const Step& step, const Shared& shared) {
    if (step.alive) announce_combine(step, shared);
    await_combine(step, shared);
    complete(step);
  }

  template <class Arguments>
  __device__ static void combine_recv(const Arguments& a, const Step& step, const Shared& shared) {
    if (await_combine(step, shared)) pull_and_sum(a, step, shared);
    complete(step);
  }

  // Sum over targets ascending, in float32, rounded once: the order never depends on arrival. -0 is the identity of
  // addition, so a single partial row comes through unchanged.
  template <class Arguments>
  __device__ static void pull_and_sum(const Arguments& a, const Step& step, const Shared& shared) {
    constexpr u32 units = config::kPartialBytes / 16;
    const Route* routes = step.local_region<Route>(local::kRoutesOffset);
    const u64 base =
        heap::kPartialRowsOffset + static_cast<u64>(step.rank) * config::kMaxTokens * config::kPartialBytes;
    uint4* out = reinterpret_cast<uint4*>(a.output);
    u64 n = static_cast<u64>(step.counters()->tokens) * units;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
      u32 token = static_cast<u32>(i / units), unit = static_cast<u32>(i % units);
      const Route* route = routes + static_cast<u64>(token) * config::kMaxTargets;
      float sum[Partial::kElements];
#pragma unroll
      for (int e = 0; e < Partial::kElements; ++e) sum[e] = route[0].target < 0 ? 0.0f : -0.0f;
#pragma unroll
      for (u32 j = 0; j < config::kMaxTargets; ++j) {
        if (route[j].target < 0) break;
        u64 row = step.lane_of(route[j].target) + base + static_cast<u64>(route[j].slot) * config::kPartialBytes;
        Partial::add(sum, load_weak(reinterpret_cast<const uint4*>(row) + unit));
      }
      out[i] = Partial::round(sum);
    }
  }
};

}  // namespace nvep
