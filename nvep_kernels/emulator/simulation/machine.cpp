// Who runs next: one OS thread, every decision drawn from the seed.
#include <stdarg.h>
#include <stdio.h>

#include "emulator/simulation/simulation.h"

namespace nvep {
namespace simulated {
namespace {

constexpr u64 kPickNs = 20;
constexpr u64 kHeldSteps =
    100;                     // those whom a written schedule holds back come on this many times while time jumps once
constexpr u32 kSweeps = 24;  // a poll that meets at warp collectives takes several turns
constexpr u64 kForever = ~0ull;

Fiber* take_any(Sim& sim, Vec<Fiber*>& from) {
  const u32 i = sim.random.below(from.size);
  Fiber* fiber = from[i];
  from.swap_out(i);
  return fiber;
}

void resume(Sim& sim, Fiber* fiber) {
  BlockRun& block = *block_of(fiber);
  Grid& grid = block.run->grid;
  Rank& rank = sim.ranks[block.run->stream->rank];
  fiber->state = State::kReady;
  sim.running = fiber;
  const u64 moves = sim.moves;
  emulated::context_switch(&sim.scheduler, fiber->context);
  sim.running = nullptr;
  if (grid.failed) {
    sim.failed = true;
    return;
  }
  const bool polls = fiber->state != State::kFinished && thread_of_fiber(fiber)->polls;
  if (fiber->state == State::kSpinning) rank.spinning.push(fiber);
  if (polls) {
    sim.idle = sim.moves == moves ? sim.idle + 1 : 0;
    if (fiber->state != State::kReady) return;
  } else {
    ++sim.moves;
    sim.idle = 0;
  }
  if (fiber->state == State::kFinished) return thread_finished(fiber);
  if (fiber->state != State::kReady) return;
  if (thread_of_fiber(fiber)->held_until > sim.picks)
    sim.held.push(fiber);
  else
    (polls ? rank.spinning : rank.ready).push(fiber);
}

bool startable(Sim& sim, u32 rank, Queue** chosen) {
  u32 found = 0;
  for (u32 s = 0; s < sim.streams.size; ++s) {
    Queue* stream = sim.streams[s];
    if (stream->rank != rank || !can_start(sim, *stream)) continue;
    if (sim.random.below(++found) == 0) *chosen = stream;
  }
  return found != 0;
}

void find_startable(Sim& sim) {
  sim.streams_changed = false;
  for (u32 r = 0; r < sim.ranks.size; ++r) sim.ranks[r].startable = false;
  for (u32 s = 0; s < sim.streams.size; ++s)
    if (can_start(sim, *sim.streams[s])) sim.ranks[sim.streams[s]->rank].startable = true;
}

void start(Sim& sim, Queue* stream) {
  ++sim.moves;
  sim.idle = 0;
  sim.streams_changed = true;
  start_next(sim, *stream);
}

void run_rank(Sim& sim, u32 index, bool active) {
  Rank& rank = sim.ranks[index];
  Queue* stream = nullptr;
  if (rank.startable && (!rank.ready.size || sim.random.chance(128)) && startable(sim, index, &stream))
    return start(sim, stream);
  if (rank.ready.size && (active || !rank.spinning.size || sim.random.chance(896)))
    return resume(sim, take_any(sim, rank.ready));
  if (rank.spinning.size) resume(sim, take_any(sim, rank.spinning));
}

// A rank drawn by weight; `active` ones have more to do than to poll. Returns the number of ranks if there is none.
u32 draw_rank(Sim& sim, const Vec<u32>& weights) {
  u32 total = 0;
  for (u32 r = 0; r < weights.size; ++r) total += weights[r];
  if (!total) return weights.size;
  u32 left = sim.random.below(total);
  for (u32 r = 0; r < weights.size; ++r) {
    if (left < weights[r]) return r;
    left -= weights[r];
  }
  return weights.size;
}

void release_held(Sim& sim, u32 i) {
  Fiber* fiber = sim.held[i];
  sim.held.erase(i);
  thread_of_fiber(fiber)->held_until = 0;
  sim.ranks[block_of(fiber)->run->stream->rank].ready.push(fiber);
  sim.idle = 0;
}

// Everybody polls and sees the newest values; true if that changed nothing.
bool sweep(Sim& sim) {
  const u64 moves = sim.moves;
  sim.fresh = true;
  for (u32 pass = 0; pass < kSweeps && sim.moves == moves; ++pass) {
    for (u32 r = 0; r < sim.ranks.size; ++r) {
      Vec<Fiber*>& spinning = sim.ranks[r].spinning;
      for (u32 n = spinning.size; n && !sim.failed && spinning.size; --n) {
        Fiber* fiber = spinning[0];
        spinning.erase(0);
        resume(sim, fiber);
      }
    }
  }
  sim.fresh = false;
  return sim.moves == moves;
}

struct Situation {
  u32 active, active_paused, spinners;
};

Situation weigh(Sim& sim, Vec<u32>& active, Vec<u32>& all) {
  Situation now = {};
  if (sim.streams_changed) find_startable(sim);
  active.size = all.size = 0;
  for (u32 r = 0; r < sim.ranks.size; ++r) {
    Rank& rank = sim.ranks[r];
    const bool busy = rank.ready.size || rank.startable, paused = rank.paused_until > sim.picks;
    now.spinners += rank.spinning.size;
    now.active += busy && !paused;
    now.active_paused += busy && paused;
    active.push(busy && !paused ? rank.weight : 0);
    all.push((busy || rank.spinning.size) && !paused ? rank.weight : 0);
  }
  return now;
}

// Nobody who may run has anything but polling to do. True if something was done about it.
bool relax(Sim& sim, const Situation& now) {
  if (sim.idle < now.spinners / 4 + 8 && now.spinners) return false;
  if (now.active_paused) {
    for (u32 r = 0; r < sim.ranks.size; ++r) sim.ranks[r].paused_until = 0;
    sim.idle = 0;
    return true;
  }
  if (sim.held.size && !sim.rules.any()) {
    release_held(sim, sim.random.below(sim.held.size));
    return true;
  }
  if (!now.spinners && !sim.held.size) return false;
  if (sim.idle < now.spinners + 8 && now.spinners) return false;
  if (!sweep(sim)) return true;
  if (sim.held.size) {
    sim.now_ns += sim.options.jump_ns / kHeldSteps;
    release_held(sim, 0);
  } else {
    sim.now_ns += sim.options.jump_ns;
  }
  return true;
}

bool finished(const Sim& sim, const Queue* target) {
  if (target) return stream_idle(*target);
  for (u32 s = 0; s < sim.streams.size; ++s)
    if (!stream_idle(*sim.streams[s])) return false;
  return true;
}

void disturb(Sim& sim) {
  if (sim.held.size) {
    const u32 i = static_cast<u32>(sim.picks % sim.held.size);
    if (thread_of_fiber(sim.held[i])->held_until <= sim.picks) release_held(sim, i);
  }
  if (sim.picks % 64 == 0 && sim.random.chance(sim.options.pause))
    sim.ranks[sim.random.below(sim.ranks.size)].paused_until = sim.picks + (64ull << sim.random.below(8));
}

}  // namespace

void run_until(Sim& sim, Queue* target) {
  Vec<u32> active, all;
  while (!sim.failed && !finished(sim, target)) {
    if (++sim.picks > sim.options.budget) {
      sim.fail("%llu scheduling decisions and no end", sim.options.budget);
      break;
    }
    sim.now_ns += kPickNs;
    disturb(sim);
    const Situation now = weigh(sim, active, all);
    if (!now.active && relax(sim, now)) continue;
    const bool poll = !now.active || sim.random.chance(32);
    const u32 rank = draw_rank(sim, poll ? all : active);
    if (rank < sim.ranks.size) {
      run_rank(sim, rank, !poll);
    } else if (!now.spinners && !now.active_paused && !sim.held.size) {
      sim.fail("nobody can run: a stream waits for an event that nobody records");
    } else {
      for (u32 r = 0; r < sim.ranks.size; ++r) sim.ranks[r].paused_until = 0;
    }
  }
  active.free_all();
  all.free_all();
}

void step_aside(Fiber* fiber, State state) {
  fiber->state = state;
  emulated::context_switch(&fiber->context, block_of(fiber)->run->sim->scheduler);
}

void wake(Fiber* fiber) {
  Run& run = *block_of(fiber)->run;
  Rank& rank = run.sim->ranks[run.stream->rank];
  if (thread_of_fiber(fiber)->polls) return rank.spinning.push(fiber);
  rank.ready.push(fiber);
  ++run.sim->moves;
}

void stay_back(Fiber* fiber, Site site) {
  BlockRun& block = *block_of(fiber);
  Sim& sim = *block.run->sim;
  if (!sim.rules.any()) return;
  const u32 rank = block.run->stream->rank, line = static_cast<u32>(site.line);
  const Place place = {rank, block.block.index, fiber->thread_index.x, block.run->grid.name, site.file, line};
  if (!sim.rules.apply(Directive::kLate, place)) return;
  Thread& thread = *thread_of_fiber(fiber);
  thread.held_until = kForever;
  step_aside(fiber, State::kReady);
  thread.held_until = 0;
}

void before_access(Fiber* fiber, Site site) {
  Sim& sim = *block_of(fiber)->run->sim;
  stay_back(fiber, site);
  if (!sim.random.chance(sim.options.preempt)) return;
  if (sim.random.chance(sim.options.hold))
    thread_of_fiber(fiber)->held_until = sim.picks + (32ull << sim.random.below(8));
  step_aside(fiber, State::kReady);
}

void Sim::fail(const char* format, ...) {
  if (failed) return;
  failed = true;
  va_list list;
  va_start(list, format);
  vsnprintf(message, sizeof(message), format, list);
  va_end(list);
}

}  // namespace simulated

// What emulator/collectives.cpp asks of a scheduler.
namespace emulated {

void suspend(Fiber* fiber, State state) {
  simulated::step_aside(fiber, state);
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
  --fiber->owner->blocked;
  if (fiber->waits_in < Collective::kWarpSync) simulated::thread_of_fiber(fiber)->polls = 0;
  fiber->waits_in = Collective::kNone;
  simulated::wake(fiber);
}

}  // namespace emulated
}  // namespace nvep
