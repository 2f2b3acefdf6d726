// One location. Roles 0-1: CoRR. 2-3: CoWW. 4-5: CoRW. 6-7: CoWR. 8: an increment. 9-11: CoRR through a flag: what one
// thread read, another that acquired from it must not read over.
using namespace nvep;

extern "C" __global__ void coherence(const __grid_constant__ LitmusArguments a) {
  switch (a.role) {
    case 0:
      write(a, a.x, 1);
      break;
    case 1:
      a.seen[0] = read(a, a.x);
      a.seen[1] = read(a, a.x);
      break;
    case 2:
      write(a, a.x, 1);
      write(a, a.x, 2);
      break;
    case 3:
      a.seen[0] = read(a, a.x);
      a.seen[1] = read(a, a.x);
      break;
    case 4:
      a.seen[0] = read(a, a.x);
      write(a, a.x, 2);
      break;
    case 5:
      write(a, a.x, 1);
      break;
    case 6:
      write(a, a.x, 1);
      a.seen[0] = read(a, a.x);
      break;
    case 7:
      write(a, a.x, 2);
      break;
    case 8:
      a.seen[blockIdx.x] = fetch_add_relaxed_device(reinterpret_cast<u32*>(a.x), 1u);
      break;
    case 9:
      write(a, a.x, 1);
      write(a, a.x, 2);
      break;
    case 10:
      a.seen[0] = read(a, a.x);
      publish(a, a.y, 1);
      a.seen[3] = read(a, a.x);
      break;
    default:
      a.seen[1] = observe(a, a.y);
      a.seen[2] = read(a, a.x);
  }
}
