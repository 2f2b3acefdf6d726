// Emulated twins of primitives/bulk.cuh: copies happen when they are issued. Included by it only.
#pragma once

#include "emulator/sanitizers.h"
#include "primitives/types.cuh"

namespace nvep {

constexpr bool kHasBulk = true;

struct alignas(8) BulkBarrier {
  u16 parity;   // of the phase under way
  u16 pending;  // arrivals
  i32 bytes;    // expected and not yet here
};

namespace emulated {

inline void check_bulk(const void* to, const void* from, u32 bytes, const char* file, int line) {
  if (((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes) & 15u) == 0) return;
  Fiber* fiber = current();
  fiber->operations->broken(fiber, "a bulk copy is not of whole 16-byte units", {file, line});
}

// Not memcpy, whose accesses ThreadSanitizer would not see.
inline void copy_units(void* to, const void* from, u32 bytes) {
  for (u32 i = 0; i < bytes / sizeof(u64x2); ++i) {
    static_cast<u64x2*>(to)[i] = static_cast<const u64x2*>(from)[i];
    asm volatile("" ::: "memory");  // no idiom that the compiler makes a call of memcpy
  }
}

// The threads of a block run one at a time on one OS thread, so the counts need no atomics.
inline void end_phase_if_complete(BulkBarrier* barrier) {
  if (barrier->pending != 0 || barrier->bytes != 0) return;
  release_token(barrier);
  barrier->parity ^= 1u;
  barrier->pending = 1;
}

}  // namespace emulated

#define NVEP_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void bulk_init(BulkBarrier* barrier) {
  const emulated::RuntimeScope runtime;
  *barrier = {0, 1, 0};
}
inline void bulk_init_done() {}

inline void bulk_expect(BulkBarrier* barrier, u32 bytes) {
  const emulated::RuntimeScope runtime;
  barrier->bytes += static_cast<i32>(bytes);
  barrier->pending = 0;
  emulated::end_phase_if_complete(barrier);
}

inline bool bulk_arrived(BulkBarrier* barrier, u32 parity) {
  const emulated::RuntimeScope runtime;
  if (barrier->parity == parity) return false;
  emulated::acquire_token(barrier);
  return true;
}

inline void bulk_load(void* shared, const void* global, u32 bytes, BulkBarrier* barrier, NVEP_SITE) {
  emulated::check_bulk(shared, global, bytes, file, line);
  emulated::copy_units(shared, global, bytes);
  const emulated::RuntimeScope runtime;
  barrier->bytes -= static_cast<i32>(bytes);
  emulated::end_phase_if_complete(barrier);
}

inline void bulk_store(void* global, const void* shared, u32 bytes, NVEP_SITE) {
  emulated::check_bulk(global, shared, bytes, file, line);
  emulated::copy_units(global, shared, bytes);
}

inline void bulk_commit() {}
template <u32 kLeft>
inline void bulk_wait() {}
template <u32 kLeft>
inline void bulk_wait_read() {}
inline void fence_proxy_async_global() {}

#undef NVEP_SITE

}  // namespace nvep
