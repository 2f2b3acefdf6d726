// What a kernel sees of the emulated thread it runs on. Kernels call the runtime only through `Operations`, so a
// kernel's shared library has no undefined symbol of ours and links the same way with every tool chain.
//
// A thread's record lies near the top of its own stack, whose address never changes, so it is found from the stack
// pointer alone: there is no thread-local value that a compiler could keep across a switch.
#pragma once

#ifndef NVEP_STACK_BYTES
#define NVEP_STACK_BYTES (128 * 1024)
#endif

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

namespace nvep {
namespace emulated {

constexpr unsigned long long kStackBytes = NVEP_STACK_BYTES;
constexpr unsigned long long kRecordBytes = 256;
// Records of neighbouring stacks fall into different cache sets.
constexpr unsigned long long kColours = 128;
// Addresses that a thread remembers to have loaded from (under ThreadSanitizer).
constexpr unsigned kObserved = 4;
static_assert((kStackBytes & (kStackBytes - 1)) == 0 && kStackBytes >= 2 * kColours * kRecordBytes, "stack size");

struct Site {
  const char* file;
  int line;
};

enum class Collective : int {
  kNone,
  kBlockSync,
  kBlockOr,
  kBlockAnd,
  kBlockCount,
  kWarpSync,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
  kReduceOr,
  kReduceMax,
};

struct Fiber;

struct Operations {
  // Lets others run; tells the scheduler that this thread only waits.
  void (*spin)(Fiber*);
  // Block barrier, with a predicate for the reducing kinds.
  int (*block)(Fiber*, Collective, int predicate, Site);
  // `lane` is the source lane, distance or lane mask of a shuffle.
  unsigned long long (*warp)(Fiber*, Collective, unsigned mask, unsigned long long value, int lane, int width, Site);
  void* (*shared)(Fiber*, const void* tag, unsigned long long bytes, unsigned long long alignment);
  void* (*dynamic_shared)(Fiber*);
  unsigned long long (*timer_ns)();
  // The thread broke a rule of the machine: ends the launch, does not return.
  void (*broken)(Fiber*, const char* what, Site);
};

enum class State : int { kReady, kSpinning, kBlocked, kFinished, kFailed };

struct Block;

struct Fiber {
  const Operations* operations;
  uint3 thread_index;
  uint3 block_index;
  uint3 block_dim;
  uint3 grid_dim;
  // Below: the scheduler's.
  void* context;
  Block* owner;
  Fiber* next;
  State state;
  Collective waits_in;
  Site site;
  unsigned mask;
  int lane_argument;
  int width;
  unsigned long long value;
  unsigned long long result;
  // Below: only used under sanitizers.
  void* sanitized;  // what the tool knows this stack as; kept when another thread gets the stack
  const void* observed[kObserved];
  bool fences;
};
static_assert(sizeof(Fiber) <= kRecordBytes, "record size");

inline Fiber* record_of(unsigned long long stack_base) {
  const unsigned long long colour = stack_base / kStackBytes % kColours;
  return reinterpret_cast<Fiber*>(stack_base + kStackBytes - (colour + 1) * kRecordBytes);
}

// The calling emulated thread. Any address inside a stack gives the same answer, so the result may be kept.
inline __attribute__((always_inline)) Fiber* current() {
  unsigned long long sp;
#if defined(__x86_64__)
  asm("mov %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
  asm("mov %0, sp" : "=r"(sp));
#else
  sp = reinterpret_cast<unsigned long long>(__builtin_frame_address(0));
#endif
  return record_of(sp & ~(kStackBytes - 1));
}

}  // namespace emulated
}  // namespace nvep
