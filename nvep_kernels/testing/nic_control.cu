// One thread exercises what a stream does not: counters, flush, reset, entries in groups that wrap. Results go to `out`.
#include "primitives/memory.cuh"

using namespace nvep;

namespace nvep {
namespace control {

struct Out {
  u64* word;
  u32 used = 0;
  __device__ void put(u64 value) { word[used++] = value; }
};

__device__ inline Message message_of(const NicControlArguments& a, u32 i) {
  return {a.peer, a.bytes, {0, i % a.slots * a.bytes}, {1, i % a.slots * a.bytes}};
}

}  // namespace control
}  // namespace nvep

extern "C" __global__ void nic_control(const __grid_constant__ NicControlArguments a) {
  const Ring& ring = *reinterpret_cast<const Ring*>(a.rings);
  RingWaiter waiter(a.deadline, ring.alarm);
  control::Out out = {reinterpret_cast<u64*>(a.out)};
  u64 flushes = 0;
  bool good = true;
  for (u32 i = 0; good && i < a.count; ++i) good = GfdPoster::put(ring, control::message_of(a, i), waiter, 0);
  out.put(good);
  out.put(await_counter(ring, 0, a.count, waiter));
  out.put(GfdPoster::flush(ring, 1, flushes, waiter));
  out.put(load_relaxed_system(reinterpret_cast<const u64*>(ring.counters)));
  out.put(GfdPoster::reset(ring, 0, waiter) && GfdPoster::flush(ring, 1, flushes, waiter));
  out.put(load_relaxed_system(reinterpret_cast<const u64*>(ring.counters)));
  auto target = [&](u32 i) { return FanoutTarget{a.peer, i % a.slots * static_cast<u64>(a.bytes)}; };
  for (u32 i = 0; good && i < a.fanouts; ++i) {
    u32 targets = 1 + i % ring::kMaxFanout;
    good = FanoutPoster::put_all(ring, {targets, a.bytes, 0, {1, 0}}, target, waiter, 0);
  }
  out.put(good && GfdPoster::flush(ring, 1, flushes, waiter));
  out.put(load_relaxed_system(reinterpret_cast<const u64*>(ring.counters)));
  out.put(load_relaxed_system(reinterpret_cast<const u64*>(ring.counters) + 1));
}
