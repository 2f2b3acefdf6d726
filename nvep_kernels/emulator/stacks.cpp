#include "emulator/stacks.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace nvep {
namespace emulated {
namespace {

constexpr size_t kChunkBytes = kStacksPerChunk * kStackBytes;
constexpr size_t kGuardBytes = 16384;  // a multiple of every page size in use on x86-64 and aarch64 laptops
constexpr size_t kCanaryBytes = 64;
// A guard page splits a mapping, and a process has about 65,000 of them; stacks beyond this rely on the canary.
#ifndef NVEP_GUARDED_STACKS
#define NVEP_GUARDED_STACKS 8192
#endif

constexpr unsigned kPooledChunks = 256;

pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;
char* pool[kPooledChunks];
unsigned pool_count = 0;
unsigned guarded = 0;

char* map_chunk() {
  const size_t total = kChunkBytes + kStackBytes;
  void* mapped = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(mapped);
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(start) % kStackBytes;
  const size_t head = misaligned ? kStackBytes - misaligned : 0;
  if (head) munmap(start, head);
  if (kStackBytes - head) munmap(start + head + kChunkBytes, kStackBytes - head);
#ifdef MADV_NOHUGEPAGE
  madvise(start + head, kChunkBytes, MADV_NOHUGEPAGE);
#endif
  return start + head;
}

void guard_chunk(char* chunk) {
  for (unsigned i = 0; i < kStacksPerChunk; ++i) mprotect(chunk + i * kStackBytes, kGuardBytes, PROT_NONE);
}

char* take_chunk() {
  pthread_mutex_lock(&pool_mutex);
  char* chunk = pool_count ? pool[--pool_count] : nullptr;
  const bool guard = !chunk && guarded + kStacksPerChunk <= NVEP_GUARDED_STACKS;
  if (guard) guarded += kStacksPerChunk;
  pthread_mutex_unlock(&pool_mutex);
  if (chunk) return chunk;
  chunk = map_chunk();
  if (chunk && guard) guard_chunk(chunk);
  return chunk;
}

void give_chunk(char* chunk) {
  pthread_mutex_lock(&pool_mutex);
  const bool keep = pool_count < kPooledChunks;
  if (keep) pool[pool_count++] = chunk;
  pthread_mutex_unlock(&pool_mutex);
  if (!keep) munmap(chunk, kChunkBytes);
}

}  // namespace

char* stack_bottom(unsigned long long base) {
  return reinterpret_cast<char*>(base + kGuardBytes);
}

bool stack_overflowed(unsigned long long base) {
  static const char zeros[kCanaryBytes] = {};
  return memcmp(stack_bottom(base), zeros, kCanaryBytes) != 0;
}

StackSet::~StackSet() {
  for (unsigned i = 0; i < chunk_count_; ++i) give_chunk(chunks_[i]);
  free(chunks_);
  free(free_);
}

bool StackSet::grow() {
  char** chunks = static_cast<char**>(realloc(chunks_, (chunk_count_ + 1) * sizeof(char*)));
  if (!chunks) return false;
  chunks_ = chunks;
  const size_t slots = (chunk_count_ + 1) * kStacksPerChunk;
  auto* grown = static_cast<unsigned long long*>(realloc(free_, slots * sizeof(*free_)));
  if (!grown) return false;
  free_ = grown;
  char* chunk = take_chunk();
  if (!chunk) return false;
  chunks_[chunk_count_++] = chunk;
  for (unsigned i = kStacksPerChunk; i-- > 0;)
    free_[free_count_++] = reinterpret_cast<unsigned long long>(chunk) + i * kStackBytes;
  return true;
}

unsigned long long StackSet::take() {
  if (!free_count_ && !grow()) return 0;
  return free_[--free_count_];
}

void StackSet::give(unsigned long long base) {
  free_[free_count_++] = base;
}

}  // namespace emulated
}  // namespace nvep
