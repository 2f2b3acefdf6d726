// A whole simulation: ranks, their streams, the grids in flight and the memory model, run by one OS thread from a seed.
#pragma once

#include "emulator/scheduler.h"
#include "emulator/simulation/location.h"
#include "emulator/simulation/random.h"
#include "emulator/simulation/rules.h"
#include "emulator/simulation/trace.h"

namespace nvep {
namespace simulated {

using emulated::Block;
using emulated::Collective;
using emulated::Context;
using emulated::Fiber;
using emulated::Grid;
using emulated::State;

// Odds are out of 1024.
struct Options {
  u64 seed;
  u32 slots;
  u32 stale;       // a load takes an older value
  u32 early;       // a store is placed before later ones
  u32 preempt;     // a thread is interrupted before an access
  u32 hold;        // an interrupted thread stays back for long
  u32 pause;       // a rank stands still for a while
  u32 axiom;       // completed grids, as DESIGN.md states it
  u32 spin_bound;  // polls after which a waiting thread sees the newest value
  u32 trace;       // events kept
  u32 blocks;      // most blocks of a grid
  u64 jump_ns;     // how far the clock jumps when everybody only waits
  u64 budget;      // scheduling decisions
};

struct Sim;
struct Run;
struct Bulk;

constexpr u32 kSeen = 8;

struct Thread {
  View* own;          // what it knows beyond its warp and block, or null
  View* pending[2];   // what relaxed loads brought, from this rank and from others, and no fence has acquired yet
  View* released[2];  // by Scope: what its strong stores release since its last fence
  u32 releases;
  u32 polls;  // in a row, with nothing else between: while not 0, it only waits
  u32 block_round, warp_round;
  u64 seen_address[kSeen], seen_value[kSeen];  // of its last loads, to keep polling out of the trace
  u32 seen;
  u64 held_until;
  bool waited;  // for the grid that this one depends on

  // Is `value` another one than it saw at `address` before? Then its polling has come to something.
  bool news(u64 address, u64 value) {
    for (u32 i = 0; i < kSeen; ++i) {
      if (seen_address[i] != address) continue;
      const bool changed = seen_value[i] != value;
      if (changed) polls = 0;
      seen_value[i] = value;
      return changed;
    }
    seen_address[seen % kSeen] = address;
    seen_value[seen++ % kSeen] = value;
    return true;
  }
};

struct WarpViews {
  View* view;  // common to its lanes since the last block barrier, or null
  View* gathered;
  u32 round;
  u32 releases;
};

struct BlockRun {
  Run* run;
  View* view;  // common to its threads since the last block barrier
  View* gathered;
  u32 slot, epoch, first_epoch, round;
  bool launched_dependents;
  Thread* threads;
  WarpViews* warps;
  Bulk* bulk;   // null until it copies
  Block block;  // last: it ends in as many warps as there are
};

struct Queue;

// A grid in flight.
struct Run {
  Sim* sim;
  Queue* stream;
  u32 live_blocks, unready_blocks;
  bool dependent;
  View* view;          // at the start
  View* completed[2];  // grids of this rank that had ended by the start, and by the end of a dependency wait
  View* axiom[2];      // what its stores come after by the axiom, likewise, or null
  View* waited;        // what a dependency wait brings; null until the grid before ended
  View* observed;      // what its records showed of peers' completed grids, or null
  Vec<BlockRun*> blocks;
  Vec<Fiber*> awaiting;  // in a dependency wait
  Grid grid;
};

struct Edge {  // an event
  View* view;
  View* axiom;
  bool reached;
};

enum class Kind : u32 { kLaunch, kCopyIn, kCopy, kFill, kRecord, kAwait };

struct Work {
  Kind kind;
  void (*entry)(const void*);
  void* data;  // arguments or bytes, owned
  const char* name;
  u64 target, source, bytes;
  u32 blocks, threads, dependent, shared_bytes;
  Edge* edge;
};

// A stream.
struct Queue {
  Sim* sim;
  u32 index, rank, copy_slot, copy_epoch, next_set;
  u32 first_slot;  // of two sets of block positions, used in turn; behind them as many for what these copy in bulk
  u32* epochs;     // of the slots of block positions
  View* view;
  View* axiom;
  View* before;  // what the last grid knew at its start, until other work follows it
  Vec<Work> work;
  u32 next;      // first work not started
  Run* runs[2];  // older first; the second was launched as its dependent
};

struct Rank {
  Vec<Fiber*> ready, spinning;
  u64 paused_until;
  u32 weight;
  bool startable;  // one of its streams
};

struct Sim final : Judge {
  explicit Sim(const Options& options);
  ~Sim();

  u32 older(const Actor&, Site, u32 count) override;
  u32 earlier(const Actor&, Site, u32 count) override;
  void conflict(const Actor&, Site, u64 address, const char* what, const Mark& other) override;
  bool at_once(const Actor&, Site);  // does a bulk copy move its bytes when it is issued?
  bool seen_by_all(Stamp stamp) const override { return least[slot_of(stamp)] > epoch_of(stamp) || !stamp; }

  Queue* add_stream(u32 rank);
  const char* keep_name(const char* name);  // as long as the trace
  void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));

  Options options;
  Random random;
  Views views;
  Memory memory;
  Trace trace;
  Rules rules;
  Vec<Rank> ranks;
  Vec<Queue*> streams;
  Vec<Edge*> edges;
  Vec<char*> names;  // of kernels
  Vec<Fiber*> held;
  Vec<u64> records;  // start and end of ranges whose words the axiom speaks of
  Vec<u64> alarms;   // words whose first successful update ends the trace
  u32* least;        // clock that every view in use has reached
  u32 slots_used = 1;
  u64 now_ns = 1000, picks = 0, idle = 0;
  u64 moves = 0;     // whatever is more than polling
  u32 distance = 0;  // of the last choice, for the trace
  bool streams_changed = true;
  bool fresh = false;    // loads take the newest value
  bool lenient = false;  // conflicts are not reported
  bool failed = false;
  char message[4096] = {};
  Fiber* running = nullptr;
  Context scheduler = nullptr;
  emulated::StackSet stacks;
  Vec<char*> spare_shared;
};

BlockRun* block_of(Fiber* fiber);
Thread* thread_of_fiber(Fiber* fiber);
inline Sim& sim_of(Fiber* fiber) {
  return *block_of(fiber)->run->sim;
}
Actor actor_of(Fiber* fiber);
Actor actor_of(Queue& stream);

// causality.cpp: views of threads.
const View* view_of(BlockRun& block, u32 thread);
View* own_view(BlockRun& block, u32 thread);
View* publish(BlockRun& block, u32 thread);  // a view to attach to a release; the caller owns it
void arrive_block(BlockRun& block, u32 thread);
void leave_block(BlockRun& block, u32 thread);
void arrive_warp(BlockRun& block, u32 thread);
void leave_warp(BlockRun& block, u32 thread);
void forget_threads(BlockRun& block);
void finish_run(Run& run);
void update_least(Sim& sim);

// grids.cpp
bool can_start(Sim& sim, Queue& stream);
void start_next(Sim& sim, Queue& stream);
void thread_finished(Fiber* fiber);
void destroy_run(Run* run);
bool stream_idle(const Queue& stream);
void launch_dependents(BlockRun& block);

// accesses.cpp
[[noreturn]] void stop(Fiber* fiber);
// Checks an ordinary access; false stops the thread.
bool judged(Sim& sim, bool store, const Actor& actor, u64 address, u64 bytes, Site site);
void changed(Sim& sim, Thread& thread);

// bulk.cpp
void* dynamic_shared(Fiber* fiber);
u32 bulk_slot(const BlockRun& block);
bool bulk_left(Fiber* fiber);  // does the thread leave copies behind that use shared memory?
void free_bulk(BlockRun& block);
extern const BulkOperations kBulkOperations;

// machine.cpp
void run_until(Sim& sim, Queue* target);
void step_aside(Fiber* fiber, State state);
void wake(Fiber* fiber);
// Called by a thread before an access: others may run first, by the rules of a written schedule, or by chance too.
void stay_back(Fiber* fiber, Site site);
void before_access(Fiber* fiber, Site site);

extern const Operations kSimulatedOperations;

}  // namespace simulated
}  // namespace nvep
