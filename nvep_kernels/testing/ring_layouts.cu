// Writes one entry of every kind into memory, for comparison with what the host's declarations give.
#include "transports/fanout.cuh"
#include "transports/ready_words.cuh"

using namespace nvep;

namespace nvep {
namespace layouts {

__device__ inline u64 value(const RingLayoutArguments& a, u32 i) {
  return reinterpret_cast<const u64*>(a.values)[i];
}
__device__ inline u32 low(const RingLayoutArguments& a, u32 i) {
  return static_cast<u32>(value(a, i));
}

__device__ inline void write_wqes(const RingLayoutArguments& a, const Ring& ring, u64 first) {
  Message message = {ring.peer, low(a, 0), {1, value(a, 1)}, {2, value(a, 2)}};
  Signal signal = {ring.peer, low(a, 3) & 0xffff, value(a, 4)};
  u32 data[kMaxInline / 4];
  for (u32 i = 0; i < kMaxInline / 4; ++i) data[i] = low(a, 5 + i);
  write_wqe(ring, first, wqe_put(ring, first, message));
  write_wqe(ring, first + 1, wqe_inline(ring, first + 1, {1, value(a, 1)}, data, kMaxInline));
  write_wqe(ring, first + 2, wqe_signal(ring, first + 2, signal));
  write_wqe(ring, first + 3, wqe_signal_add(ring, first + 3, signal));
  ring_doorbell(ring, first + 4);
  ReadyPublisher::mark(ring, first + 3);
}

__device__ inline void write_gfds(const RingLayoutArguments& a, const Ring& ring, u64 first) {
  Message message = {
      low(a, 12) & 0x7fffffff, low(a, 0), {low(a, 13) & 0x7fff, value(a, 1)}, {low(a, 14) & 0x7fff, value(a, 2)}};
  Signal signal = {message.target, low(a, 3) & 0xffff, value(a, 4)};
  u32 counter = low(a, 15) & 0xffff;
  write_descriptor(ring, first, gfd_put(message, counter));
  write_descriptor(ring, first + 1, gfd_put_signal(message, signal, true, kNoCounter));
  write_descriptor(ring, first + 2, gfd_signal(signal, false, counter));
  write_descriptor(ring, first + 3, gfd_inline(message.target, message.to, value(a, 4), 8, kNoCounter));
  write_descriptor(ring, first + 4, gfd_control(ring::kOpFlush, counter));
  write_descriptor(ring, first + 5, gfd_control(ring::kOpReset, counter));
  auto target = [&](u32 i) { return FanoutTarget{low(a, i) & 0x7fff, value(a, i) & 0xffffffffffffull}; };
  Fanout fanout = {13, message.bytes, message.to.handle, message.from};
  write_descriptor(ring, first + 6, fanout_head(fanout, target, counter));
  write_descriptor(ring, first + 7, fanout_more(fanout, 0, target));
  write_descriptor(ring, first + 8, fanout_more(fanout, 1, target));
}

}  // namespace layouts
}  // namespace nvep

extern "C" __global__ void ring_layouts(const __grid_constant__ RingLayoutArguments a) {
  const Ring& ring = *reinterpret_cast<const Ring*>(a.ring);
  if (ring.kind == ring::kKindSendQueue) {
    layouts::write_wqes(a, ring, a.first);
  } else {
    layouts::write_gfds(a, ring, a.first);
  }
}
