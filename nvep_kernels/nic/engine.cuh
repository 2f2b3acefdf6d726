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
    bool busy = seen != activity;
    if (since == 0 || busy || called != wake) since = now;
    activity = seen;
    wake = called;
    u64 stop = load_relaxed_system(&control->stop);
    bool told = stop == kStopNow || (stop == kStopWhenIdle && !busy);
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

// The rings that a lane of the first warp watches.
struct Watched {
  u32 begin, stride, count, cursor = 0;

  __device__ explicit Watched(u32 rings) : begin(blockIdx.x + threadIdx.x % 32 * gridDim.x), stride(gridDim.x * 32) {
    count = begin < rings ? (rings - begin + stride - 1) / stride : 0;
  }
  // Looks at each once, begun with another one each time, until `look(ring number)` says to stop.
  template <class Look>
  __device__ void each(Look look) {
    for (u32 i = 0; i < count; ++i) {
      if (look(begin + cursor++ % count * stride)) return;
    }
  }
};

__device__ inline bool drain_ring(const EngineView& view, u32 r) {
  EngineRing& engine = view.ring(r);
  return engine.ring != 0 && drain(view.a, engine, *reinterpret_cast<const Ring*>(engine.ring));
}

// A lane of the first warp: applies what is due on its rings, and looks for new work. Ends when any lane found some, or
// when it is time to leave. Lanes without rings touch no memory but the block's own.
__device__ inline u32 watch(const EngineView& view, EngineShared& shared, Watched& watched, Idleness& idleness) {
  for (;;) {
    u32 found = kNoRing;
    watched.each([&](u32 r) {
      EngineRing& engine = view.ring(r);
      drain_ring(view, r);
      if (engine.ring != 0 && has_arrived(view.a, engine, *reinterpret_cast<const Ring*>(engine.ring))) found = r;
      return found != kNoRing;
    });
    if (found != kNoRing) {
      fetch_add_relaxed_device(&view.state()->activity, 1ull);
      atomicOr(&shared.news, 1u);
    }
    if (threadIdx.x == 0) {
      if (blockIdx.x == 0) idleness.look(view);
      if (load_relaxed_device(&view.state()->ended) == view.a.launch) atomicOr(&shared.news, 2u);
    }
    if (atomicOr(&shared.news, 0u) != 0) return found;
    spin_pause();
  }
}

// Before the engine leaves: what was taken is seen through.
__device__ inline void drain_all(const EngineView& view, Watched& watched) {
  watched.each([&](u32 r) {
    while (drain_ring(view, r)) spin_pause();
    return false;
  });
}

__device__ inline void run_engine(const SoftNicArguments& a, EngineShared& shared) {
  const EngineView view = {a};
  Idleness idleness;
  Watched watched(a.ring_count);
  if (threadIdx.x == 0) shared.news = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_relaxed_system(&view.control()->state, engine_state(a, kStateRunning));
  }
  __syncthreads();
  for (;;) {
    if (threadIdx.x < 32) {
      u32 found = watch(view, shared, watched, idleness);
      u32 lanes = __ballot_sync(kAll, found != kNoRing);
      shared.ring[threadIdx.x] = found;
      if (threadIdx.x == 0) {
        shared.leaving = shared.news & 2u;
        shared.found = lanes;
        shared.news = 0;
      }
    }
    __syncthreads();
    if (shared.leaving) {
      if (threadIdx.x < 32) drain_all(view, watched);
      break;
    }
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
