#include <stdlib.h>
#include <string.h>

#include "emulator/scheduler.h"

namespace nvep {
namespace emulated {

// A new object is filled with a pattern: shared memory holds anything until it is written.
void* shared_object(Fiber* fiber, const void* tag, unsigned long long bytes, unsigned long long alignment) {
  const RuntimeScope runtime;
  Block& block = *fiber->owner;
  for (unsigned i = 0; i < block.shared_count; ++i)
    if (block.shared_tag[i] == tag) return block.shared_object[i];
  const unsigned long long start = (block.shared_used + alignment - 1) / alignment * alignment;
  if (!block.shared) block.shared = static_cast<char*>(aligned_alloc(256, kSharedBytes));
  if (!block.shared || start + bytes > kSharedBytes || block.shared_count == kMaxShared) {
    fail(block, "shared memory: %llu bytes in %u objects, allowed are %llu bytes in %u", start + bytes,
         block.shared_count + 1, kSharedBytes, kMaxShared);
    suspend(fiber, State::kFailed);
  }
  void* object = block.shared + start;
  if (kSanitized && posix_memalign(&object, 256, bytes) != 0) abort();
  memset(object, 0xcd, bytes);
  block.shared_tag[block.shared_count] = tag;
  block.shared_object[block.shared_count++] = object;
  block.shared_used = start + bytes;
  return object;
}

void* dynamic_shared(Fiber* fiber) {
  const RuntimeScope runtime;
  Block& block = *fiber->owner;
  const unsigned long long bytes = block.grid->dynamic_bytes;
  void* memory = block.dynamic;
  if (!memory && posix_memalign(&memory, 128, bytes ? bytes : 1) != 0) abort();
  block.dynamic = static_cast<char*>(memory);
  if (!block.dynamic_filled) memset(memory, 0xcd, bytes);
  block.dynamic_filled = true;
  return memory;
}

void free_shared(Block& block) {
  free(block.dynamic);
  for (unsigned i = 0; kSanitized && i < block.shared_count; ++i) free(block.shared_object[i]);
  free(block.shared);
}

}  // namespace emulated
}  // namespace nvep
