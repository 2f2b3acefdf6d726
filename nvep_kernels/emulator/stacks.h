// Stacks for emulated threads, taken from the process's pool in chunks and touched lazily.
#pragma once

#include "emulator/fiber.h"

namespace nvep {
namespace emulated {

constexpr unsigned kStacksPerChunk = 32;

// A launch's stacks. Not thread-safe: one OS thread runs a launch.
class StackSet {
 public:
  ~StackSet();
  // Base address of a stack, or 0 when memory is exhausted.
  unsigned long long take();
  void give(unsigned long long base);

 private:
  bool grow();

  char** chunks_ = nullptr;
  unsigned chunk_count_ = 0;
  unsigned long long* free_ = nullptr;
  unsigned free_count_ = 0;
};

// Lowest usable address of a stack; the bytes there stay zero unless the stack overflows.
char* stack_bottom(unsigned long long base);
bool stack_overflowed(unsigned long long base);

}  // namespace emulated
}  // namespace nvep
