// Ends a step that has no combine: the exchange of combine records with zero rows, so that no peer
// overwrites rows that are still being read.
#include "primitives/shared.cuh"

using namespace nvep;

extern "C" __global__ void release(const __grid_constant__ CombineArguments arguments) {
  Step step = open_step(arguments);
  NVEP_SHARED(NvlinkShared, shared);
  u32 epoch = step.counters()->dispatched;
  Transport::open(step, Transport::mask_snapshot(step), shared);
  if (!dead_before(step, epoch, kPhaseRelease)) Transport::announce_combine(step, epoch, shared);
  Transport::await_combine(step, epoch, kPhaseRelease, shared);
  Transport::complete(step, epoch);
}
