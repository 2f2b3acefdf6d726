// Kernel boundaries. Roles 0-1: one grid writes, the next on its stream announces it. 2-3: the same, where the second is
// launched as a dependent (`how`: 1 it waits before it announces). 4-7: the axiom of completed grids: 4 re-arms a word, 5
// stores the record in a later grid; at the peer 6 sees the record and 7, in a later grid, writes the word.
using namespace nvep;

extern "C" __global__ void grids(const __grid_constant__ LitmusArguments a) {
  u32* data = reinterpret_cast<u32*>(a.x);
  switch (a.role) {
    case 0:
    case 2:
      grid_dependency_launch();
      store_weak(data, 7u);
      break;
    case 1:
    case 3:
      if (a.how) grid_dependency_wait();
      publish(a, a.y, 1);
      break;
    case 4:
      write(a, a.x, 1);
      break;
    case 5:
      write(a, a.y, 1);
      break;
    case 6:
      a.seen[0] = read(a, a.y);
      break;
    case 7:
      write(a, a.x, 2);
      break;
    default:
      while (observe(a, a.y) != 1) spin_pause();
      a.seen[1] = load_weak(data);
  }
}
