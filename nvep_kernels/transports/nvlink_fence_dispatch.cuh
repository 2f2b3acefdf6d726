// Dispatch over peer load/store under Fence: rows and headers are pushed into the targets' rank-major buffers.
#pragma once
#include "protocols/fence.cuh"
#include "transports/fence_ring.cuh"
#include "transports/nvlink.cuh"

namespace nvep {

struct NvlinkFenceShared : NvlinkShared {
  u32 sent[config::kRanks];  // rows before the tile that is assigned next, by target
  SlotTile tile[2];
};

struct NvlinkFenceDispatch : NvlinkStep {
  using Protocol = Fence;
  using Shared = NvlinkFenceShared;

  // --- D.send ---------------------------------------------------------------------------------------------------------

  // Who does what in a block: the last warps move rows in bulk, one thread each; the others route and send headers. A
  // small block has warps that do both.
  struct Roles {
    u32 rings, helpers;  // warps
    bool moves;          // this warp
    u32 ring;

    __device__ Roles() {
      u32 warps = blockDim.x / 32, warp = threadIdx.x / 32;
      rings = kBulk ? min(config::kSendRings, warps) : 0;
      helpers = warps > rings ? warps - rings : warps;
      moves = warp + rings >= warps;
      ring = warp + rings - warps;
    }
    __device__ bool leads() const { return moves && threadIdx.x % 32 == 0; }
  };

  // This block's tokens. Before the step is known their rows are on their way, those of earlier tokens are counted, and
  // warp 0 has the ids of the first tile.
  struct Sending {
    u32 tokens, first, end;
    Roles roles;
    SendRing ring;
    TokenIds ids;
    RowCounts before;

    // The last range ends with the counts of the whole step.
    __device__ static bool totals() { return blockIdx.x == gridDim.x - 1; }
    __device__ bool routes() const { return first < end || totals(); }
  };
  template <class Arguments>
  __device__ static Sending dispatch_ahead(const Arguments& a) {
    Sending block;
    block.tokens = token_count(a);
    block.first = static_cast<u32>(static_cast<u64>(block.tokens) * blockIdx.x / gridDim.x);
    block.end = static_cast<u32>(static_cast<u64>(block.tokens) * (blockIdx.x + 1) / gridDim.x);
    if constexpr (kBulk) {
      const Roles& roles = block.roles;
      if (roles.moves) block.ring.start(a, roles.ring, roles.rings, block.first, block.end - block.first);
    }
    block.ids = ids_of_tile(a, block.first, block.end);
    if (block.routes()) block.before.count(a, block.first);
    return block;
  }

  template <class Arguments>
  __device__ static void dispatch_send(const Arguments& a, const Step& step, Sending& block, Shared& shared) {
    if (!step.alive) {
      if constexpr (kBulk) {
        if (block.roles.leads()) block.ring.abandon();
      }
      return;
    }
    if (block.routes()) {
      block.before.add_up(shared.sent);
      send_tiles(a, step, block, shared);
    }
    u32* sent = step.local_region<u32>(local::kSendCountsOffset);
    if (block.totals()) {
      for (u32 r = threadIdx.x; r < config::kRanks; r += blockDim.x) store_relaxed_device(sent + r, shared.sent[r]);
    }
    bool announced = Protocol::announce_blocks(
        &step.counters()->send_arrivals, step.active,
        [&](u32 r) { return make_record(step.epoch, load_relaxed_device(sent + r), Protocol::kCode); },
        [&](u32 r) { return dispatch_record(step.lane_of(r), step.rank, step.epoch); });
    if (announced) close_dispatch_send(a, step, block.tokens);
  }

  template <class Arguments>
  __device__ static TokenIds ids_of_tile(const Arguments& a, u32 first, u32 end) {
    const u32 token = first + threadIdx.x;
    return threadIdx.x < kTileTokens && token < end ? given_ids(a, token) : TokenIds{};
  }

  // While rows of one tile are on their way, the next one is routed.
  template <class Arguments>
  __device__ static void send_tiles(const Arguments& a, const Step& step, Sending& block, Shared& shared) {
    const u32 first = block.first, end = block.end, helpers = 32 * block.roles.helpers;
    const bool routes = threadIdx.x < 32;
    u32 now = 0;
    if (routes && first < end) {
      assign_tile(a, step, block.ids, first, min(kTileTokens, end - first), shared.sent, shared.tile[0]);
    }
    __syncthreads();
    for (u32 at = first; at < end; at += kTileTokens) {
      const u32 next = at + kTileTokens, n = min(kTileTokens, end - at);
      const SlotTile& tile = shared.tile[now];
      now ^= 1u;
      if (routes && next < end) {
        const TokenIds ids = ids_of_tile(a, next, end);
        assign_tile(a, step, ids, next, min(kTileTokens, end - next), shared.sent, shared.tile[now]);
      }
      if (threadIdx.x < helpers) push_headers(a, step, at, n, tile, helpers);
      if constexpr (kBulk) {
        if (block.roles.leads()) block.ring.send(a, step, tile, at, at + n);
      } else {
        push_payloads<0>(a, step, at, n, tile);
      }
      __syncthreads();
    }
    if constexpr (kBulk) {
      if (block.roles.leads()) block.ring.finish();
    }
  }

  template <class Arguments>
  __device__ static void push_headers(const Arguments& a, const Step& step, u32 first, u32 n, const SlotTile& tile,
                                      u32 threads) {
    constexpr u32 per_token = config::kMaxTargets * config::kTopK;
    for (u32 i = threadIdx.x; i < n * per_token; i += threads) {
      u32 token = i / per_token, j = i % per_token / config::kTopK, k = i % config::kTopK;
      Route route = tile.routes[token][j];
      if (route.target < 0) continue;
      u64 entry = (static_cast<u64>(step.rank) * config::kMaxTokens + static_cast<u32>(route.slot)) * config::kTopK + k;
      u64 lane = step.lane_of(static_cast<u32>(route.target));
      store_weak(reinterpret_cast<u32*>(lane + heap::kExpertIdsOffset) + entry,
                 static_cast<u32>(tile.ids[token].id[k]));
      store_weak(reinterpret_cast<float*>(lane + heap::kExpertWeightsOffset) + entry,
                 a.expert_weights[(first + token) * config::kTopK + k]);
    }
  }

  // Without bulk copies: each 16-byte unit is read once and stored to every target of its token.
  template <u32 kPayload, class Arguments>
  __device__ static void push_payloads(const Arguments& a, const Step& step, u32 first, u32 n, const SlotTile& tile) {
    if constexpr (kPayload < config::kPayloads) {
      constexpr u32 bytes = config::payload_bytes(kPayload), units = bytes / 16, batch = 4;
      const uint4* rows = reinterpret_cast<const uint4*>(a.payloads[kPayload]) + static_cast<u64>(first) * units;
      const u64 base = config::payload_offset(kPayload) + static_cast<u64>(step.rank) * config::kMaxTokens * bytes;
      for (u32 start = threadIdx.x; start < n * units; start += batch * blockDim.x) {
        uint4 value[batch];
#pragma unroll
        for (u32 b = 0; b < batch; ++b) {
          u32 i = start + b * blockDim.x;
          if (i < n * units) value[b] = rows[i];
        }
#pragma unroll
        for (u32 b = 0; b < batch; ++b) {
          u32 i = start + b * blockDim.x, token = i / units, unit = i % units;
          if (i >= n * units) break;
          const Route* routes = tile.routes[token];
          for (u32 j = 0; j < config::kMaxTargets && routes[j].target >= 0; ++j) {
            u64 row =
                step.lane_of(static_cast<u32>(routes[j].target)) + base + static_cast<u64>(routes[j].slot) * bytes;
            store_weak(reinterpret_cast<uint4*>(row) + unit, value[b]);
          }
        }
      }
      push_payloads<kPayload + 1>(a, step, first, n, tile);
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
};

}  // namespace nvep
