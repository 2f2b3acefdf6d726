// Simulated twins of primitives/atomics.cuh. Included through emulator/word_atomics.cuh only.
//
// The model has no total order of sequentially consistent fences: such a fence acts as an acquire-release fence, which
// allows more.
#pragma once

#include "emulator/simulation/memory.cuh"

namespace nvep {

#define NVEP_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NVEP_UPDATE(name, type, kind, order, scope)                                                    \
  inline type name(type* p, type v, NVEP_SITE) {                                                       \
    const simulated::Access access = {simulated::Order::order, simulated::Scope::scope, {file, line}}; \
    return simulated::update(simulated::Update::kind, p, v, static_cast<type>(0), access);             \
  }

NVEP_UPDATE(fetch_add_relaxed_device, u64, kAdd, kRelaxed, kDevice)
NVEP_UPDATE(fetch_add_relaxed_system, u64, kAdd, kRelaxed, kSystem)
NVEP_UPDATE(exchange_acquire_device, u32, kExchange, kAcquire, kDevice)
#undef NVEP_UPDATE

inline void fence_sc_system(NVEP_SITE) {
  fence_acq_rel_system(file, line);
}

#undef NVEP_SITE

}  // namespace nvep
