// Bulk copies. Roles 0-1: a bulk store is announced (`how`: 1 once it is performed, 2 once it has read its shared memory)
// and read by an ordinary load. 2-3: what an ordinary store wrote is announced and loaded in bulk (`how`: 1 behind a proxy
// fence). 4: the same in one thread. 5: shared memory is read while it is loaded (`how`: 1 behind the barrier). 6: a stage
// is loaded again (`how`: 1 once the store has read it). 7, 9: a store that a grid ends with, and loads of
// the grid after it. 8: an odd size.
#include "primitives/bulk.cuh"

using namespace nvep;

extern "C" __global__ void bulk(const __grid_constant__ LitmusArguments a) {
  constexpr u32 bytes = 16;
  NVEP_SHARED(BulkBarrier, loaded);
  NVEP_DYNAMIC_SHARED(memory);
  const u64* stage = reinterpret_cast<const u64*>(memory);
  const u64* source = a.z + 8;
  bulk_init(&loaded);
  bulk_init_done();
  u32 parity = 0;
  auto load = [&](const u64* from) {
    bulk_expect(&loaded, bytes);
    bulk_load(memory, from, bytes, &loaded);
  };
  auto await = [&] {
    bulk_await(&loaded, parity);
    parity ^= 1u;
  };
  auto store = [&] {
    bulk_store(a.x, memory, bytes);
    bulk_commit();
  };
  switch (a.role) {
    case 0:
      load(source);
      await();
      store();
      if (a.how == 1) bulk_wait<0>();
      if (a.how == 2) bulk_wait_read<0>();
      publish(a, a.y, 1);
      bulk_wait<0>();
      break;
    case 1:
      while (observe(a, a.y) != 1) spin_pause();
      a.seen[0] = load_weak(a.x);
      break;
    case 2:
      store_weak(a.x, 7ull);
      store_weak(a.x + 1, 7ull);
      publish(a, a.y, 1);
      break;
    case 3:
      while (observe(a, a.y) != 1) spin_pause();
      if (a.how == 1) fence_proxy_async_global();
      load(a.x);
      await();
      a.seen[0] = stage[0];
      break;
    case 4:
      store_weak(a.x, 7ull);
      if (a.how == 1) fence_proxy_async_global();
      load(a.x);
      await();
      a.seen[0] = stage[0];
      break;
    case 5:
      load(source);
      if (a.how == 1) await();
      a.seen[0] = stage[0];
      if (a.how == 0) await();
      break;
    case 6:
      load(source);
      await();
      store();
      if (a.how == 1) bulk_wait_read<0>();
      load(a.y);
      await();
      bulk_wait<0>();
      break;
    case 7:
      load(source);
      await();
      store();
      bulk_wait_read<0>();
      break;
    case 9:
      a.seen[0] = load_weak(a.x);
      load(a.x);
      await();
      a.seen[1] = stage[0];
      break;
    default:
      bulk_store(a.x, memory, 8);
  }
}
