// Every memory primitive once: values pass through all of them in turn.
#include "primitives/launch.cuh"
#include "primitives/memory.cuh"
#include "primitives/shared.cuh"
#include "primitives/time.cuh"

using namespace nvep;

struct Scratch {
  u64 started;
};

extern "C" __global__ void primitives(const __grid_constant__ PrimitiveArguments arguments) {
  NVEP_SHARED(Scratch, scratch);
  if (threadIdx.x == 0) scratch.started = global_timer_ns();
  __syncthreads();
  const u32 i = threadIdx.x;
  u32* w = arguments.words + i * 16;
  u64* d = arguments.doubles + i * 16;
  store_relaxed_system(w, i + 1);
  store_release_system(w + 1, load_relaxed_system(w) + 1);
  store_relaxed_device(w + 2, load_acquire_system(w + 1) + 1);
  store_release_device(w + 3, load_relaxed_device(w + 2) + 1);
  store_weak(w + 4, load_acquire_device(w + 3) + 1);
  store_weak(reinterpret_cast<float*>(w + 5), static_cast<float>(load_weak(w + 4)));
  store_weak(reinterpret_cast<u16*>(w + 6), static_cast<u16>(load_weak(reinterpret_cast<float*>(w + 5))));
  store_weak(reinterpret_cast<i32*>(w + 7), -static_cast<i32>(load_weak(reinterpret_cast<u16*>(w + 6))));
  uint4 unit = load_weak(reinterpret_cast<uint4*>(w + 4));
  store_weak(reinterpret_cast<uint4*>(w + 8), make_uint4(unit.w, unit.x, unit.y, unit.z));
  store_relaxed_system(d, (static_cast<u64>(i) << 40) + 1);
  store_release_system(d + 1, load_relaxed_system(d) + 1);
  store_relaxed_device(d + 2, load_acquire_system(d + 1) + 1);
  store_release_device(d + 3, load_relaxed_device(d + 2) + 1);
  store_weak(d + 4, load_acquire_device(d + 3) + 1);
  store_weak(d + 5, load_weak(d + 4) + 1);
  fence_acq_rel_device();
  u64x2 pair = load_relaxed_system(reinterpret_cast<u64x2*>(d + 4));
  store_relaxed_system(reinterpret_cast<u64x2*>(d + 6), u64x2{pair.b, pair.a});
  fence_acq_rel_system();
  spin_pause();
  __threadfence();
  d[8] = global_timer_ns() >= scratch.started;
}
