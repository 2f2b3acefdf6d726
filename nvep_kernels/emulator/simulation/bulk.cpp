// Dynamic shared memory.
#include "emulator/simulation/simulation.h"

namespace nvep {
namespace simulated {

void* dynamic_shared(Fiber* fiber) {
  Block& block = *fiber->owner;
  const u64 bytes = block.grid->dynamic_bytes;
  if (!block.dynamic) {
    block.dynamic = static_cast<char*>(aligned_alloc(128, (bytes + 128) & ~127ull));
    if (!block.dynamic) abort();
    memset(block.dynamic, 0xcd, bytes);
  }
  return block.dynamic;
}

}  // namespace simulated
}  // namespace nvep
