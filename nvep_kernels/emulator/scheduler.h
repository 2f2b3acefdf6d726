// State of one launch. A launch runs on the OS thread that started it; its fibers never migrate.
#pragma once

#include "emulator/context.h"
#include "emulator/fiber.h"
#include "emulator/sanitizers.h"
#include "emulator/stacks.h"

namespace nvep {
namespace emulated {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxShared = 16;
constexpr unsigned long long kSharedBytes = 48 * 1024;

struct Grid;

struct Warp {
  unsigned live;    // lanes that exist and have not returned
  unsigned parked;  // lanes inside a collective that is not complete
  unsigned long long ordered_by;
  Fiber* lane[kWarp];
};

struct Block {
  Grid* grid;
  unsigned index;
  unsigned live;
  unsigned blocked;
  unsigned waiting;  // threads at the block barrier, of which `votes` brought a true predicate
  unsigned votes;
  unsigned barriers;                 // completed so far
  unsigned long long ordered_by[2];  // by barriers of even and of odd number
  Fiber* waiters;
  Fiber* last_waiter;
  char* shared;
  unsigned long long shared_used;
  unsigned shared_count;
  const void* shared_tag[kMaxShared];
  void* shared_object[kMaxShared];
  char* dynamic;  // what the launch gave it, once asked for
  bool dynamic_filled;
  Block* next;     // spare block of the launch
  Block* created;  // chain of all blocks of the launch
  Warp warps[1];   // as many as the block has
};

struct Grid {
  void (*entry)(const void*);
  const void* arguments;
  const char* name;
  unsigned blocks;
  unsigned threads;
  unsigned window;                   // blocks that may be resident at once
  unsigned seed;                     // order in which blocks and threads start; 0: ascending
  unsigned long long dynamic_bytes;  // of shared memory, for each block
  char* message;
  unsigned message_bytes;

  unsigned started;
  unsigned resident;
  bool failed;
  bool progress;  // something other than spinning happened in this round
  Fiber* ready_head;
  Fiber* ready_tail;
  unsigned ready_count;
  Block* spare;
  Block* created;
  Context scheduler;
  SanitizedStack scheduler_stack;
  StackSet stacks;
};

extern const Operations kOperations;

void make_ready(Grid& grid, Fiber* fiber);
// Leaves the running fiber in `state` and returns when it runs again.
void suspend(Fiber* fiber, State state);
// Counts a fiber as blocked, reports a deadlock if nobody in its block can run, and waits until it is released.
void block_until_released(Fiber* fiber);
void release(Fiber* fiber);
// Bookkeeping of collectives after a thread returned.
void thread_returned(Block& block, Fiber* fiber);

int block_collective(Fiber* fiber, Collective kind, int predicate, Site site);
unsigned long long warp_collective(Fiber* fiber, Collective kind, unsigned mask, unsigned long long value, int lane,
                                   int width, Site site);

void* shared_object(Fiber* fiber, const void* tag, unsigned long long bytes, unsigned long long alignment);
// The block's dynamic shared memory, 128-byte aligned: filled with the pattern before its first use.
void* dynamic_shared(Fiber* fiber);
void free_shared(Block& block);

// Records the first failure of a launch; the text gets kernel and block prepended.
void fail(Block& block, const char* format, ...) __attribute__((format(printf, 2, 3)));
void fail_deadlocked(Block& block);
void broken(Fiber* fiber, const char* what, Site site);
const char* collective_name(Collective kind);

}  // namespace emulated
}  // namespace nvep
