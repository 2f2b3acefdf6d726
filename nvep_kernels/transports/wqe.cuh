// Work-queue entries as mlx5 adapters read them: a control segment, the remote address, then data, inline data, or an
// atomic operation.
#pragma once
#include "transports/ring.cuh"

namespace nvep {

struct Wqe {
  u64x2 segment[4];
  u32 segments;
};

constexpr u32 kMaxInline = 28;  // bytes: what follows control, remote address and the inline header

template <class Segment>
__device__ __forceinline__ u64x2 as_unit(const Segment& s) {
  return {s.word[0], s.word[1]};
}

__device__ inline u32 local_key(const Ring& ring, u32 handle) {
  return reinterpret_cast<const u32*>(ring.keys)[handle * (ring.ranks + 1)];
}
__device__ inline u32 remote_key(const Ring& ring, u32 handle) {
  return reinterpret_cast<const u32*>(ring.keys)[handle * (ring.ranks + 1) + 1 + ring.peer];
}

// Addresses are offsets: memory is registered with its first byte at address 0, so no rank needs another's addresses.
__device__ inline Wqe open_wqe(const Ring& ring, u64 index, u32 opcode, u32 segments, const Place& to) {
  Wqe wqe = {};
  ring::WqeControl control = {};
  control.set_opcode(opcode);
  control.set_index(static_cast<u32>(index));
  control.set_segments(segments);
  control.set_number(ring.number);
  control.set_flags(ring::kWqeSignalled);
  ring::WqeRemote remote = {};
  remote.set_address(to.offset);
  remote.set_key(remote_key(ring, to.handle));
  wqe.segment[0] = as_unit(control);
  wqe.segment[1] = as_unit(remote);
  wqe.segments = segments;
  return wqe;
}

__device__ inline u64x2 data_segment(const Ring& ring, const Place& at, u32 bytes) {
  ring::WqeData data = {};
  data.set_bytes(bytes);
  data.set_key(local_key(ring, at.handle));
  data.set_address(at.offset);
  return as_unit(data);
}

__device__ inline Wqe wqe_put(const Ring& ring, u64 index, const Message& message) {
  Wqe wqe = open_wqe(ring, index, ring::kWqeWrite, 3, message.to);
  wqe.segment[2] = data_segment(ring, message.from, message.bytes);
  return wqe;
}

// Writes `bytes` (a multiple of 4, at most `kMaxInline`) that travel inside the entry.
__device__ inline Wqe wqe_inline(const Ring& ring, u64 index, const Place& to, const u32* data, u32 bytes) {
  Wqe wqe = open_wqe(ring, index, ring::kWqeWrite, bytes <= 12 ? 3 : 4, to);
  ring::WqeInline head = {};
  head.set_bytes(bytes);
  head.set_is_inline(1);
  u64 word[4] = {head.word[0], 0, 0, 0};
#pragma unroll
  for (u32 i = 0; i < kMaxInline / 4; ++i) {
    if (4 * i < bytes) word[(i + 1) / 2] |= static_cast<u64>(data[i]) << ((i + 1) % 2 * 32);
  }
  wqe.segment[2] = {word[0], word[1]};
  wqe.segment[3] = {word[2], word[3]};
  return wqe;
}

__device__ inline Wqe wqe_signal(const Ring& ring, u64 index, const Signal& signal) {
  const u32 data[2] = {static_cast<u32>(signal.value), static_cast<u32>(signal.value >> 32)};
  return wqe_inline(ring, index, {ring.signal_handle, signal.word * 8ull}, data, 8);
}

// Adds to a signal word; what it held before goes to the local sink.
__device__ inline Wqe wqe_signal_add(const Ring& ring, u64 index, const Signal& signal) {
  Wqe wqe = open_wqe(ring, index, ring::kWqeAdd, 4, {ring.signal_handle, signal.word * 8ull});
  ring::WqeAtomic atomic = {};
  atomic.set_operand(signal.value);
  wqe.segment[2] = as_unit(atomic);
  wqe.segment[3] = data_segment(ring, {ring.signal_handle, ring.sink * 8ull}, 8);
  return wqe;
}

// Four 16-byte stores, or three: a shorter entry leaves its last segment as it was.
__device__ inline void write_wqe(const Ring& ring, u64 index, const Wqe& wqe) {
  u64x2* slot = reinterpret_cast<u64x2*>(slot_address(ring, index));
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    if (i < wqe.segments) store_relaxed_system(slot + i, wqe.segment[i]);
  }
}

}  // namespace nvep
