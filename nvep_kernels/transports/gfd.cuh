// GPU-friendly descriptors: 64 bytes in eight segments, each with the owner bit of its lap, so that a consumer takes a slot
// only when every store has landed, in whatever order they do.
#pragma once
#include "transports/ring.cuh"

namespace nvep {

constexpr u32 kNoCounter = 0xffffffffu;

// 1 in even laps: zeroed memory belongs to no lap.
__device__ __forceinline__ u64 owner_bit(const Ring& ring, u64 index) {
  return ((index >> ring.depth_log2) + 1) & 1ull;
}

// Four 16-byte stores. The parity is that of this very slot: it flips inside a descriptor that wraps.
template <class Descriptor>
__device__ inline void write_descriptor(const Ring& ring, u64 index, const Descriptor& descriptor) {
  u64x2* slot = reinterpret_cast<u64x2*>(slot_address(ring, index));
  u64 owner = owner_bit(ring, index);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    store_relaxed_system(slot + i, {descriptor.word[2 * i] | owner, descriptor.word[2 * i + 1] | owner});
  }
}

template <class Descriptor>
__device__ inline void set_header(Descriptor& d, u32 op, u32 flags, u32 counter) {
  d.set_op(op);
  d.set_flags(flags | (counter == kNoCounter ? 0u : ring::kFlagCounted));
  if (counter != kNoCounter) d.set_counter(counter);
}

__device__ inline ring::Gfd gfd_put(const Message& message, u32 counter) {
  ring::Gfd d = {};
  set_header(d, ring::kOpPut, 0, counter);
  d.set_peer(message.target);
  d.set_bytes(message.bytes);
  d.set_target_handle(message.to.handle);
  d.set_source_handle(message.from.handle);
  d.set_target_offset(message.to.offset);
  d.set_source_offset(message.from.offset);
  return d;
}

__device__ inline void set_signal(ring::Gfd& d, const Signal& signal) {
  d.set_signal(signal.word);
  d.set_value_low(static_cast<u32>(signal.value));
  d.set_value_high(static_cast<u32>(signal.value >> 32));
}

__device__ inline ring::Gfd gfd_put_signal(const Message& message, const Signal& signal, bool add, u32 counter) {
  ring::Gfd d = gfd_put(message, counter);
  d.word[0] = 0;
  set_header(d, ring::kOpPutSignal, add ? 0u : ring::kFlagSet, counter);
  set_signal(d, signal);
  return d;
}

__device__ inline ring::Gfd gfd_signal(const Signal& signal, bool add, u32 counter) {
  ring::Gfd d = {};
  set_header(d, ring::kOpSignal, add ? 0u : ring::kFlagSet, counter);
  d.set_peer(signal.target);
  set_signal(d, signal);
  return d;
}

// 4 or 8 bytes that travel inside the descriptor.
__device__ inline ring::Gfd gfd_inline(u32 target, const Place& to, u64 value, u32 bytes, u32 counter) {
  ring::Gfd d = {};
  set_header(d, ring::kOpInlinePut, 0, counter);
  d.set_peer(target);
  d.set_bytes(bytes);
  d.set_target_handle(to.handle);
  d.set_target_offset(to.offset);
  d.set_inline_low(static_cast<u32>(value));
  d.set_inline_high(static_cast<u32>(value >> 32));
  return d;
}

// Flush counts once all earlier descriptors of the ring are done; reset sets the counter to 0 then.
__device__ inline ring::Gfd gfd_control(u32 op, u32 counter) {
  ring::Gfd d = {};
  set_header(d, op, 0, counter);
  return d;
}

}  // namespace nvep
