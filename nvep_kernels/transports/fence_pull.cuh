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

  __device__ static u32 lane() { return threadIdx.x % 32; }

  // A piece of an output row, among those that a warp sums. Every `stride`-th is its own.
  struct Place {
    u32 token, piece;

    __device__ void advance(u32 stride) {
      token += stride / kPieces;
      piece += stride % kPieces;
      if (piece < kPieces) return;
      piece -= kPieces;
      ++token;
    }
    __device__ u32 units() const {
      return kUnits % kPieceUnits == 0 ? kPieceUnits : min(kPieceUnits, kUnits - piece * kPieceUnits);
    }
    __device__ uint4* in(u64 rows) const {
      return reinterpret_cast<uint4*>(rows) + static_cast<u64>(token) * kUnits + piece * kPieceUnits + lane();
    }
  };

  // The sum of a piece: targets ascending, in float32, rounded once, so that the order never depends on arrival. -0 is
  // the identity of addition: a single partial row comes through unchanged.
  struct Sum {
    float unit[kLaneUnits][Partial::kElements];

    __device__ void clear() {
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
#pragma unroll
        for (int e = 0; e < Partial::kElements; ++e) unit[i][e] = 0.0f;
      }
    }
    // `at(i)` is unit lane + 32 i.
    template <class At>
    __device__ void start(u32 units, At at) {
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
        if (lane() + 32 * i < units) Partial::start(unit[i], at(i));
      }
    }
    template <class At>
    __device__ void add(u32 units, At at) {
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
        if (lane() + 32 * i < units) Partial::add(unit[i], at(i));
      }
    }
    __device__ void store(u32 units, uint4* out) const {
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
        if (lane() + 32 * i < units) out[32 * i] = Partial::round(unit[i]);
      }
    }
  };

  // A warp's way through its pieces, one target of a piece after the other, the same in all lanes. The route to come is
  // loaded early.
  struct Walk {
    const Route* routes;
    u64 rows;  // this rank's partial rows, from the start of a peer's slice
    u32 tokens, stride, target;
    Place place;
    Route route;

    template <class Arguments>
    __device__ void start(const Arguments& a) {
      routes = reinterpret_cast<const Route*>(a.local + local::kRoutesOffset);
      rows = a.lane * heap::kLaneBytes + heap::kPartialRowsOffset +
             static_cast<u64>(a.rank) * config::kMaxTokens * config::kPartialBytes;
      tokens = reinterpret_cast<const Counters*>(a.local + local::kCountersOffset)->tokens;
      stride = gridDim.x * blockDim.x / 32;
      target = 0;
      place = {0, 0};
      place.advance((blockIdx.x * blockDim.x + threadIdx.x) / 32);
      look();
    }
    __device__ bool done() const { return place.token >= tokens; }
    __device__ void look() {
      if (!done()) route = routes[place.token * config::kMaxTargets + target];
    }
    __device__ bool nowhere() const { return route.slot < 0; }  // a token without targets
    __device__ bool last() const { return (route.slot & kMoreTargets) == 0 || nowhere(); }
    __device__ u64 source(const Step& step) const {
      return step.arguments->peers[route.target] + rows +
             static_cast<u64>(static_cast<u32>(route.slot & ~kMoreTargets)) * config::kPartialBytes +
             place.piece * config::kPullBytes;
    }
    __device__ void advance() {
      ++target;
      if (last()) {
        place.advance(stride);
        target = 0;
      }
      look();
    }
  };

  // --- by bulk copies -------------------------------------------------------------------------------------------------

  // A warp's ring: one target's piece an entry.
  struct Ring {
    static constexpr u32 kLast = 1, kNowhere = 2;  // of an entry

    BulkBarrier* loaded;
    char* entries;
    u32 size, entry, parity;
    u32 states;  // two bits each, of the entry that is summed next and of those behind it

    __device__ void start() {
      u32 warps = blockDim.x / 32, warp = threadIdx.x / 32;
      size = min(config::kPullEntries / warps, 16u);
      loaded = bulk_barriers() + warp * size;
      entries = bulk_memory() + warp * size * config::kPullBytes;
      entry = parity = states = 0;
      if (lane() < size) bulk_init(loaded + lane());
      bulk_init_done();
      __syncwarp();
    }
    // What the walk comes to next, into an entry; what the entry is then.
    __device__ u32 request(const Step& step, Walk& walk, u32 into) {
      if (walk.done()) return 0;
      const u32 state = (walk.last() ? kLast : 0) | (walk.nowhere() ? kNowhere : 0);
      if (lane() == 0) {
        u32 bytes = walk.nowhere() ? 0 : walk.place.units() * 16;
        bulk_expect(loaded + into, bytes);
        if (bytes != 0) {
          void* to = entries + into * config::kPullBytes;
          bulk_load(to, reinterpret_cast<const void*>(walk.source(step)), bytes, loaded + into);
        }
      }
      walk.advance();
      return state;
    }
    // Refills the entry that was read, and goes on to the next.
    __device__ void refill(const Step& step, Walk& walk) {
      __syncwarp();  // all lanes have read it
      states = states >> 2 | request(step, walk, entry) << (2 * size - 2);
      if (++entry < size) return;
      entry = 0;
      parity ^= 1u;
    }
    __device__ const uint4* await() const {
      bulk_await(loaded + entry, parity);
      return reinterpret_cast<const uint4*>(entries + entry * config::kPullBytes) + lane();
    }
  };

  template <class Arguments>
  __device__ static void sum_in_bulk(const Arguments& a, const Step& step, Ring& ring, Walk& walk) {
    if (lane() == 0) fence_proxy_async_global();  // peers wrote what is copied
    Place place = walk.place;
    for (u32 e = 0; e < ring.size; ++e) ring.states |= ring.request(step, walk, e) << (2 * e);
    for (; place.token < walk.tokens; place.advance(walk.stride)) {
      const u32 units = place.units();
      Sum sum;
      const uint4* from = ring.await();
      if (ring.states & Ring::kNowhere) {
        sum.clear();
      } else {
        sum.start(units, [&](u32 i) { return from[32 * i]; });
      }
      while (!(ring.states & Ring::kLast)) {
        ring.refill(step, walk);
        from = ring.await();
        sum.add(units, [&](u32 i) { return from[32 * i]; });
      }
      ring.refill(step, walk);
      sum.store(units, place.in(a.output));
    }
  }

  // --- by ordinary loads ----------------------------------------------------------------------------------------------

  struct Loaded {
    uint4 unit[kLaneUnits];

    __device__ void load(const Step& step, const Walk& walk, u32 units) {
      const uint4* from = reinterpret_cast<const uint4*>(walk.source(step)) + lane();
#pragma unroll
      for (u32 i = 0; i < kLaneUnits; ++i) {
        if (lane() + 32 * i < units) unit[i] = load_weak(from + 32 * i);
      }
    }
  };

  // The next target's units are under way while one's are added.
  template <class Arguments>
  __device__ static void sum_directly(const Arguments& a, const Step& step, Walk& walk) {
    while (!walk.done()) {
      const Place place = walk.place;
      const u32 units = place.units();
      Sum sum;
      Loaded now, next;
      bool more = !walk.last();
      if (walk.nowhere()) {
        sum.clear();
        walk.advance();
      } else {
        now.load(step, walk, units);
        walk.advance();
        if (more) next.load(step, walk, units);
        sum.start(units, [&](u32 i) { return now.unit[i]; });
      }
      while (more) {
        now = next;
        more = !walk.last();
        walk.advance();
        if (more) next.load(step, walk, units);
        sum.add(units, [&](u32 i) { return now.unit[i]; });
      }
      sum.store(units, place.in(a.output));
    }
  }
};

}  // namespace nvep
