// Streams and the grids that they start and end.
#include <stddef.h>
#include <stdio.h>

#include "emulator/simulation/simulation.h"

namespace nvep {
namespace simulated {

BlockRun* block_of(Fiber* fiber) {
  return reinterpret_cast<BlockRun*>(reinterpret_cast<char*>(fiber->owner) - offsetof(BlockRun, block));
}

Thread* thread_of_fiber(Fiber* fiber) {
  return &block_of(fiber)->threads[fiber->thread_index.x];
}

Actor actor_of(Fiber* fiber) {
  BlockRun& block = *block_of(fiber);
  const u32 thread = fiber->thread_index.x;
  const Thread& state = block.threads[thread];
  const Queue& stream = *block.run->stream;
  const Stamp stamp = make_stamp(block.slot, thread, block.epoch, state.releases);
  return {stream.rank,
          stream.index,
          block.block.index,
          thread,
          block.slot,
          block.first_epoch,
          stamp,
          view_of(block, thread),
          block.run->axiom[state.waited],
          block.run->grid.name};
}

// A stream's own copies: each in an epoch of its own.
Actor actor_of(Queue& stream) {
  const Stamp stamp = make_stamp(stream.copy_slot, 0, stream.copy_epoch, 0);
  return {stream.rank, stream.index, 0,     0, stream.copy_slot, stream.copy_epoch, stamp,
          stream.view, stream.axiom, "copy"};
}

bool stream_idle(const Queue& stream) {
  return !stream.runs[0] && !stream.runs[1] && stream.next == stream.work.size;
}

bool can_start(Sim&, Queue& stream) {
  if (stream.next == stream.work.size || stream.runs[1]) return false;
  const Work& work = stream.work[stream.next];
  if (!stream.runs[0]) return work.kind != Kind::kAwait || work.edge->reached;
  return work.kind == Kind::kLaunch && work.dependent && stream.runs[0]->unready_blocks == 0;
}

namespace {

View* completed_grids(Sim& sim, const Queue& stream) {
  View* view = sim.views.fresh();
  for (u32 s = 0; s < sim.streams.size; ++s) {
    const Queue& other = *sim.streams[s];
    if (other.rank != stream.rank) continue;
    const u32 end = other.first_slot + 4 * sim.options.blocks;
    for (u32 slot = other.copy_slot; slot < end; ++slot) view->clock[slot] = stream.view->clock[slot];
  }
  return view;
}

View* axiom_now(Sim& sim, const Queue& stream) {
  return sim.options.axiom && stream.axiom ? sim.views.copy(stream.axiom) : nullptr;
}

// What a dependent grid waits for is complete and visible.
void let_go(Sim& sim, Run& run) {
  run.waited = sim.views.copy(run.stream->view);
  run.completed[1] = completed_grids(sim, *run.stream);
  run.axiom[1] = axiom_now(sim, *run.stream);
  for (u32 i = 0; i < run.awaiting.size; ++i) wake(run.awaiting[i]);
  run.awaiting.size = 0;
}

void fiber_main() {
  Fiber* fiber = emulated::current();
  const Grid* grid = fiber->owner->grid;
  grid->entry(grid->arguments);
  step_aside(fiber, State::kFinished);
  abort();
}

bool add_fiber(Sim& sim, BlockRun& block, u32 thread) {
  const u64 base = sim.stacks.take();
  if (!base) return false;
  Fiber* fiber = emulated::record_of(base);
  memset(static_cast<void*>(fiber), 0, sizeof(Fiber));
  fiber->operations = &kSimulatedOperations;
  fiber->thread_index = {thread, 0, 0};
  fiber->block_index = {block.block.index, 0, 0};
  fiber->block_dim = {block.run->grid.threads, 1, 1};
  fiber->grid_dim = {block.run->grid.blocks, 1, 1};
  fiber->owner = &block.block;
  fiber->context = emulated::context_prepare(emulated::stack_bottom(base), reinterpret_cast<char*>(fiber), fiber_main);
  block.block.warps[thread / 32].lane[thread % 32] = fiber;
  sim.ranks[block.run->stream->rank].ready.push(fiber);
  return true;
}

BlockRun* new_block(Sim& sim, Run& run, u32 index) {
  const u32 threads = run.grid.threads, warps = (threads + 31) / 32;
  auto* block = static_cast<BlockRun*>(calloc(1, sizeof(BlockRun) + warps * sizeof(emulated::Warp)));
  if (!block) abort();
  block->threads = static_cast<Thread*>(calloc(threads, sizeof(Thread)));
  block->warps = static_cast<WarpViews*>(calloc(warps, sizeof(WarpViews)));
  if (!block->threads || !block->warps) abort();
  Queue& stream = *run.stream;
  block->run = &run;
  block->slot = stream.first_slot + stream.next_set * sim.options.blocks + index;
  block->epoch = block->first_epoch = stream.epochs[block->slot - stream.first_slot];
  block->view = sim.views.copy(run.view);
  block->view->clock[block->slot] = block->epoch;
  block->block.grid = &run.grid;
  block->block.index = index;
  block->block.live = threads;
  for (u32 w = 0; w < warps; ++w) {
    const u32 lanes = threads - w * 32;
    block->block.warps[w].live = lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
  }
  if (sim.spare_shared.size) block->block.shared = sim.spare_shared.data[--sim.spare_shared.size];
  return block;
}

void start_grid(Sim& sim, Queue& stream, Work& work) {
  auto* run = static_cast<Run*>(calloc(1, sizeof(Run)));
  if (!run) abort();
  run->sim = &sim;
  run->stream = &stream;
  run->dependent = work.dependent && stream.before;
  run->completed[0] = completed_grids(sim, stream);
  run->axiom[0] = axiom_now(sim, stream);
  run->view = sim.views.copy(run->dependent ? stream.before : stream.view);
  if (run->dependent && !stream.runs[0]) let_go(sim, *run);
  sim.views.release(stream.before);
  stream.before = sim.views.copy(run->view);
  Grid& grid = run->grid;
  grid.entry = work.entry;
  grid.arguments = work.data;
  grid.name = work.name;
  grid.blocks = work.blocks;
  grid.threads = work.threads;
  grid.dynamic_bytes = work.shared_bytes;
  grid.message = sim.message;
  grid.message_bytes = sizeof(sim.message);
  run->live_blocks = run->unready_blocks = work.blocks;
  stream.runs[stream.runs[0] ? 1 : 0] = run;
  for (u32 b = 0; b < work.blocks; ++b) {
    run->blocks.push(new_block(sim, *run, b));
    for (u32 t = 0; t < work.threads; ++t)
      if (!add_fiber(sim, *run->blocks[b], t)) return sim.fail("no memory for stacks");
  }
  stream.next_set ^= 1;
  Actor actor = actor_of(stream);
  actor.kernel = grid.name;
  sim.trace.note(actor, Did::kStart, work.blocks, work.threads, {"", 0}, 0, 0);
}

void copy_memory(Sim& sim, Queue& stream, const Work& work) {
  const Actor actor = actor_of(stream);
  const Site site = {"stream copy", 0};
  if (work.kind == Kind::kCopy && !sim.memory.weak_load(actor, work.source, work.bytes, site, false)) return;
  if (!sim.memory.weak_store(actor, work.target, work.bytes, site, false)) return;
  void* target = reinterpret_cast<void*>(work.target);
  if (work.kind == Kind::kCopy)
    memmove(target, reinterpret_cast<const void*>(work.source), work.bytes);
  else if (work.kind == Kind::kCopyIn)
    memcpy(target, work.data, work.bytes);
  else
    memset(target, static_cast<int>(work.source), work.bytes);
  sim.trace.note(actor, Did::kCopy, work.target, work.bytes, site, 0, 0);
  stream.view->clock[stream.copy_slot] = ++stream.copy_epoch;
}

void reach(Sim& sim, Queue& stream, Edge& edge) {
  edge.view = sim.views.copy(stream.view);
  edge.axiom = stream.axiom ? sim.views.copy(stream.axiom) : nullptr;
  edge.reached = true;
  sim.streams_changed = true;
}

void follow(Sim& sim, Queue& stream, const Edge& edge) {
  sim.views.join(stream.view, edge.view);
  if (!edge.axiom) return;
  if (stream.axiom)
    sim.views.join(stream.axiom, edge.axiom);
  else
    stream.axiom = sim.views.copy(edge.axiom);
}

}  // namespace

void start_next(Sim& sim, Queue& stream) {
  Work& work = stream.work[stream.next++];
  if (work.kind != Kind::kLaunch) {  // only a launch directly behind another can depend on it
    sim.views.release(stream.before);
    stream.before = nullptr;
  }
  switch (work.kind) {
    case Kind::kLaunch:
      return start_grid(sim, stream, work);
    case Kind::kRecord:
      return reach(sim, stream, *work.edge);
    case Kind::kAwait:
      return follow(sim, stream, *work.edge);
    default:
      return copy_memory(sim, stream, work);
  }
}

void launch_dependents(BlockRun& block) {
  if (block.launched_dependents) return;
  block.launched_dependents = true;
  --block.run->unready_blocks;
  block.run->sim->streams_changed = true;
}

void destroy_run(Run* run) {
  Sim& sim = *run->sim;
  for (u32 b = 0; b < run->blocks.size; ++b) {
    BlockRun* block = run->blocks[b];
    forget_threads(*block);
    free_bulk(*block);
    if (block->block.shared) sim.spare_shared.push(block->block.shared);
    free(block->block.dynamic);
    free(block->threads);
    free(block->warps);
    free(block);
  }
  for (u32 i = 0; i < 2; ++i) {
    sim.views.release(run->completed[i]);
    sim.views.release(run->axiom[i]);
  }
  sim.views.release(run->view);
  sim.views.release(run->waited);
  sim.views.release(run->observed);
  run->blocks.free_all();
  run->awaiting.free_all();
  free(run);
}

namespace {

void end_run(Sim& sim, Run* run) {
  sim.streams_changed = true;
  Queue& stream = *run->stream;
  finish_run(*run);
  Actor actor = actor_of(stream);
  actor.kernel = run->grid.name;
  sim.trace.note(actor, Did::kEnd, 0, 0, {"", 0}, 0, 0);
  if (run == stream.runs[0]) {
    stream.runs[0] = stream.runs[1];
    stream.runs[1] = nullptr;
    if (stream.runs[0]) let_go(sim, *stream.runs[0]);
  } else {
    stream.runs[1] = nullptr;  // it never waited for the one before, which goes on
  }
  destroy_run(run);
  update_least(sim);
}

}  // namespace

void thread_finished(Fiber* fiber) {
  BlockRun& block = *block_of(fiber);
  Run* run = block.run;
  Sim& sim = *run->sim;
  const u64 base = reinterpret_cast<u64>(fiber) & ~(emulated::kStackBytes - 1);
  if (emulated::stack_overflowed(base)) return sim.fail("a thread of %s overflowed its stack", run->grid.name);
  if (bulk_left(fiber)) return sim.fail("a thread of %s ends before its bulk copies", run->grid.name);
  emulated::thread_returned(block.block, fiber);
  sim.stacks.give(base);
  if (block.block.live) return;
  launch_dependents(block);
  if (--run->live_blocks == 0) end_run(sim, run);
}

}  // namespace simulated
}  // namespace nvep
