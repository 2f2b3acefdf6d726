#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "emulator/scheduler.h"

namespace nvep {
namespace emulated {
namespace {

// Appends to a bounded buffer.
struct Text {
  char* data;
  unsigned capacity;
  unsigned used;

  void add(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    if (used + 1 >= capacity) return;
    va_list list;
    va_start(list, format);
    const int wrote = vsnprintf(data + used, capacity - used, format, list);
    va_end(list);
    if (wrote > 0) used += static_cast<unsigned>(wrote);
    if (used >= capacity) used = capacity - 1;
  }
};

const Fiber* waiting_thread(const Block& block, unsigned thread) {
  const Warp& warp = block.warps[thread / kWarp];
  return warp.live >> (thread % kWarp) & 1 ? warp.lane[thread % kWarp] : nullptr;
}

bool same_wait(const Fiber* a, const Fiber* b) {
  return a->waits_in == b->waits_in && a->site.line == b->site.line && strcmp(a->site.file, b->site.file) == 0;
}

bool first_of_its_wait(const Block& block, unsigned thread) {
  const Fiber* fiber = waiting_thread(block, thread);
  if (!fiber) return false;
  for (unsigned t = 0; t < thread; ++t) {
    const Fiber* earlier = waiting_thread(block, t);
    if (earlier && same_wait(earlier, fiber)) return false;
  }
  return true;
}

void add_threads(Text& text, const Block& block, const Fiber* like) {
  const char* separator = "";
  for (unsigned t = 0; t < block.grid->threads; ++t) {
    const Fiber* fiber = waiting_thread(block, t);
    if (!fiber || !same_wait(fiber, like)) continue;
    unsigned last = t;
    while (last + 1 < block.grid->threads) {
      const Fiber* next = waiting_thread(block, last + 1);
      if (!next || !same_wait(next, like)) break;
      ++last;
    }
    if (last == t)
      text.add("%s%u", separator, t);
    else
      text.add("%s%u-%u", separator, t, last);
    separator = ",";
    t = last;
  }
}

}  // namespace

const char* collective_name(Collective kind) {
  switch (kind) {
    case Collective::kNone:
      return "no barrier";
    case Collective::kBlockSync:
      return "__syncthreads";
    case Collective::kBlockOr:
      return "__syncthreads_or";
    case Collective::kBlockAnd:
      return "__syncthreads_and";
    case Collective::kBlockCount:
      return "__syncthreads_count";
    case Collective::kWarpSync:
      return "__syncwarp";
    case Collective::kShuffle:
      return "__shfl_sync";
    case Collective::kShuffleUp:
      return "__shfl_up_sync";
    case Collective::kShuffleDown:
      return "__shfl_down_sync";
    case Collective::kShuffleXor:
      return "__shfl_xor_sync";
    case Collective::kBallot:
      return "__ballot_sync";
    case Collective::kAny:
      return "__any_sync";
    case Collective::kAll:
      return "__all_sync";
    case Collective::kMatchAny:
      return "__match_any_sync";
    case Collective::kReduceOr:
      return "__reduce_or_sync";
    case Collective::kReduceMax:
      return "__reduce_max_sync";
  }
  return "?";
}

void fail(Block& block, const char* format, ...) {
  Grid& grid = *block.grid;
  if (grid.failed) return;
  grid.failed = true;
  Text text = {grid.message, grid.message_bytes, 0};
  text.add("kernel %s, block %u: ", grid.name, block.index);
  va_list list;
  va_start(list, format);
  vsnprintf(text.data + text.used, text.capacity - text.used, format, list);
  va_end(list);
}

void fail_deadlocked(Block& block) {
  char buffer[1536];
  Text text = {buffer, sizeof(buffer), 0};
  text.add("deadlock, all %u live threads of %u wait for one another:", block.live, block.grid->threads);
  unsigned groups = 0;
  for (unsigned t = 0; t < block.grid->threads && groups < 8; ++t) {
    if (!first_of_its_wait(block, t)) continue;
    const Fiber* fiber = waiting_thread(block, t);
    text.add("%s thread(s) ", groups++ ? ";" : "");
    add_threads(text, block, fiber);
    text.add(" in %s at %s:%d", collective_name(fiber->waits_in), fiber->site.file, fiber->site.line);
  }
  fail(block, "%s", buffer);
}

void broken(Fiber* fiber, const char* what, Site site) {
  fail(*fiber->owner, "thread %u: %s at %s:%d", fiber->thread_index.x, what, site.file, site.line);
  suspend(fiber, State::kFailed);
}

}  // namespace emulated
}  // namespace nvep
