// Each block copies its share of `pieces` pieces through a ring of two stages, and back at the end a piece of `odd` bytes.
#include "primitives/bulk.cuh"
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void bulk_copies(const __grid_constant__ BulkArguments a) {
  constexpr u32 stages = 2;
  struct Barriers {
    BulkBarrier loaded[stages];
  };
  NVEP_SHARED(Barriers, barriers);
  NVEP_DYNAMIC_SHARED(memory);
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < stages; ++s) bulk_init(barriers.loaded + s);
    bulk_init_done();
    for (u32 p = blockIdx.x, n = 0; p < a.pieces; p += gridDim.x, ++n) {
      u32 s = n % stages, parity = n / stages & 1u;
      if (n >= stages) bulk_wait_read<stages - 1>();
      bulk_expect(barriers.loaded + s, a.piece_bytes);
      bulk_load(memory + s * a.piece_bytes, a.from + p * a.piece_bytes, a.piece_bytes, barriers.loaded + s);
      bulk_await(barriers.loaded + s, parity);
      bulk_store(a.to + p * a.piece_bytes, memory + s * a.piece_bytes, a.piece_bytes);
      bulk_commit();
    }
    bulk_wait<0>();
    if (a.odd_bytes != 0) bulk_store(a.to, memory, a.odd_bytes);
  }
  __syncthreads();
}
