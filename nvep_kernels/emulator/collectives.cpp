#include <string.h>

#include "emulator/scheduler.h"

namespace nvep {
namespace emulated {
namespace {

unsigned thread_of(const Fiber* fiber) {
  return fiber->thread_index.x;
}
unsigned lane_of(const Fiber* fiber) {
  return fiber->thread_index.x % kWarp;
}
Warp& warp_of(Fiber* fiber) {
  return fiber->owner->warps[fiber->thread_index.x / kWarp];
}

int reduce_votes(const Block& block, Collective kind) {
  switch (kind) {
    case Collective::kBlockOr:
      return block.votes != 0;
    case Collective::kBlockAnd:
      return block.votes == block.waiting;
    case Collective::kBlockCount:
      return static_cast<int>(block.votes);
    default:
      return 0;
  }
}

void complete_block(Block& block, Collective kind) {
  const unsigned long long result = static_cast<unsigned long long>(reduce_votes(block, kind));
  Fiber* fiber = block.waiters;
  block.waiters = block.last_waiter = nullptr;
  block.waiting = block.votes = 0;
  ++block.barriers;
  while (fiber) {
    Fiber* next = fiber->next;
    fiber->result = result;
    release(fiber);
    fiber = next;
  }
}

// What a shuffle gives where the source lane takes no part: CUDA leaves it undefined, so nobody may rely on it.
constexpr unsigned long long kUndefined = 0xbad0bad0bad0bad0ull;

unsigned long long shuffled(const Warp& warp, const Fiber* fiber, unsigned group) {
  const unsigned lane = lane_of(fiber);
  const unsigned width = static_cast<unsigned>(fiber->width);
  const unsigned first = lane & ~(width - 1);
  const unsigned argument = static_cast<unsigned>(fiber->lane_argument);
  unsigned source = lane;
  switch (fiber->waits_in) {
    case Collective::kShuffle:
      source = first + (argument & (width - 1));
      break;
    case Collective::kShuffleUp:
      source = argument <= lane - first ? lane - argument : lane;
      break;
    case Collective::kShuffleDown:
      source = argument < width - (lane - first) ? lane + argument : lane;
      break;
    default:
      source = (lane ^ argument) < first + width ? lane ^ argument : lane;
      break;
  }
  return group >> source & 1 ? warp.lane[source]->value : kUndefined;
}

unsigned long long voted(const Warp& warp, const Fiber* fiber, unsigned group) {
  unsigned equal = 0;
  for (unsigned rest = group; rest; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
    const unsigned long long value = warp.lane[lane]->value;
    const bool hit = fiber->waits_in == Collective::kMatchAny ? value == fiber->value : value != 0;
    if (hit) equal |= 1u << lane;
  }
  switch (fiber->waits_in) {
    case Collective::kAny:
      return equal != 0;
    case Collective::kAll:
      return equal == group;
    default:
      return equal;
  }
}

unsigned long long reduced(const Warp& warp, Collective kind, unsigned group) {
  unsigned long long result = 0;
  for (unsigned rest = group; rest; rest &= rest - 1) {
    const unsigned long long value = warp.lane[__builtin_ctz(rest)]->value;
    if (kind == Collective::kReduceOr) {
      result |= value;
    } else if (value > result) {
      result = value;
    }
  }
  return result;
}

unsigned long long warp_result(const Warp& warp, const Fiber* fiber, unsigned group) {
  switch (fiber->waits_in) {
    case Collective::kWarpSync:
      return 0;
    case Collective::kBallot:
    case Collective::kAny:
    case Collective::kAll:
    case Collective::kMatchAny:
      return voted(warp, fiber, group);
    case Collective::kReduceOr:
    case Collective::kReduceMax:
      return reduced(warp, fiber->waits_in, group);
    default:
      return shuffled(warp, fiber, group);
  }
}

// Lanes that complete the collective in which `member` takes part, or 0 while some have not arrived.
unsigned complete_group(const Warp& warp, const Fiber* member) {
  const unsigned required = member->mask & warp.live;
  if ((warp.parked & required) != required) return 0;
  for (unsigned rest = required; rest; rest &= rest - 1) {
    const Fiber* other = warp.lane[__builtin_ctz(rest)];
    if (other->mask != member->mask || other->waits_in != member->waits_in) return 0;
  }
  return required;
}

// Results first: a released lane may overwrite its value.
void finish_group(Warp& warp, unsigned group, const Fiber* running) {
  Fiber* leader = warp.lane[__builtin_ctz(group)];
  const bool uniform = leader->waits_in == Collective::kBallot || leader->waits_in == Collective::kAny ||
                       leader->waits_in == Collective::kAll || leader->waits_in == Collective::kWarpSync ||
                       leader->waits_in == Collective::kReduceOr || leader->waits_in == Collective::kReduceMax;
  const unsigned long long common = uniform ? warp_result(warp, leader, group) : 0;
  for (unsigned rest = group; rest; rest &= rest - 1) {
    Fiber* fiber = warp.lane[__builtin_ctz(rest)];
    fiber->result = uniform ? common : warp_result(warp, fiber, group);
  }
  warp.parked &= ~group;
  for (unsigned rest = group; rest; rest &= rest - 1) {
    Fiber* fiber = warp.lane[__builtin_ctz(rest)];
    if (fiber != running) release(fiber);
  }
}

// Two lanes that each wait for the other in different collectives can never go on.
bool contradicts(const Warp& warp, const Fiber* fiber) {
  const unsigned others = warp.parked & fiber->mask & warp.live;
  if (!others) return false;
  const Fiber* other = warp.lane[__builtin_ctz(others)];
  return (other->mask >> lane_of(fiber) & 1) && (other->mask != fiber->mask || other->waits_in != fiber->waits_in);
}

void report_contradiction(const Warp& warp, const Fiber* fiber) {
  const unsigned others = warp.parked & fiber->mask & warp.live;
  const Fiber* other = warp.lane[__builtin_ctz(others)];
  fail(*fiber->owner,
       "thread %u is in %s(mask 0x%08x) at %s:%d while thread %u waits for it in %s(mask 0x%08x) at %s:%d",
       thread_of(fiber), collective_name(fiber->waits_in), fiber->mask, fiber->site.file, fiber->site.line,
       thread_of(other), collective_name(other->waits_in), other->mask, other->site.file, other->site.line);
}

}  // namespace

int block_collective(Fiber* fiber, Collective kind, int predicate, Site site) {
  const RuntimeScope runtime;
  Block& block = *fiber->owner;
  // Two tokens: a fast thread that is already at the next barrier must not order what slow ones do before it.
  void* const token = &block.ordered_by[block.barriers % 2];
  release_token(token);
  fiber->waits_in = kind;
  fiber->site = site;
  if (block.waiters) {
    const Fiber* other = block.waiters;
    if (other->site.line != site.line || strcmp(other->site.file, site.file) != 0) {
      fail(
          block,
          "thread %u is in %s at %s:%d while thread %u waits in %s at %s:%d: a block barrier must be reached by all threads",
          thread_of(fiber), collective_name(kind), site.file, site.line, thread_of(other),
          collective_name(other->waits_in), other->site.file, other->site.line);
      suspend(fiber, State::kFailed);
    }
  }
  ++block.waiting;
  if (predicate) ++block.votes;
  if (block.waiting == block.live) {
    const int result = reduce_votes(block, kind);
    complete_block(block, kind);
    acquire_token(token);
    fiber->waits_in = Collective::kNone;
    return result;
  }
  fiber->next = nullptr;
  if (block.last_waiter)
    block.last_waiter->next = fiber;
  else
    block.waiters = fiber;
  block.last_waiter = fiber;
  block_until_released(fiber);
  acquire_token(token);
  return static_cast<int>(fiber->result);
}

unsigned long long warp_collective(Fiber* fiber, Collective kind, unsigned mask, unsigned long long value, int lane,
                                   int width, Site site) {
  const RuntimeScope runtime;
  Warp& warp = warp_of(fiber);
  const bool orders = kind == Collective::kWarpSync;  // the others move values and order no memory
  if (orders) release_token(&warp.ordered_by);
  fiber->waits_in = kind;
  fiber->site = site;
  fiber->mask = mask;
  fiber->value = value;
  fiber->lane_argument = lane;
  fiber->width = width;
  const unsigned bit = 1u << lane_of(fiber);
  if (!(mask & bit)) {
    fail(*fiber->owner, "thread %u is not in the mask 0x%08x of its own %s at %s:%d", thread_of(fiber), mask,
         collective_name(kind), site.file, site.line);
    suspend(fiber, State::kFailed);
  }
  if (width < 1 || width > 32 || (width & (width - 1))) {
    fail(*fiber->owner, "width %d of %s at %s:%d is not a power of two up to 32", width, collective_name(kind),
         site.file, site.line);
    suspend(fiber, State::kFailed);
  }
  if (contradicts(warp, fiber)) {
    report_contradiction(warp, fiber);
    suspend(fiber, State::kFailed);
  }
  warp.parked |= bit;
  const unsigned group = complete_group(warp, fiber);
  if (group) {
    finish_group(warp, group, fiber);
    fiber->waits_in = Collective::kNone;
  } else {
    block_until_released(fiber);
  }
  if (orders) acquire_token(&warp.ordered_by);
  return fiber->result;
}

void thread_returned(Block& block, Fiber* fiber) {
  Warp& warp = warp_of(fiber);
  warp.live &= ~(1u << lane_of(fiber));
  --block.live;
  for (unsigned rest = warp.parked; rest; rest &= rest - 1) {
    const unsigned group = complete_group(warp, warp.lane[__builtin_ctz(rest)]);
    if (!group) continue;
    finish_group(warp, group, nullptr);
    rest = warp.parked;
    if (!rest) break;
  }
  if (block.waiters && block.waiting == block.live) complete_block(block, block.waiters->waits_in);
  if (block.live && block.blocked == block.live) fail_deadlocked(block);
}

}  // namespace emulated
}  // namespace nvep
