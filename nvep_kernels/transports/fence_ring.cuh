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

// A token's payloads, concatenated, are cut into portions of kSendBytes; one fills a stage.
struct SendRing {
  static constexpr u32 kPortions = (config::kTokenBytes + config::kSendBytes - 1) / config::kSendBytes;
  static constexpr u32 kStages = config::kSendStages;
  static constexpr u32 kLag = kStages / 3;  // groups of stores that may still read their stages

  BulkBarrier* loaded;
  char* stages;
  u32 first_token, first, count, stride;  // this ring's portions of the block: first, first + stride, ...
  u32 requested, sent, stage, parity;

  // `index` of `rings` in the block, which sends `tokens` tokens from `first_token`. Starts loading.
  template <class Arguments>
  __device__ void start(const Arguments& a, u32 index, u32 rings, u32 token, u32 tokens) {
    loaded = bulk_barriers() + index * kStages;
    stages = bulk_memory() + index * kStages * config::kSendBytes;
    first_token = token;
    first = index;
    stride = rings;
    count = (tokens * kPortions + rings - 1 - index) / rings;
    requested = sent = stage = parity = 0;
    for (u32 s = 0; s < kStages; ++s) bulk_init(loaded + s);
    bulk_init_done();
    for (u32 s = 0; s < kStages; ++s) request(a, s);
  }

  // Portions of tokens below `end`, whose routes are in the tile that starts at `tile_first`.
  template <class Arguments>
  __device__ void send(const Arguments& a, const Step& step, const SlotTile& tile, u32 tile_first, u32 end) {
    for (; sent < count; ++sent) {
      u32 token = first_token + portion(sent) / kPortions, part = portion(sent) % kPortions;
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
        request(a, stage >= kLag ? stage - kLag : stage + kStages - kLag);
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
    for (u32 s = 0; s < min(requested, kStages); ++s) bulk_await(loaded + s, 0);
  }

  __device__ u32 portion(u32 number) const { return first + number * stride; }

  template <class Arguments>
  __device__ void request(const Arguments& a, u32 into) {
    if (requested >= count) return;
    u32 token = first_token + portion(requested) / kPortions, part = portion(requested) % kPortions;
    ++requested;
    u32 start = part * config::kSendBytes;
    bulk_expect(loaded + into, min(config::kSendBytes, config::kTokenBytes - start));
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
