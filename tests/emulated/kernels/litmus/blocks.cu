// A block writes ordinary memory and one of its threads announces it; another block awaits the flag in one thread and
// reads in all. `how` says what joins threads: 0 nothing, 1 the block barrier, 2 the warp's, 3 a shuffle.
using namespace nvep;

inline void join(u32 how) {
  if (how == 1) __syncthreads();
  if (how == 2) __syncwarp();
  if (how == 3) __shfl_sync(0xffffffffu, 0u, 0);
}

extern "C" __global__ void blocks(const __grid_constant__ LitmusArguments a) {
  u32* data = reinterpret_cast<u32*>(a.x);
  if (a.role == 0) {
    store_weak(data + threadIdx.x, 7u + threadIdx.x);
    join(a.how);
    if (threadIdx.x == 0) publish(a, a.y, 1);
    return;
  }
  if (threadIdx.x == blockDim.x - 1) {
    while (observe(a, a.y) != 1) spin_pause();
  }
  join(a.how);
  const u32 other = blockDim.x - 1 - threadIdx.x;
  a.seen[threadIdx.x] = load_weak(data + other) == 7u + other;
}
