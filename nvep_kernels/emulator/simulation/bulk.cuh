// Simulated twins of primitives/bulk.cuh: every copy goes to the memory model. Included by it only.
#pragma once

#include "emulator/simulation/operations.h"
#include "primitives/types.cuh"

namespace nvep {

constexpr bool kHasBulk = true;

// The model keeps the state; here is only a place.
struct alignas(8) BulkBarrier {
  u64 unused;
};

namespace simulated {

inline const BulkOperations& bulk(emulated::Fiber* fiber) {
  return *static_cast<const Operations*>(fiber->operations)->bulk;
}

}  // namespace simulated

#define NVEP_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void bulk_init(BulkBarrier* barrier, NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).init(fiber, barrier, {file, line});
}
inline void bulk_init_done() {}

inline void bulk_expect(BulkBarrier* barrier, u32 bytes, NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).expect(fiber, barrier, bytes, {file, line});
}
inline bool bulk_arrived(BulkBarrier* barrier, u32 parity, NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  return simulated::bulk(fiber).arrived(fiber, barrier, parity, {file, line});
}

inline void bulk_load(void* shared, const void* global, u32 bytes, BulkBarrier* barrier, NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).load(fiber, shared, global, bytes, barrier, {file, line});
}
inline void bulk_store(void* global, const void* shared, u32 bytes, NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).store(fiber, global, shared, bytes, {file, line});
}

inline void bulk_commit() {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).commit(fiber);
}
template <u32 kLeft>
inline void bulk_wait(NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).wait(fiber, kLeft, false, {file, line});
}
template <u32 kLeft>
inline void bulk_wait_read(NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).wait(fiber, kLeft, true, {file, line});
}
inline void fence_proxy_async_global(NVEP_SITE) {
  emulated::Fiber* fiber = emulated::current();
  simulated::bulk(fiber).fence(fiber, {file, line});
}

#undef NVEP_SITE

}  // namespace nvep
