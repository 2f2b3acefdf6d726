// What the model leaves open, decided by the rules of a written schedule first and by chance otherwise; reports.
#include <stdio.h>

#include "emulator/simulation/simulation.h"

namespace nvep {
namespace simulated {

Sim::Sim(const Options& given)
    : options(given), random(given.seed), views(given.slots), memory(views, *this), trace(given.trace) {
  least = static_cast<u32*>(calloc(given.slots, sizeof(u32)));
  if (!least) abort();
}

namespace {

void free_work(Work& work) {
  free(work.data);
}

// Threads that never ended keep their stacks until the set that lent them is destroyed.
void free_stream(Sim& sim, Queue* stream) {
  for (Run* run : stream->runs)
    if (run) destroy_run(run);
  for (u32 i = 0; i < stream->work.size; ++i) free_work(stream->work[i]);
  stream->work.free_all();
  free(stream->epochs);
  sim.views.release(stream->view);
  sim.views.release(stream->axiom);
  sim.views.release(stream->before);
  free(stream);
}

}  // namespace

Sim::~Sim() {
  for (u32 s = 0; s < streams.size; ++s) free_stream(*this, streams[s]);
  for (u32 e = 0; e < edges.size; ++e) {
    views.release(edges[e]->view);
    views.release(edges[e]->axiom);
    free(edges[e]);
  }
  for (u32 r = 0; r < ranks.size; ++r) {
    ranks[r].ready.free_all();
    ranks[r].spinning.free_all();
  }
  for (u32 i = 0; i < spare_shared.size; ++i) free(spare_shared[i]);
  for (u32 i = 0; i < names.size; ++i) free(names[i]);
  ranks.free_all();
  streams.free_all();
  edges.free_all();
  names.free_all();
  held.free_all();
  records.free_all();
  alarms.free_all();
  spare_shared.free_all();
  free(least);
}

const char* Sim::keep_name(const char* name) {
  for (u32 i = 0; i < names.size; ++i)
    if (strcmp(names[i], name) == 0) return names[i];
  names.push(strdup(name));
  return names.last();
}

Queue* Sim::add_stream(u32 rank) {
  while (ranks.size <= rank) {
    const u32 weight = options.pause ? 1u << (2 * random.below(3)) : 1;
    ranks.push({{}, {}, 0, weight, false});
  }
  const u32 positions = 2 * options.blocks;
  if (slots_used + 1 + 2 * positions > options.slots) return nullptr;
  auto* stream = static_cast<Queue*>(calloc(1, sizeof(Queue)));
  if (!stream) abort();
  stream->sim = this;
  stream->index = streams.size;
  stream->rank = rank;
  stream->copy_slot = slots_used;
  stream->first_slot = slots_used + 1;
  stream->copy_epoch = 1;
  slots_used += 1 + 2 * positions;
  stream->epochs = static_cast<u32*>(malloc(positions * sizeof(u32)));
  if (!stream->epochs) abort();
  stream->view = views.fresh();
  stream->view->clock[stream->copy_slot] = 1;
  for (u32 i = 0; i < positions; ++i) stream->epochs[i] = 1;
  for (u32 i = 0; i < 2 * positions; ++i) stream->view->clock[stream->first_slot + i] = 1;
  streams.push(stream);
  return stream;
}

namespace {

Place place_of(const Actor& actor, Site site) {
  return {actor.rank, actor.block, actor.thread, actor.kernel, site.file, static_cast<u32>(site.line)};
}

}  // namespace

u32 Sim::older(const Actor& actor, Site site, u32 count) {
  const bool bounded = running && thread_of_fiber(running)->polls >= options.spin_bound;
  if (fresh || bounded)
    distance = 0;
  else if (rules.any() && rules.apply(Directive::kStale, place_of(actor, site)))
    distance = count;
  else if (random.chance(options.stale))
    distance = random.chance(512) ? count : random.below(count + 1);
  else
    distance = 0;
  return distance;
}

u32 Sim::earlier(const Actor& actor, Site site, u32 count) {
  if (rules.any() && rules.apply(Directive::kEarly, place_of(actor, site)))
    distance = count;
  else if (random.chance(options.early))
    distance = random.chance(512) ? count : random.below(count + 1);
  else
    distance = 0;
  return distance;
}

bool Sim::at_once(const Actor& actor, Site site) {
  if (rules.any() && rules.apply(Directive::kEarly, place_of(actor, site))) return true;
  return random.chance(options.early);
}

namespace {

const Queue* stream_of_slot(const Sim& sim, u32 slot) {
  for (u32 s = 0; s < sim.streams.size; ++s) {
    const Queue* stream = sim.streams[s];
    if (slot >= stream->copy_slot && slot < stream->first_slot + 4 * sim.options.blocks) return stream;
  }
  return nullptr;
}

}  // namespace

void Sim::conflict(const Actor& actor, Site site, u64 address, const char* what, const Mark& other) {
  if (lenient) return;
  const u32 slot = slot_of(other.stamp);
  const Queue* stream = stream_of_slot(*this, slot);
  const bool copy = stream && slot == stream->copy_slot;
  const u32 block = stream && !copy ? (slot - stream->first_slot) % options.blocks : 0;
  const bool bulk = stream && slot >= stream->first_slot + 2 * options.blocks;
  trace.note(actor, Did::kConflict, address, 0, site, 0, 0);
  char who[32] = "a bulk copy";
  if (!bulk) snprintf(who, sizeof(who), "thread %u", thread_of(other.stamp));
  fail("data race at 0x%llx: %s: rank %u block %u thread %u at %s:%d (%s) meets rank %u block %u %s at %s:%d", address,
       what, actor.rank, actor.block, actor.thread, site.file, site.line, actor.kernel, stream ? stream->rank : 0,
       block, who, other.site.file ? other.site.file : "start", other.site.line);
}

}  // namespace simulated
}  // namespace nvep
