// Reads work-queue entries. The thread that saw the doorbell acquired it; a warp barrier extends that to the readers.
#pragma once
#include "nic/work.cuh"

namespace nvep {

// Keys of the soft NIC: the handle, then a tag that says whose memory it opens.
__device__ inline bool key_opens(u32 key, u32 tag) {
  return (key & 0xff) == tag;
}
__device__ inline u32 remote_tag(u32 rank) {
  return rank % ring::kLocalKeyTag;
}

__device__ inline void read_inline(const Port& port, const Ring& ring, const u64* word, u32 handle, u64 offset,
                                   Work& work) {
  ring::WqeInline head = {};
  head.word[0] = word[4];
  work.bytes = head.bytes();
  if (work.bytes > kMaxInline) {
    work.error = ring::kSyndromeLocalLength;
    return;
  }
#pragma unroll
  for (u32 i = 0; i < kMaxInline / 4; ++i) {
    work.data[i] = static_cast<u32>(word[4 + (i + 1) / 2] >> ((i + 1) % 2 * 32));
  }
  if (is_ordered(port, handle)) {
    work.event = kEventStore;
    work.event_address = work.bytes == 8 ? reach_word(port, handle, ring.peer, offset) : 0;
    work.event_value = static_cast<u64>(work.data[1]) << 32 | work.data[0];
    if (work.event_address == 0) work.error = ring::kSyndromeRemoteAccess;
    return;
  }
  work.copies = 1;
  work.to[0] = reach(port, handle, ring.peer, offset, work.bytes);
  if (work.to[0] == 0) work.error = ring::kSyndromeRemoteAccess;
}

__device__ inline void read_write(const Port& port, const Ring& ring, const u64* word, u32 handle, u64 offset,
                                  Work& work) {
  ring::WqeData data = {};
  data.word[0] = word[4];
  data.word[1] = word[5];
  work.bytes = data.bytes();
  work.copies = work.bytes != 0 ? 1 : 0;
  if (work.bytes == 0) return;
  work.to[0] = reach(port, handle, ring.peer, offset, work.bytes);
  work.from = reach(port, data.key() >> 8, ring.rank, data.address(), work.bytes);
  if (work.from == 0 || !key_opens(data.key(), ring::kLocalKeyTag)) work.error = ring::kSyndromeLocalProtection;
  if (work.to[0] == 0) work.error = ring::kSyndromeRemoteAccess;
}

__device__ inline Work read_wqe(const Port& port, const Ring& ring, u64 index) {
  const u64x2* slot = reinterpret_cast<const u64x2*>(slot_address(ring, index));
  u64 word[8];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u64x2 unit = load_relaxed_system(slot + i);
    word[2 * i] = unit.a;
    word[2 * i + 1] = unit.b;
  }
  ring::WqeControl control = {{word[0], word[1]}};
  ring::WqeRemote remote = {{word[2], word[3]}};
  Work work = {};
  work.valid = 1;
  work.slots = 1;
  work.peer = ring.peer;
  work.completion = (control.flags() & ring::kWqeSignalled) != 0 ? kEventComplete : kEventNone;
  work.completion_address = ring.completions + (index & (ring.depth - 1)) * 64;
  u32 handle = remote.key() >> 8;
  if (control.index() != (index & 0xffff) || control.number() != ring.number) {
    work.error = ring::kSyndromeLocalOperation;
  } else if (control.opcode() == ring::kWqeNop) {
  } else if (handle >= port.region_count || !key_opens(remote.key(), remote_tag(ring.peer))) {
    work.error = ring::kSyndromeRemoteAccess;
  } else if (control.opcode() == ring::kWqeAdd) {
    ring::WqeAtomic atomic = {{word[4], word[5]}};
    work.event = kEventAdd;
    work.event_address = reach_word(port, handle, ring.peer, remote.address());
    work.event_value = atomic.operand();
    if (work.event_address == 0) work.error = ring::kSyndromeRemoteAccess;
  } else if (control.opcode() != ring::kWqeWrite) {
    work.error = ring::kSyndromeLocalOperation;
  } else if (ring::WqeInline{{word[4]}}.is_inline()) {
    read_inline(port, ring, word, handle, remote.address(), work);
  } else {
    read_write(port, ring, word, handle, remote.address(), work);
  }
  return work;
}

}  // namespace nvep
