// MP and its cumulative forms. Roles 0-1: message passing. 2-4: ISA2, through a second flag. 5-7: WRC, where the first
// write is merely observed. 8-10: through a read-modify-write of the flag.
using namespace nvep;

extern "C" __global__ void message_passing(const __grid_constant__ LitmusArguments a) {
  switch (a.role) {
    case 0:
      write(a, a.x, 1);
      publish(a, a.y, 1);
      break;
    case 1:
      a.seen[0] = observe(a, a.y);
      a.seen[1] = read(a, a.x);
      break;
    case 2:
      write(a, a.x, 1);
      publish(a, a.y, 1);
      break;
    case 3:
      a.seen[0] = observe(a, a.y);
      publish(a, a.z, 1);
      break;
    case 4:
      a.seen[1] = observe(a, a.z);
      a.seen[2] = read(a, a.x);
      break;
    case 5:
      write(a, a.x, 1);
      break;
    case 6:
      a.seen[0] = read(a, a.x);
      publish(a, a.y, 1);
      break;
    case 7:
      a.seen[1] = observe(a, a.y);
      a.seen[2] = read(a, a.x);
      break;
    case 8:
      write(a, a.x, 1);
      publish(a, a.y, 1);
      break;
    case 9:
      a.seen[0] = compare_swap_relaxed_device(a.y, 1, 2);
      break;
    default:
      a.seen[1] = observe(a, a.y);
      a.seen[2] = read(a, a.x);
  }
}
