// The soft NIC: a few blocks that stay on the GPU and execute rings of all local ranks. Emulated, and said to be so.
//
// Ring r belongs to block r mod blocks. In a block the lanes of the first warp watch its rings, without barriers, until
// one finds work; then the block takes a batch of each ring found. Everything a ring needs between batches, and between
// launches, is in its EngineRing, so the engine may leave at any such point and be launched again.
#pragma once
#include "nic/batch.cuh"

namespace nvep {

struct EngineShared {
  u32 news;  // bit 0: a lane found work, bit 1: time to leave
  u32 found;
  u32 leaving;
  u32 ring[32];
  Batch batch;
};

constexpr u32 kNoRing = 0xffffffffu;
constexpr u32 kControlPeriod = 16;  // sweeps between looks at the host's words

struct EngineView {
  const SoftNicArguments& a;

  __device__ EngineRing& ring(u32 r) const { return reinterpret_cast<EngineRing*>(a.rings)[r]; }
  __device__ Control* control() const { return reinterpret_cast<Control*>(a.control); }
  __device__ EngineState* state() const { return reinterpret_cast<EngineState*>(a.state); }
};

// Which launch, and what it is about to do: the host tells a launch that has not begun from one that leaves.
__device__ inline u64 engine_state(const SoftNicArguments& a, u64 phase) {
  return static_cast<u64>(a.launch) << 2 | phase;
}

// Is there something to take?
__device__ inline bool has_arrived(const SoftNicArguments& a, EngineRing& engine, const Ring& ring) {
  if (a.capacity - static_cast<u32>(engine.tail - engine.head) < 2 * kBatch) return false;
  if (ring.kind == ring::kKindSendQueue) {
    ring::Doorbell bell = {{load_relaxed_system(reinterpret_cast<const u64*>(ring.doorbell))}};
    u32 rung = (bell.index() - static_cast<u32>(engine.available)) & 0xffffu;
    if (rung != 0 && rung <= ring.depth) {
      fence_acq_rel_system();  // entries below the index, and their sources, are visible
      engine.available += rung;
      ++engine.doorbells;
    }
    return engine.next < engine.available;
  }
  u64 first = load_relaxed_system(reinterpret_cast<const u64*>(slot_address(ring, engine.next)));
  return ((first ^ owner_bit(ring, engine.next)) & 1ull) == 0;
}

// Block 0 decides for all when to leave: told to by the host, or when nothing happened for long. A wake-up that comes
// while it leaves is not lost: both sides store, fence, and look at the other's word.
struct Idleness {
  u64 activity = 0, wake = 0, since = 0;
  u32 sweeps = 0;

  __device__ void look(const EngineView& view) {
    if (++sweeps % kControlPeriod != 0) return;
    Control* control = view.control();
    EngineState* state = view.state();
    u64 now = global_timer_ns(), seen = load_relaxed_device(&state->activity);
    u64 called = load_relaxed_system(&control->wake);
    if (since == 0 || seen != activity || called != wake) since = now;
    activity = seen;
    wake = called;
    bool told = load_relaxed_system(&control->stop) != 0;
    if (!told && now - since <= view.a.idle_ns) return;
    store_relaxed_system(&control->state, engine_state(view.a, kStateLeaving));
    fence_sc_system();
    if (!told && load_relaxed_system(&control->wake) != wake) {
      store_relaxed_system(&control->state, engine_state(view.a, kStateRunning));
      return;
    }
    store_relaxed_device(&state->ended, static_cast<u64>(view.a.launch));
  }
};

// A lane of the first warp: applies what is due on its rings, and looks for new work. Ends when any lane found some.
__device__ inline u32 watch(const EngineView& view, EngineShared& shared, u32& cursor, Idleness& idleness) {
  u32 lane = threadIdx.x % 32, stride = gridDim.x * 32, count = view.a.ring_count;
  u32 begin = blockIdx.x + lane * gridDim.x, mine = begin < count ? (count - begin + stride - 1) / stride : 0;
  for (;;) {
    u32 found = kNoRing;
    bool waiting = false;
    for (u32 i = 0; i < mine && found == kNoRing; ++i, ++cursor) {
      u32 r = begin + cursor % mine * stride;
      EngineRing& engine = view.ring(r);
      if (engine.ring == 0) continue;  // its rank has left
      const Ring& ring = *reinterpret_cast<const Ring*>(engine.ring);
      waiting |= drain(view.a, engine, ring);
      if (has_arrived(view.a, engine, ring)) found = r;
    }
    if (found != kNoRing) fetch_add_relaxed_device(&view.state()->activity, 1ull);
    if (blockIdx.x == 0 && lane == 0) idleness.look(view);
    if (found != kNoRing) atomicOr(&shared.news, 1u);
    bool ended = load_relaxed_device(&view.state()->ended) == view.a.launch;
    if (ended && !waiting) atomicOr(&shared.news, 2u);
    if (atomicOr(&shared.news, 0u) != 0 && (!ended || !waiting)) return found;
    spin_pause();
  }
}

__device__ inline void run_engine(const SoftNicArguments& a, EngineShared& shared) {
  const EngineView view = {a};
  Idleness idleness;
  u32 cursor = 0;
  if (threadIdx.x == 0) shared.news = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_relaxed_system(&view.control()->state, engine_state(a, kStateRunning));
  }
  __syncthreads();
  for (;;) {
    if (threadIdx.x < 32) {
      u32 found = watch(view, shared, cursor, idleness);
      u32 lanes = __ballot_sync(kAll, found != kNoRing);
      shared.ring[threadIdx.x] = found;
      bool ended = load_relaxed_device(&view.state()->ended) == a.launch;
      ended = __any_sync(kAll, ended);
      if (threadIdx.x == 0) {
        shared.found = ended ? 0 : lanes;
        shared.leaving = ended;
        shared.news = 0;
      }
    }
    __syncthreads();
    if (shared.leaving) break;
    for (u32 left = shared.found; left != 0; left &= left - 1) {
      u32 r = shared.ring[__ffs(static_cast<int>(left)) - 1];
      if (threadIdx.x < 32) take_batch(a, view.ring(r), shared.batch);
      __syncthreads();
      make_copies(a, shared.batch);
      __syncthreads();
      if (threadIdx.x == 0) finish_batch(view.ring(r), shared.batch);
      __syncthreads();
    }
  }
}

}  // namespace nvep
