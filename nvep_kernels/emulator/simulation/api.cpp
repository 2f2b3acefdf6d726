// What nvep/runtime/simulated_library.py calls. Not thread-safe: one OS thread at a time.
#include "emulator/simulation/simulation.h"

#define NVEP_EXPORT extern "C" __attribute__((visibility("default")))

using nvep::simulated::Edge;
using nvep::simulated::Kind;
using nvep::simulated::Options;
using nvep::simulated::Queue;
using nvep::simulated::Sim;
using nvep::simulated::Work;

namespace {

void* copy_of(const void* bytes, unsigned long long n) {
  const unsigned long long padded = (n + 64) & ~63ull;
  void* copy = aligned_alloc(64, padded ? padded : 64);
  if (!copy) abort();
  if (n) memcpy(copy, bytes, n);
  return copy;
}

void enqueue(Queue* stream, const Work& work) {
  if (stream->next == stream->work.size) {
    for (unsigned i = 0; i < stream->work.size; ++i) {
      if (stream->runs[0] || stream->runs[1]) break;  // a grid in flight reads its arguments
      free(stream->work[i].data);
      if (i + 1 == stream->work.size) stream->work.size = stream->next = 0;
    }
  }
  stream->work.push(work);
  stream->sim->streams_changed = true;
}

}  // namespace

NVEP_EXPORT Sim* nvep_sim_create(const Options* options) {
  return new (malloc(sizeof(Sim))) Sim(*options);
}

NVEP_EXPORT void nvep_sim_destroy(Sim* sim) {
  sim->~Sim();
  free(sim);
}

NVEP_EXPORT Queue* nvep_sim_stream(Sim* sim, unsigned rank) {
  return sim->add_stream(rank);
}

NVEP_EXPORT void nvep_sim_records(Sim* sim, unsigned long long start, unsigned long long bytes) {
  sim->records.push(start);
  sim->records.push(start + bytes);
}

NVEP_EXPORT void nvep_sim_alarm(Sim* sim, unsigned long long address) {
  sim->alarms.push(address);
}

// Everything has ended, and a host waited for it.
NVEP_EXPORT void nvep_sim_forget(Sim* sim) {
  sim->memory.forget();
  sim->trace.go_on();
}

NVEP_EXPORT void nvep_sim_rule(Sim* sim, const nvep::simulated::Rule* rule) {
  sim->rules.add(*rule);
}

struct NvepSimLaunch {
  void (*entry)(const void*);
  const void* arguments;
  unsigned long long argument_bytes;
  const char* name;
  unsigned blocks, threads, dependent, shared_bytes;
};

// 0, or 1 if a grid has more blocks than the simulation was made for.
NVEP_EXPORT int nvep_sim_launch(Queue* stream, const NvepSimLaunch* launch) {
  if (launch->blocks > stream->sim->options.blocks) return 1;
  Work work = {};
  work.kind = Kind::kLaunch;
  work.entry = launch->entry;
  work.data = copy_of(launch->arguments, launch->argument_bytes);
  work.name = stream->sim->keep_name(launch->name);
  work.blocks = launch->blocks;
  work.threads = launch->threads;
  work.dependent = launch->dependent;
  work.shared_bytes = launch->shared_bytes;
  enqueue(stream, work);
  return 0;
}

NVEP_EXPORT void nvep_sim_copy_in(Queue* stream, unsigned long long target, const void* bytes, unsigned long long n) {
  Work work = {};
  work.kind = Kind::kCopyIn;
  work.data = copy_of(bytes, n);
  work.target = target;
  work.bytes = n;
  enqueue(stream, work);
}

NVEP_EXPORT void nvep_sim_copy(Queue* stream, unsigned long long target, unsigned long long source,
                               unsigned long long n) {
  Work work = {};
  work.kind = Kind::kCopy;
  work.target = target;
  work.source = source;
  work.bytes = n;
  enqueue(stream, work);
}

NVEP_EXPORT void nvep_sim_fill(Queue* stream, unsigned long long target, unsigned byte, unsigned long long n) {
  Work work = {};
  work.kind = Kind::kFill;
  work.target = target;
  work.source = byte;
  work.bytes = n;
  enqueue(stream, work);
}

// An event of the simulation, recorded on `stream`; lives as long as the simulation.
NVEP_EXPORT Edge* nvep_sim_record(Queue* stream) {
  auto* edge = static_cast<Edge*>(calloc(1, sizeof(Edge)));
  if (!edge) abort();
  stream->sim->edges.push(edge);
  Work work = {};
  work.kind = Kind::kRecord;
  work.edge = edge;
  enqueue(stream, work);
  return edge;
}

NVEP_EXPORT void nvep_sim_await(Queue* stream, Edge* edge) {
  Work work = {};
  work.kind = Kind::kAwait;
  work.edge = edge;
  enqueue(stream, work);
}

NVEP_EXPORT int nvep_sim_reached(const Edge* edge) {
  return edge->reached;
}

// Runs until `stream` (or, if null, every stream) has nothing left. Null, or why it could not go on.
NVEP_EXPORT const char* nvep_sim_run(Sim* sim, Queue* stream) {
  if (!sim->failed) nvep::simulated::run_until(*sim, stream);
  return sim->failed ? sim->message : nullptr;
}

NVEP_EXPORT unsigned long long nvep_sim_picks(const Sim* sim) {
  return sim->picks;
}

NVEP_EXPORT unsigned nvep_sim_events(const Sim* sim) {
  return sim->trace.size();
}

NVEP_EXPORT void nvep_sim_event(const Sim* sim, unsigned i, nvep::simulated::Event* event) {
  *event = sim->trace.at(i);
}
