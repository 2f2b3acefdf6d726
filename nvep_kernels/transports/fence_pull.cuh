// C.recv's sums: each warp pulls pieces of partial rows from their targets and adds them in a fixed order, by bulk copies
// into a ring of entries in shared memory or, without those, straight into registers.
#pragma once
#include "formats/partial.cuh"
#include "transports/fence_ring.cuh"

namespace nvep {

template <class Partial>
struct FencePull {
  static constexpr u32 kUnits = config::kPartialBytes / 16, kPieceUnits = config::kPullBytes / 16;
  static constexpr u32 kPieces = (kUnits + kPieceUnits - 1) / kPieceUnits;
  static constexpr u32 kLaneUnits = (kPieceUnits + 31) / 32;  // units of a piece that a lane adds

  // The sum of one piece of one output row, 16 bytes a unit. Targets ascending, float32, rounded once: the order never
  // depends on arrival. -0 is the identity of addition, so a single partial row comes through unchanged.
  struct Sum {
    float unit[kLaneUnits][Partial::kElements];

    __device__ void clear(float to) {
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
#pragma unroll
        for (int e = 0; e < Partial::kElements; ++e) unit[i][e] = to;
      }
    }
    __device__ void store(uint4* out, u32 units) const {
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
        if (lane() + 32 * i < units) out[lane() + 32 * i] = Partial::round(unit[i]);
      }
    }
  };

  __device__ static u32 lane() { return threadIdx.x % 32; }
  __device__ static u32 units_of(u32 piece) { return min(kPieceUnits, kUnits - piece * kPieceUnits); }

  // Where the walk of a warp through its pieces is: one target of one piece after the other, the same in all lanes. The
  // route to come is loaded early.
  struct Walk {
    const Route* routes;
    u32 item, end, stride, target;  // item: token * kPieces + piece
    Route ahead;

    __device__ void start(const Step& step, u32 tokens) {
      routes = step.local_region<Route>(local::kRoutesOffset);
      item = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
      stride = gridDim.x * blockDim.x / 32;
      end = tokens * kPieces;
      target = 0;
      look_ahead();
    }
    __device__ bool done() const { return item >= end; }
    __device__ u32 token() const { return item / kPieces; }
    __device__ u32 piece() const { return item % kPieces; }
    __device__ void look_ahead() {
      if (!done()) ahead = routes[static_cast<u64>(token()) * config::kMaxTargets + target];
    }
    // The last target of its token, or the token has none.
    __device__ bool last() const { return ahead.slot < 0 || (ahead.slot & kMoreTargets) == 0; }
    __device__ bool nowhere() const { return ahead.slot < 0; }
    // Address of the piece of the partial row at the target.
    __device__ u64 source(const Step& step) const {
      u64 row = static_cast<u64>(step.rank) * config::kMaxTokens + static_cast<u32>(ahead.slot & (kMoreTargets - 1));
      return step.lane_of(static_cast<u32>(ahead.target)) + heap::kPartialRowsOffset + row * config::kPartialBytes +
             piece() * config::kPullBytes;
    }
    __device__ void advance() {
      if (last()) {
        item += stride;
        target = 0;
      } else {
        ++target;
      }
      look_ahead();
    }
  };

  // --- by bulk copies -------------------------------------------------------------------------------------------------

  // A warp's ring: one target's piece an entry.
  struct Ring {
    BulkBarrier* loaded;
    char* entries;
    u32 size, entry, parity;
    u32 ends, empty;  // bits by entry: the last target of its piece; nothing to add

    __device__ void start() {
      u32 warps = blockDim.x / 32, warp = threadIdx.x / 32;
      size = min(config::kPullEntries / warps, 32u);
      loaded = bulk_barriers() + warp * size;
      entries = bulk_memory() + warp * size * config::kPullBytes;
      entry = parity = ends = empty = 0;
      if (lane() == 0) {
        for (u32 e = 0; e < size; ++e) bulk_init(loaded + e);
        bulk_init_done();
      }
      __syncwarp();
    }
    __device__ void request(const Step& step, Walk& walk, u32 into) {
      if (walk.done()) return;
      const u32 bit = 1u << into;
      ends = walk.last() ? ends | bit : ends & ~bit;
      empty = walk.nowhere() ? empty | bit : empty & ~bit;
      if (lane() == 0) {
        u32 bytes = walk.nowhere() ? 0 : units_of(walk.piece()) * 16;
        bulk_expect(loaded + into, bytes);
        if (bytes != 0) {
          void* to = entries + into * config::kPullBytes;
          bulk_load(to, reinterpret_cast<const void*>(walk.source(step)), bytes, loaded + into);
        }
      }
      walk.advance();
    }
    __device__ void next() {
      if (++entry < size) return;
      entry = 0;
      parity ^= 1u;
    }
  };

  template <class Arguments>
  __device__ static void sum_in_bulk(const Arguments& a, const Step& step, Walk& walk) {
    Ring ring;
    ring.start();
    if (lane() == 0) fence_proxy_async_global();  // peers wrote what is copied
    Walk asked = walk;
    for (u32 e = 0; e < ring.size; ++e) ring.request(step, asked, e);
    uint4* out = reinterpret_cast<uint4*>(a.output);
    for (; !walk.done(); walk.item += walk.stride) {
      const u32 units = units_of(walk.piece());
      Sum sum;
      bool last;
      sum.clear((ring.empty >> ring.entry) & 1u ? 0.0f : -0.0f);
      do {
        bulk_await(ring.loaded + ring.entry, ring.parity);
        last = (ring.ends >> ring.entry) & 1u;
        if (!((ring.empty >> ring.entry) & 1u)) {
          const uint4* from = reinterpret_cast<const uint4*>(ring.entries + ring.entry * config::kPullBytes);
#pragma unroll
          for (u32 i = 0; i < kLaneUnits; ++i) {
            if (lane() + 32 * i < units) Partial::add(sum.unit[i], from[lane() + 32 * i]);
          }
        }
        __syncwarp();  // all lanes have read the entry
        ring.request(step, asked, ring.entry);
        ring.next();
      } while (!last);
      sum.store(out + static_cast<u64>(walk.token()) * kUnits + walk.piece() * kPieceUnits, units);
    }
  }

  // --- by ordinary loads ----------------------------------------------------------------------------------------------

  struct Loaded {
    uint4 unit[kLaneUnits];
  };
  __device__ static void load(const Step& step, const Walk& walk, u32 units, Loaded& to) {
    const uint4* from = reinterpret_cast<const uint4*>(walk.source(step));
#pragma unroll
    for (u32 i = 0; i < kLaneUnits; ++i) {
      if (lane() + 32 * i < units) to.unit[i] = load_weak(from + lane() + 32 * i);
    }
  }

  // The next target's units are under way while one's are added.
  template <class Arguments>
  __device__ static void sum_directly(const Arguments& a, const Step& step, Walk& walk) {
    uint4* out = reinterpret_cast<uint4*>(a.output);
    while (!walk.done()) {
      const u32 units = units_of(walk.piece());
      uint4* row = out + static_cast<u64>(walk.token()) * kUnits + walk.piece() * kPieceUnits;
      Sum sum;
      sum.clear(walk.nowhere() ? 0.0f : -0.0f);
      Loaded next;
      bool more = !walk.nowhere();
      if (more) load(step, walk, units, next);
      if (!more) walk.advance();
      while (more) {
        const Loaded now = next;
        more = !walk.last();
        walk.advance();
        if (more) load(step, walk, units, next);
#pragma unroll
        for (u32 i = 0; i < kLaneUnits; ++i) {
          if (lane() + 32 * i < units) Partial::add(sum.unit[i], now.unit[i]);
        }
      }
      sum.store(row, units);
    }
  }
};

}  // namespace nvep
