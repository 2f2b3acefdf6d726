// Peer load/store under Fence. Dispatch pushes rows and headers into the targets' rank-major buffers; combine exposes
// partial rows, and the source pulls and sums them. The four phases are device functions, used by split and joined
// kernels alike.
#pragma once
#include "transports/fence_pull.cuh"
#include "transports/nvlink_fence_dispatch.cuh"

namespace nvep {

template <class Partial>
struct NvlinkFence : NvlinkFenceDispatch {
  // --- C.send ---------------------------------------------------------------------------------------------------------

  using Pull = FencePull<Partial>;

  // Tokens and routes are known before the step is, and before any peer has said that it is ready.
  template <class Arguments>
  __device__ static typename Pull::Walk combine_ahead(const Arguments& a, bool) {
    typename Pull::Walk walk;
    walk.start(a);
    return walk;
  }

  template <class Arguments>
  __device__ static void combine_send(const Arguments& a, const Step& step, const typename Pull::Walk&, const Shared&) {
    if (!step.alive) return;
    const u64 exposed = step.lane_of(step.rank) + heap::kPartialRowsOffset;
    const bool copies = a.partial_rows != 0 && a.partial_rows != exposed;
    if (copies) copy_partial_rows(a.partial_rows, exposed, step);
    announce_combine(step, copies);
  }

  // Rows that are exposed already were stored by earlier kernels: no block has to wait for another.
  __device__ static void announce_combine(const Step& step, bool copied) {
    auto word = [&](u32) { return make_record(step.epoch, 0, Protocol::kCode); };
    auto where = [&](u32 r) { return combine_record(step.lane_of(r), step.rank); };
    if (copied) {
      Protocol::announce_blocks(&step.counters()->combine_arrivals, step.active, word, where);
    } else if (blockIdx.x == 0 && threadIdx.x == 0) {
      Protocol::announce(step.active, word, where);
    }
  }

  __device__ static u64* combine_record(u64 lane, u32 source) {
    return reinterpret_cast<u64*>(lane + heap::kCombineRecordOffset) + source;
  }

  __device__ static void copy_partial_rows(u64 from, u64 to, const Step& step) {
    constexpr u64 units = config::kPartialBytes / 16;
    constexpr u32 batch = 8;  // units of a thread under way together
    const i32* counts = step.local_region<i32>(local::kCountsOffset);
    const u32 stride = gridDim.x * blockDim.x;
    for (u32 r = 0; r < config::kRanks; ++r) {
      u64 start = static_cast<u64>(r) * config::kMaxTokens * units;
      const uint4* source = reinterpret_cast<const uint4*>(from) + start;
      uint4* target = reinterpret_cast<uint4*>(to) + start;
      const u64 n = static_cast<u64>(counts[r]) * units;
      for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += batch * stride) {
        uint4 value[batch];
#pragma unroll
        for (u32 b = 0; b < batch; ++b) {
          if (i + b * stride < n) value[b] = source[i + b * stride];
        }
#pragma unroll
        for (u32 b = 0; b < batch; ++b) {
          if (i + b * stride < n) store_weak(target + i + b * stride, value[b]);
        }
      }
    }
  }

  // --- C.recv ---------------------------------------------------------------------------------------------------------

  __device__ static bool await_combine(const Step& step) {
    return step.alive && await_records<Protocol>(
                             step, [&](u32 r) { return combine_record(step.lane_of(step.rank), r); }, [](u32, u64) {});
  }

  // Ends a step without combine: the records of combine with zero rows.
  __device__ static void release(const Step& step, const Shared&) {
    if (step.alive) announce_combine(step, false);
    await_combine(step);
    complete(step);
  }

  template <class Arguments>
  __device__ static void combine_recv(const Arguments& a, const Step& step, typename Pull::Walk& walk, const Shared&) {
    typename Pull::Ring ring;
    if constexpr (kBulk) ring.start();
    if (await_combine(step)) {
      if constexpr (kBulk) {
        Pull::sum_in_bulk(a, step, ring, walk);
      } else {
        Pull::sum_directly(a, step, walk);
      }
    }
    complete(step);
  }
};

}  // namespace nvep
