// Roles 0-1: a 16-byte access tears into 8-byte words. 2-3: words of different sizes overlap. 4-5: an ordinary write meets
// a strong read.
using namespace nvep;

extern "C" __global__ void widths(const __grid_constant__ LitmusArguments a) {
  switch (a.role) {
    case 0:
      store_relaxed_system(reinterpret_cast<u64x2*>(a.x), {1, 1});
      break;
    case 1: {
      const u64x2 seen = load_relaxed_system(reinterpret_cast<const u64x2*>(a.x));
      a.seen[0] = seen.a;
      a.seen[1] = seen.b;
      break;
    }
    case 2:
      store_relaxed_system(reinterpret_cast<u32*>(a.x), 1u);
      break;
    case 3:
      a.seen[0] = load_relaxed_system(a.x);
      break;
    case 4:
      store_weak(a.x, 1ull);
      break;
    default:
      a.seen[0] = load_relaxed_system(a.x);
  }
}
