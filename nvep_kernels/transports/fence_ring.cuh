// D.send's payload rows by bulk copies: each row is read once, into a ring of stages in shared memory, and stored from
// there to all its targets. One thread moves a ring; loads run ahead of the routing, which they do not need.
#pragma once
#include "primitives/bulk.cuh"
#include "primitives/shared.cuh"
#include "transports/fence_slots.cuh"

namespace nvep {

constexpr bool kBulk = kHasBulk && config::kBulk;

// Dynamic shared memory: barriers, then stages.
__device__ inline BulkBarrier* bulk_barriers() {
  NVEP_DYNAMIC_SHARED(memory);
  return reinterpret_cast<BulkBarrier*>(memory);
}
__device__ inline char* bulk_memory() {
  NVEP_DYNAMIC_SHARED(memory);
  return memory + config::kBulkBarrierBytes;
}

// A token's payloads, concatenated, are cut into portions of kSendBytes; one fills a stage. Lane 0 of a warp moves them.
struct SendRing {
  static constexpr u32 kPortions = (config::kTokenBytes + config::kSendBytes - 1) / config::kSendBytes;
  static constexpr u32 kStages = config::kSendStages;
  static constexpr u32 kLag = kStages / 3;  // groups of stores that may still read their stages
  static_assert(kStages <= 32, "one lane starts one stage");

  BulkBarrier* loaded;
  char* stages;
  u32 first_token, first, count, stride;  // this ring's portions of the block: first, first + stride, ...
  u32 sent, stage, parity;

  // Ring `index` of `rings` in the block, which sends `tokens` tokens from `token` on. The whole warp starts loading.
  template <class Arguments>
  __device__ void start(const Arguments& a, u32 index, u32 rings, u32 token, u32 tokens) {
    loaded = bulk_barriers() + index * kStages;
    stages = bulk_memory() + index * kStages * config::kSendBytes;
    first_token = token;
    first = index;
    stride = rings;
    count = (tokens * kPortions + rings - 1 - index) / rings;
    sent = stage = parity = 0;
    const u32 lane = threadIdx.x % 32;
    if (lane < kStages) {
      bulk_init(loaded + lane);
      bulk_init_done();
      load(a, lane, lane);
    }
    __syncwarp();  // lane 0 knows the barriers
  }

  // Portions of tokens below `end`, whose routes are in the tile that starts at `tile_first`.
  template <class Arguments>
  __device__ void send(const Arguments& a, const Step& step, const SlotTile& tile, u32 tile_first, u32 end) {
    for (; sent < count; ++sent) {
      const u32 at = first + sent * stride, token = first_token + at / kPortions, part = at % kPortions;
      if (token >= end) return;
      bulk_await(loaded + stage, parity);
      const Route* routes = tile.routes[token - tile_first];
      for (u32 j = 0; j < config::kMaxTargets && routes[j].target >= 0; ++j) {
        const u64 lane = step.lane_of(static_cast<u32>(routes[j].target));
        const u64 row = static_cast<u64>(step.rank) * config::kMaxTokens + static_cast<u32>(routes[j].slot);
        for_payloads(part, [&](u32 p, u32 offset, u32 in_stage, u32 bytes) {
          u64 to = lane + config::payload_offset(p) + row * config::payload_bytes(p) + offset;
          bulk_store(reinterpret_cast<void*>(to), stages + stage * config::kSendBytes + in_stage, bytes);
        });
      }
      bulk_commit();
      if (sent >= kLag) {
        bulk_wait_read<kLag>();
        load(a, sent - kLag + kStages, stage >= kLag ? stage - kLag : stage + kStages - kLag);
      }
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1u;
      }
    }
  }

  // What was stored is performed.
  __device__ void finish() { bulk_wait<0>(); }

  // Nothing will be sent: the loads under way end.
  __device__ void abandon() {
    for (u32 s = 0; s < min(count, kStages); ++s) bulk_await(loaded + s, 0);
  }

  template <class Arguments>
  __device__ void load(const Arguments& a, u32 number, u32 into) {
    if (number >= count) return;
    const u32 at = first + number * stride, token = first_token + at / kPortions, part = at % kPortions;
    bulk_expect(loaded + into, min(config::kSendBytes, config::kTokenBytes - part * config::kSendBytes));
    for_payloads(part, [&](u32 p, u32 offset, u32 in_stage, u32 bytes) {
      u64 from = a.payloads[p] + static_cast<u64>(token) * config::payload_bytes(p) + offset;
      bulk_load(stages + into * config::kSendBytes + in_stage, reinterpret_cast<const void*>(from), bytes,
                loaded + into);
    });
  }

  // `visit(payload, offset in its row, offset in the stage, bytes)` for what a portion holds of each payload.
  template <class Visit>
  __device__ static void for_payloads(u32 part, Visit visit) {
    const u32 from = part * config::kSendBytes, to = min(from + config::kSendBytes, config::kTokenBytes);
    u32 start = 0;
#pragma unroll
    for (u32 p = 0; p < config::kPayloads; ++p) {
      u32 end = start + config::payload_bytes(p), low = max(from, start), high = min(to, end);
      if (low < high) visit(p, low - start, low - from, high - low);
      start = end;
    }
  }
};

}  // namespace nvep
