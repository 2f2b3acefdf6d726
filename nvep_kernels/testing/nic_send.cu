// Every warp posts a random stream of messages, each followed by a signal to its targets.
#include "testing/nic_stream.cuh"

namespace nvep {
namespace stream {

struct Sender {
  const NicStreamArguments& a;
  RingWaiter waiter;
  u32 warp;

  __device__ const Ring& ring_to(u32 target) const {
    u32 queue = warp % kQueues;
    return reinterpret_cast<const Ring*>(a.rings)[Poster::kPerPeer ? target * kQueues + queue : queue];
  }

  // Everything that this warp posted has left its staging slots.
  __device__ bool reuse_staging() {
    bool good = true;
    for (u32 t = 0; good && t < (Poster::kPerPeer ? kRanks : 1u); ++t) {
      const Ring& ring = ring_to(t);
      good = Poster::await_passed(ring, load_relaxed_device(&state_of(ring)->reserved), waiter);
    }
    return good;
  }

  __device__ Place staging(u32 m) const { return {kStagingHandle, (warp * kStaged + m % kStaged) * kSlotBytes}; }

  // One message to one target, its signal in the same posting where that adds.
  __device__ bool send_one(u32 m, u32 bytes) {
    u32 target = target_of(a.rank, warp, m, 0);
    const Ring& ring = ring_to(target);
    Message message = {target, bytes, {kDataHandle, slot_of(a.rank, warp, m, 0)}, staging(m)};
    Signal signal = {target, signal_of(a.rank, warp), kAdd ? 1ull : m + 1ull};
    if (bytes >= kUnit && !(kInline && bytes <= 8)) return Poster::put_signal(ring, message, signal, kAdd, waiter);
    u64 value = word_of(a.rank, warp, m, 0) | static_cast<u64>(word_of(a.rank, warp, m, 1)) << 32;
    return Poster::put_inline(ring, target, message.to, value, bytes, waiter) &&
           Poster::signal(ring, signal, kAdd, waiter);
  }
};

// Where the scheme has a fan-out, one descriptor carries all targets; signals follow, one a rank.
template <class P>
struct SendAll {
  __device__ static bool post(Sender& sender, u32 m, u32 bytes) {
    for (u32 i = 0; i < kTargets; ++i) {
      u32 target = target_of(sender.a.rank, sender.warp, m, i);
      Message message = {target, bytes, {kDataHandle, slot_of(sender.a.rank, sender.warp, m, i)}, sender.staging(m)};
      if (!P::put(sender.ring_to(target), message, sender.waiter)) return false;
    }
    return true;
  }
};

#ifdef NVEP_STREAM_FANOUT
template <>
struct SendAll<FanoutPoster> {
  __device__ static bool post(Sender& sender, u32 m, u32 bytes) {
    u32 source = sender.a.rank, warp = sender.warp;
    auto target = [=](u32 i) { return FanoutTarget{target_of(source, warp, m, i), slot_of(source, warp, m, i)}; };
    return FanoutPoster::put_all(sender.ring_to(0), {kTargets, bytes, kDataHandle, sender.staging(m)}, target,
                                 sender.waiter);
  }
};
#endif

__device__ inline bool signal_all(Sender& sender, u32 m) {
  bool good = true;
  for (u32 r = 0; good && r < kRanks; ++r) {
    if (!reaches(sender.a.rank, sender.warp, m, r)) continue;
    Signal signal = {r, signal_of(sender.a.rank, sender.warp), kAdd ? 1ull : m + 1ull};
    good = Poster::signal(sender.ring_to(r), signal, kAdd, sender.waiter);
  }
  return good;
}

// 32 messages at a time, one a lane, all to one target; then one signal that counts them.
__device__ inline bool send_by_warp(Sender& sender, u32 first) {
  u32 lane = threadIdx.x % 32, m = first + lane;
  u32 target = target_of(sender.a.rank, sender.warp, first, 0);
  const Ring& ring = sender.ring_to(target);
  u32 bytes = bytes_of(sender.a.rank, sender.warp, m);
  Message message = {target, bytes, {kDataHandle, slot_of(sender.a.rank, sender.warp, m, 0)}, sender.staging(m)};
  bool active = draw(sender.a.rank, sender.warp, m, 99) % 4 != 0 && m < kMessages;
  bool good = Poster::put_by_warp(ring, message, active, sender.waiter);
  u32 posted = static_cast<u32>(__popc(__ballot_sync(0xffffffffu, active)));
  __syncwarp();
  Signal signal = {target, signal_of(sender.a.rank, sender.warp), kAdd ? posted : first + 32ull};
  if (lane == 0 && good) good = Poster::signal(ring, signal, kAdd, sender.waiter);
  return __all_sync(0xffffffffu, good);
}

__device__ inline void stage(const NicStreamArguments& a, u32 warp, u32 first, u32 count) {
  for (u32 i = threadIdx.x % 32; i < count * kSlotWords * 2; i += 32) {
    u32 m = first + i / (kSlotWords * 2), word = i % (kSlotWords * 2);
    u32* slot = reinterpret_cast<u32*>(a.staging + (warp * kStaged + m % kStaged) * kSlotBytes);
    store_weak(slot + word, word_of(a.rank, warp, m, word));
  }
  __syncwarp();
  fence_acq_rel_system();  // the lanes' stores, then the descriptor
}

__device__ inline bool send_next(Sender& sender, u32 m) {
  const NicStreamArguments& a = sender.a;
  u32 lane = threadIdx.x % 32, step = kByWarp ? 32 : 1;
  bool good = true;
  if (m % kStaged == 0 && m != 0) good = lane != 0 || sender.reuse_staging();
  if (!__all_sync(0xffffffffu, good)) return false;
  __syncwarp();  // lane 0 saw that the slots are free; now all lanes know
  stage(a, sender.warp, m, step);
  if (kByWarp) return send_by_warp(sender, m);
  if (lane == 0) {
    u32 bytes = bytes_of(a.rank, sender.warp, m);
    if (kTargets == 1) {
      good = sender.send_one(m, bytes);
    } else {
      good = SendAll<Poster>::post(sender, m, bytes) && signal_all(sender, m);
    }
  }
  return __all_sync(0xffffffffu, good);
}

}  // namespace stream
}  // namespace nvep

using namespace nvep;

extern "C" __global__ void nic_send(const __grid_constant__ NicStreamArguments a) {
  const Ring& first = *reinterpret_cast<const Ring*>(a.rings);
  stream::Sender sender = {a, RingWaiter(a.deadline, first.alarm), stream::warp_index()};
  for (u32 m = 0; m < stream::kMessages; m += stream::kByWarp ? 32 : 1) {
    if (!stream::send_next(sender, m)) {
      if (threadIdx.x % 32 == 0) fetch_add_relaxed_device(reinterpret_cast<u32*>(a.errors) + 1, 1u);
      return;
    }
  }
}
