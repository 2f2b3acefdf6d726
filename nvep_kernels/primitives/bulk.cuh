// Bulk copies between global and shared memory (TMA): whole pieces, moved by hardware while the issuing thread goes on.
// Addresses and sizes are multiples of 16 bytes; global memory may be a peer's.
//
// A copy is made by the async proxy: weak accesses that program order does not order with those of the thread.
// - A load has happened once its barrier's phase ended, for every thread that saw that.
// - A store has read its shared memory once `bulk_wait_read` returned, and is performed, for the thread that issued it,
//   once `bulk_wait` returned. Only then may anything be announced.
// - What ordinary accesses wrote (a peer's, say, after an acquire) is there for a copy only behind a
//   `fence_proxy_async_global` of the issuing thread, or a kernel boundary.
#pragma once

#include "primitives/time.cuh"
#include "primitives/types.cuh"

#ifdef NVEP_SIMULATED
#include "emulator/simulation/bulk.cuh"
#elif defined(NVEP_EMULATED)
#include "emulator/bulk.cuh"
#else

namespace nvep {

#if __CUDA_ARCH__ >= 900
constexpr bool kHasBulk = true;
#else
constexpr bool kHasBulk = false;
#endif

// In shared memory: counts the bytes of loads on their way. A phase ends when the one thread that expects bytes has said
// how many and all of them have come.
struct BulkBarrier {
  u64 state;
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void bulk_init(BulkBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// After the inits of a thread, before its first load; other threads also need a barrier behind it.
__device__ __forceinline__ void bulk_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void bulk_expect(BulkBarrier* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Has the phase of this parity (0 first) ended? May wait a moment to find out.
__device__ __forceinline__ bool bulk_arrived(BulkBarrier* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, BulkBarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Ends a group: the stores of this thread since the last one.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Wait until at most kLeft of this thread's groups are unfinished.
template <u32 kLeft>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

// The same, but only until the others have read their shared memory.
template <u32 kLeft>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace nvep

#endif

namespace nvep {

// The copy engine waits for no peer, so this needs no deadline.
__device__ __forceinline__ void bulk_await(BulkBarrier* barrier, u32 parity) {
  while (!bulk_arrived(barrier, parity)) spin_pause();
}

}  // namespace nvep
