// Byte order: network adapters read big-endian fields.
#pragma once

#include "primitives/types.cuh"

namespace nvep {

__device__ __forceinline__ u16 swap_bytes(u16 v) {
  return static_cast<u16>((v >> 8) | (v << 8));
}

__device__ __forceinline__ u32 swap_bytes(u32 v) {
#ifdef NVEP_EMULATED
  return __builtin_bswap32(v);
#else
  return __byte_perm(v, 0, 0x0123);
#endif
}

__device__ __forceinline__ u64 swap_bytes(u64 v) {
  return (static_cast<u64>(swap_bytes(static_cast<u32>(v))) << 32) | swap_bytes(static_cast<u32>(v >> 32));
}

}  // namespace nvep
