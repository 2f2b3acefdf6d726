// Roles 0-1: SB. 2-5: IRIW. 6-7: 2+2W. 8-9: LB.
using namespace nvep;

extern "C" __global__ void ordering(const __grid_constant__ LitmusArguments a) {
  switch (a.role) {
    case 0:
      publish(a, a.x, 1);
      if (a.writer == kFenceWriter) fence_acq_rel_system();
      a.seen[0] = observe(a, a.y);
      break;
    case 1:
      publish(a, a.y, 1);
      if (a.writer == kFenceWriter) fence_acq_rel_system();
      a.seen[1] = observe(a, a.x);
      break;
    case 2:
      publish(a, a.x, 1);
      break;
    case 3:
      publish(a, a.y, 1);
      break;
    case 4:
      a.seen[0] = observe(a, a.x);
      a.seen[1] = observe(a, a.y);
      break;
    case 5:
      a.seen[2] = observe(a, a.y);
      a.seen[3] = observe(a, a.x);
      break;
    case 6:
      write(a, a.x, 1);
      publish(a, a.y, 2);
      break;
    case 7:
      write(a, a.y, 1);
      publish(a, a.x, 2);
      break;
    case 8:
      a.seen[0] = read(a, a.y);
      write(a, a.x, 1);
      break;
    default:
      a.seen[1] = read(a, a.x);
      write(a, a.y, 1);
  }
}
