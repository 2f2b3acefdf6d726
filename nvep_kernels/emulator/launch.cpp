#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator/scheduler.h"

namespace nvep {
namespace emulated {
namespace {

constexpr unsigned kYieldRounds = 64;  // idle rounds that only offer the core to others
constexpr unsigned kCrowdRounds = 64;  // busy rounds after which another block starts anyway
constexpr long kFirstNapNs = 20 * 1000;
constexpr long kLongestNapNs = 200 * 1000;

unsigned long long timer_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<unsigned long long>(now.tv_sec) * 1000000000ull + static_cast<unsigned long long>(now.tv_nsec);
}

void spin(Fiber* fiber) {
  const RuntimeScope runtime;
  suspend(fiber, State::kSpinning);
}

NVEP_SWITCHES void fiber_main() {
  Fiber* fiber = current();
  Grid& grid = *fiber->owner->grid;
  on_new_stack(grid.scheduler_stack);
  grid.entry(grid.arguments);
  release_token(&grid);
  suspend(fiber, State::kFinished);
  abort();  // a finished thread is never continued
}

unsigned long long stack_of(const Fiber* fiber) {
  return reinterpret_cast<unsigned long long>(fiber) & ~(kStackBytes - 1);
}

void retire_block(Grid& grid, Block* block) {
  --grid.resident;
  if (kSanitized) return;
  block->next = grid.spare;
  grid.spare = block;
}

void retire(Grid& grid, Fiber* fiber) {
  Block& block = *fiber->owner;
  if (stack_overflowed(stack_of(fiber)))
    fail(block, "thread %u overflowed its stack of %llu bytes", fiber->thread_index.x, kStackBytes);
  thread_returned(block, fiber);
  if (!kSanitized) grid.stacks.give(stack_of(fiber));
  grid.progress = true;
  if (block.live == 0) retire_block(grid, &block);
}

NVEP_SWITCHES void run_until_suspended(Grid& grid, Fiber* fiber) {
  void* kept = nullptr;
  leaving_scheduler(&kept, fiber, fiber->state == State::kReady);  // whoever was suspended is in another state
  fiber->state = State::kReady;
  context_switch(&grid.scheduler, fiber->context);
  back_on_stack(kept);
}

void resume(Grid& grid, Fiber* fiber) {
  run_until_suspended(grid, fiber);
  if (fiber->state == State::kSpinning) {
    make_ready(grid, fiber);
  } else if (fiber->state == State::kFinished) {
    retire(grid, fiber);
  } else {
    grid.progress = true;
  }
}

// The i-th of n in an order drawn from the seed.
unsigned permuted(unsigned i, unsigned n, unsigned seed) {
  if (!seed || n < 2) return i;
  unsigned long long stride = seed * 2654435761u % n;
  for (;; ++stride) {
    unsigned long long a = n, b = stride % n;
    while (b) {
      const unsigned long long r = a % b;
      a = b;
      b = r;
    }
    if (a == 1) break;
  }
  return static_cast<unsigned>((i * stride + seed) % n);
}

Block* new_block(Grid& grid) {
  const unsigned warps = (grid.threads + kWarp - 1) / kWarp;
  Block* block = grid.spare;
  if (block) {
    grid.spare = block->next;
  } else {
    block = static_cast<Block*>(calloc(1, sizeof(Block) + (warps - 1) * sizeof(Warp)));
    if (!block) return nullptr;
    block->created = grid.created;
    grid.created = block;
  }
  char *const shared = block->shared, *const dynamic = block->dynamic;
  Block* const created = block->created;
  memset(static_cast<void*>(block), 0, sizeof(Block) + (warps - 1) * sizeof(Warp));
  block->shared = shared;
  block->dynamic = dynamic;
  block->created = created;
  block->grid = &grid;
  block->live = grid.threads;
  for (unsigned w = 0; w < warps; ++w) {
    const unsigned lanes = grid.threads - w * kWarp;
    block->warps[w].live = lanes >= kWarp ? 0xffffffffu : (1u << lanes) - 1;
  }
  return block;
}

Fiber* new_fiber(Grid& grid, Block* block, unsigned thread) {
  const unsigned long long base = grid.stacks.take();
  if (!base) return nullptr;
  Fiber* fiber = record_of(base);
  void* const sanitized = fiber->sanitized;
  memset(static_cast<void*>(fiber), 0, sizeof(Fiber));
  fiber->sanitized = sanitized;
  prepare_stack(fiber, stack_bottom(base), base + kStackBytes - reinterpret_cast<uintptr_t>(stack_bottom(base)));
  fiber->operations = &kOperations;
  fiber->thread_index = {thread, 0, 0};
  fiber->block_index = {block->index, 0, 0};
  fiber->block_dim = {grid.threads, 1, 1};
  fiber->grid_dim = {grid.blocks, 1, 1};
  fiber->owner = block;
  fiber->context = context_prepare(stack_bottom(base), reinterpret_cast<char*>(fiber), fiber_main);
  block->warps[thread / kWarp].lane[thread % kWarp] = fiber;
  return fiber;
}

// Makes the next block resident: each thread runs until it first waits, and hands its stack on if it never does.
void start_block(Grid& grid) {
  Block* block = new_block(grid);
  if (!block) {
    grid.failed = true;
    strncpy(grid.message, "no memory for a block", grid.message_bytes - 1);
    return;
  }
  block->index = permuted(grid.started++, grid.blocks, grid.seed);
  ++grid.resident;
  const unsigned seed = grid.seed ? grid.seed + block->index : 0;
  for (unsigned i = 0; i < grid.threads && !grid.failed; ++i) {
    Fiber* fiber = new_fiber(grid, block, permuted(i, grid.threads, seed));
    if (!fiber) {
      fail(*block, "no memory for the stacks of %u threads", grid.threads);
      return;
    }
    resume(grid, fiber);
  }
}

bool may_start(const Grid& grid) {
  return grid.started < grid.blocks && grid.resident < grid.window;
}

void rest_a_while(unsigned idle_rounds) {
  if (idle_rounds <= kYieldRounds) {
    sched_yield();
    return;
  }
  const long nap = kFirstNapNs * static_cast<long>(1 + (idle_rounds - kYieldRounds) / 4);
  timespec duration = {0, nap < kLongestNapNs ? nap : kLongestNapNs};
  nanosleep(&duration, nullptr);
}

// One turn for each fiber that is ready now.
void run_round(Grid& grid) {
  grid.progress = false;
  for (unsigned n = grid.ready_count; n && !grid.failed; --n) {
    Fiber* fiber = grid.ready_head;
    grid.ready_head = fiber->next;
    if (!grid.ready_head) grid.ready_tail = nullptr;
    --grid.ready_count;
    resume(grid, fiber);
  }
}

// Blocks start only when those running finished, wait, or have had many turns: most kernels run on few stacks.
void run(Grid& grid) {
  unsigned idle = 0;
  unsigned busy = 0;
  unsigned batch = 1;
  while (!grid.failed) {
    if (grid.ready_count == 0) {
      if (!may_start(grid)) return;
      start_block(grid);
      continue;
    }
    run_round(grid);
    idle = grid.progress ? 0 : idle + 1;
    busy = grid.progress ? busy + 1 : 0;
    if (may_start(grid) && (idle || busy >= kCrowdRounds)) {
      for (unsigned i = 0; i < batch && may_start(grid) && !grid.failed; ++i) start_block(grid);
      batch *= 2;
      idle = busy = 0;
    } else if (idle) {
      rest_a_while(idle);
    }
  }
}

void free_blocks(Grid& grid) {
  while (grid.created) {
    Block* next = grid.created->created;
    free_shared(*grid.created);
    free(grid.created);
    grid.created = next;
  }
}

}  // namespace

const Operations kOperations = {spin,           block_collective, warp_collective, shared_object,
                                dynamic_shared, timer_ns,         broken};

void make_ready(Grid& grid, Fiber* fiber) {
  fiber->next = nullptr;
  if (grid.ready_tail)
    grid.ready_tail->next = fiber;
  else
    grid.ready_head = fiber;
  grid.ready_tail = fiber;
  ++grid.ready_count;
}

NVEP_SWITCHES void suspend(Fiber* fiber, State state) {
  Grid& grid = *fiber->owner->grid;
  void* kept = nullptr;
  fiber->state = state;
  leaving_fiber(&kept, grid.scheduler_stack, state == State::kFinished || state == State::kFailed);
  context_switch(&fiber->context, grid.scheduler);
  back_on_stack(kept);
}

void block_until_released(Fiber* fiber) {
  Block& block = *fiber->owner;
  if (++block.blocked == block.live) {
    fail_deadlocked(block);
    suspend(fiber, State::kFailed);
  }
  suspend(fiber, State::kBlocked);
}

void release(Fiber* fiber) {
  Grid& grid = *fiber->owner->grid;
  --fiber->owner->blocked;
  fiber->waits_in = Collective::kNone;
  grid.progress = true;
  make_ready(grid, fiber);
}

}  // namespace emulated
}  // namespace nvep

// Mirrored by nvep/runtime/emulated_launch.py.
struct NvepLaunch {
  void (*entry)(const void*);
  const void* arguments;
  const char* name;
  char* message;  // zeroed by the caller
  unsigned message_bytes;
  unsigned blocks;
  unsigned threads;
  unsigned window;
  unsigned seed;
  unsigned shared_bytes;
};

// Runs a whole grid on the calling OS thread. Returns 0, or 1 with the reason in `message`.
extern "C" __attribute__((visibility("default"))) int nvep_emulator_launch(const NvepLaunch* launch) {
  using namespace nvep::emulated;
  const RuntimeScope runtime;
  Grid grid = {};
  grid.scheduler_stack = running_stack();
  grid.entry = launch->entry;
  grid.arguments = launch->arguments;
  grid.name = launch->name;
  grid.message = launch->message;
  grid.message_bytes = launch->message_bytes;
  grid.blocks = launch->blocks;
  grid.threads = launch->threads;
  grid.window = launch->window;
  grid.seed = launch->seed;
  grid.dynamic_bytes = launch->shared_bytes;
  run(grid);
  acquire_token(&grid);
  free_blocks(grid);
  return grid.failed ? 1 : 0;
}
