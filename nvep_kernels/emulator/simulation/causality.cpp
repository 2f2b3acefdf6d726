// Which accesses happened before which: views of threads, warps and blocks, joined at barriers and kernel boundaries.
#include "emulator/simulation/simulation.h"

namespace nvep {
namespace simulated {

namespace {

void drop(Views& views, View*& view) {
  views.release(view);
  view = nullptr;
}

void gather(Views& views, View*& into, const View* from) {
  if (!from) return;
  if (into)
    views.join(into, from);
  else
    into = views.copy(from);
}

}  // namespace

const View* view_of(BlockRun& block, u32 thread) {
  if (block.threads[thread].own) return block.threads[thread].own;
  const View* warp = block.warps[thread / 32].view;
  return warp ? warp : block.view;
}

View* own_view(BlockRun& block, u32 thread) {
  Thread& state = block.threads[thread];
  if (!state.own) state.own = block.run->sim->views.copy(view_of(block, thread));
  return state.own;
}

View* publish(BlockRun& block, u32 thread) {
  Views& views = block.run->sim->views;
  Thread& state = block.threads[thread];
  View* view = views.copy(view_of(block, thread));
  views.add(view, {static_cast<u16>(block.slot), static_cast<u16>(thread), block.epoch, state.releases});
  ++state.releases;
  return view;
}

// Whoever returns from a barrier first finds everybody's view gathered: all have arrived by then.
void arrive_block(BlockRun& block, u32 thread) {
  gather(block.run->sim->views, block.gathered, block.threads[thread].own);
  block.threads[thread].block_round = block.round;
}

void leave_block(BlockRun& block, u32 thread) {
  Views& views = block.run->sim->views;
  if (block.threads[thread].block_round == block.round) {
    ++block.round;
    for (u32 w = 0; w < (block.block.grid->threads + 31) / 32; ++w) {
      views.join(block.view, block.warps[w].view);
      drop(views, block.warps[w].view);
      block.warps[w].releases = 0;
    }
    views.join(block.view, block.gathered);
    drop(views, block.gathered);
    block.view->clock[block.slot] = ++block.epoch;
  }
  drop(views, block.threads[thread].own);
  block.threads[thread].releases = 0;
}

void arrive_warp(BlockRun& block, u32 thread) {
  WarpViews& warp = block.warps[thread / 32];
  gather(block.run->sim->views, warp.gathered, block.threads[thread].own);
  if (warp.releases < block.threads[thread].releases) warp.releases = block.threads[thread].releases;
  block.threads[thread].warp_round = warp.round;
}

void leave_warp(BlockRun& block, u32 thread) {
  Views& views = block.run->sim->views;
  WarpViews& warp = block.warps[thread / 32];
  if (block.threads[thread].warp_round == warp.round) {
    ++warp.round;
    if (!warp.view) warp.view = views.copy(block.view);
    views.join(warp.view, warp.gathered);
    drop(views, warp.gathered);
    const u16 who = static_cast<u16>(kWholeWarp | thread / 32);
    views.add(warp.view, {static_cast<u16>(block.slot), who, block.epoch, warp.releases});
    ++warp.releases;
  }
  drop(views, block.threads[thread].own);
  block.threads[thread].releases = warp.releases;
}

void forget_threads(BlockRun& block) {
  Views& views = block.run->sim->views;
  for (u32 t = 0; t < block.block.grid->threads; ++t) {
    Thread& state = block.threads[t];
    drop(views, state.own);
    drop(views, state.pending[0]);
    drop(views, state.pending[1]);
    drop(views, state.released[0]);
    drop(views, state.released[1]);
  }
  for (u32 w = 0; w < (block.block.grid->threads + 31) / 32; ++w) {
    drop(views, block.warps[w].view);
    drop(views, block.warps[w].gathered);
  }
  drop(views, block.gathered);
  drop(views, block.view);
}

// What a later grid of the stream knows: everything. What relaxed loads saw without a fence stays unacquired.
void finish_run(Run& run) {
  Sim& sim = *run.sim;
  Queue& stream = *run.stream;
  for (u32 b = 0; b < run.blocks.size; ++b) {
    BlockRun& block = *run.blocks[b];
    sim.views.join(stream.view, block.view);
    for (u32 w = 0; w < (run.grid.threads + 31) / 32; ++w) sim.views.join(stream.view, block.warps[w].view);
    for (u32 t = 0; t < run.grid.threads; ++t) sim.views.join(stream.view, block.threads[t].own);
    stream.epochs[block.slot - stream.first_slot] = block.epoch + 1;
    stream.view->clock[block.slot] = stream.view->clock[bulk_slot(block)] = block.epoch + 1;
  }
  if (run.observed) gather(sim.views, stream.axiom, run.observed);
}

void update_least(Sim& sim) {
  memset(sim.least, 0xff, sim.options.slots * sizeof(u32));
  auto lower = [&](const View* view) {
    for (u32 i = 0; i < sim.options.slots; ++i)
      if (view->clock[i] < sim.least[i]) sim.least[i] = view->clock[i];
  };
  for (u32 s = 0; s < sim.streams.size; ++s) {
    Queue& stream = *sim.streams[s];
    if (stream_idle(stream)) continue;
    lower(stream.view);
    for (Run* run : stream.runs)
      if (run) lower(run->view);
  }
}

}  // namespace simulated
}  // namespace nvep
