// Operations of a simulated thread.
#include "emulator/simulation/simulation.h"

namespace nvep {
namespace simulated {

[[noreturn]] void stop(Fiber* fiber) {
  step_aside(fiber, State::kFailed);
  abort();
}

void changed(Sim& sim, Thread& thread) {
  thread.polls = 0;
  ++sim.moves;
  sim.idle = 0;
}

// Once a lane has died what its step shows is undefined: whoever gives up marks rows that others may still be sending.
bool judged(Sim& sim, bool store, const Actor& actor, u64 address, u64 bytes, Site site) {
  sim.lenient = sim.trace.frozen();
  const bool sound = store ? sim.memory.weak_store(actor, address, bytes, site, true)
                           : sim.memory.weak_load(actor, address, bytes, site, true);
  const bool lenient = sim.lenient;
  sim.lenient = false;
  return sound || lenient;
}

namespace {

bool is_record(const Sim& sim, u64 address) {
  for (u32 i = 0; i + 1 < sim.records.size; i += 2)
    if (address >= sim.records[i] && address < sim.records[i + 1]) return true;
  return false;
}

void merge(Views& views, View*& into, const View* from) {
  if (!from) return;
  if (!into)
    into = views.copy(from);
  else
    views.join(into, from);
}

bool acquires(Order order) {
  return order == Order::kAcquire || order == Order::kAcqRel;
}
bool releases(Order order) {
  return order == Order::kRelease || order == Order::kAcqRel;
}

// What a read of `write` brings: at once if it acquires, at the next fence if not.
void take(Fiber* fiber, const Write& write, u64 address, Order order) {
  BlockRun& block = *block_of(fiber);
  Run& run = *block.run;
  Views& views = run.sim->views;
  const u32 rank = run.stream->rank, from = write.rank == rank ? 0 : 1;
  if (const View* brought = write.released[from]) {
    if (acquires(order))
      views.join(own_view(block, fiber->thread_index.x), brought);
    else
      merge(views, thread_of_fiber(fiber)->pending[from], brought);
  }
  if (write.completed && from && is_record(*run.sim, address)) merge(views, run.observed, write.completed);
}

// What the new `write` releases, besides `chain` of the write that an update replaced.
void give(Fiber* fiber, Write& write, u64 address, const Access& access) {
  BlockRun& block = *block_of(fiber);
  Run& run = *block.run;
  Thread& thread = *thread_of_fiber(fiber);
  if (releases(access.order)) {
    View* view = publish(block, fiber->thread_index.x);
    write.released[0] = view;
    write.released[1] = access.scope == Scope::kSystem ? retain(view) : retain(thread.released[1]);
  } else {
    write.released[0] = retain(thread.released[0]);
    write.released[1] = retain(thread.released[1]);
  }
  if (access.scope == Scope::kSystem && is_record(*run.sim, address))
    write.completed = retain(run.completed[thread.waited]);
}

u64 load(Fiber* fiber, const void* p, unsigned bytes, const Access& access) {
  Sim& sim = sim_of(fiber);
  const u64 address = reinterpret_cast<u64>(p);
  before_access(fiber, access.site);
  const Actor actor = actor_of(fiber);
  sim.distance = 0;
  const Write* write = sim.memory.load(actor, address, bytes, access.scope, access.site);
  if (!write) stop(fiber);
  Thread& thread = *thread_of_fiber(fiber);
  const u64 value = write->value;
  const bool again = !thread.news(address, value);
  if (!again || !thread.polls || acquires(access.order))
    sim.trace.note(actor, Did::kLoad, address, value, access.site, static_cast<u32>(access.order), sim.distance);
  take(fiber, *write, address, access.order);
  return value;
}

void store(Fiber* fiber, void* p, u64 value, unsigned bytes, const Access& access) {
  Sim& sim = sim_of(fiber);
  const u64 address = reinterpret_cast<u64>(p);
  before_access(fiber, access.site);
  const Actor actor = actor_of(fiber);
  sim.distance = 0;
  Write* write = sim.memory.store(actor, address, value, bytes, access.scope, access.site);
  if (!write) stop(fiber);
  sim.trace.note(actor, Did::kStore, address, value, access.site, static_cast<u32>(access.order), sim.distance);
  give(fiber, *write, address, access);
  changed(sim, *thread_of_fiber(fiber));
}

void load_pair(Fiber* fiber, const void* p, u64* values, const Access& access) {
  const u32 first = sim_of(fiber).random.below(2);
  const u64* words = static_cast<const u64*>(p);
  values[first] = load(fiber, words + first, 8, access);
  values[1 - first] = load(fiber, words + 1 - first, 8, access);
}

void store_pair(Fiber* fiber, void* p, const u64* values, const Access& access) {
  const u32 first = sim_of(fiber).random.below(2);
  u64* words = static_cast<u64*>(p);
  store(fiber, words + first, values[first], 8, access);
  store(fiber, words + 1 - first, values[1 - first], 8, access);
}

u64 update(Fiber* fiber, void* p, unsigned bytes, const Change& change, const Access& access) {
  Sim& sim = sim_of(fiber);
  Views& views = sim.views;
  const u64 address = reinterpret_cast<u64>(p);
  before_access(fiber, access.site);
  const Write* before = sim.memory.last(actor_of(fiber), address, bytes, access.scope, access.site);
  if (!before) stop(fiber);
  const u64 old = before->value;
  u64 value = change.kind == Update::kAdd ? old + change.operand : change.operand;
  if (bytes == 4) value &= 0xffffffffu;
  take(fiber, *before, address, access.order);
  const Actor actor = actor_of(fiber);
  sim.trace.note(actor, Did::kUpdate, address, value, access.site, static_cast<u32>(access.order), 0);
  if (change.kind == Update::kCompareSwap && old != change.expected) return old;
  View* chain[2] = {retain(before->released[0]), retain(before->released[1])};
  Write* write = sim.memory.replace(actor, address, value, bytes, access.scope, access.site);
  if (!write) stop(fiber);
  give(fiber, *write, address, access);
  for (u32 i = 0; i < sim.alarms.size; ++i)
    if (sim.alarms[i] == address) sim.trace.freeze();
  for (u32 s = 0; s < 2; ++s) {
    if (!write->released[s]) {
      write->released[s] = chain[s];
    } else if (chain[s]) {
      View* both = views.copy(write->released[s]);
      views.join(both, chain[s]);
      views.release(write->released[s]);
      views.release(chain[s]);
      write->released[s] = both;
    }
  }
  changed(sim, *thread_of_fiber(fiber));
  return old;
}

void fence(Fiber* fiber, Scope scope, Site site) {
  BlockRun& block = *block_of(fiber);
  Sim& sim = *block.run->sim;
  before_access(fiber, site);
  const u32 index = fiber->thread_index.x;
  Thread& thread = block.threads[index];
  for (u32 s = 0; s <= (scope == Scope::kSystem ? 1u : 0u); ++s) {
    if (!thread.pending[s]) continue;
    sim.views.join(own_view(block, index), thread.pending[s]);
    sim.views.release(thread.pending[s]);
    thread.pending[s] = nullptr;
  }
  View* view = publish(block, index);
  sim.views.release(thread.released[0]);
  thread.released[0] = view;
  if (scope == Scope::kSystem) {
    sim.views.release(thread.released[1]);
    thread.released[1] = retain(view);
  }
  sim.trace.note(actor_of(fiber), Did::kFence, 0, 0, site, static_cast<u32>(scope), 0);
}

void load_weak(Fiber* fiber, const void* p, void* value, unsigned bytes, Site site) {
  Sim& sim = sim_of(fiber);
  const u64 address = reinterpret_cast<u64>(p);
  stay_back(fiber, site);
  const Actor actor = actor_of(fiber);
  u64 first = 0;
  memcpy(value, p, bytes);
  memcpy(&first, value, bytes < 8 ? bytes : 8);
  sim.trace.note(actor, Did::kWeakLoad, address, first, site, 0, 0);
  if (!judged(sim, false, actor, address, bytes, site)) stop(fiber);
}

void store_weak(Fiber* fiber, void* p, const void* value, unsigned bytes, Site site) {
  Sim& sim = sim_of(fiber);
  const u64 address = reinterpret_cast<u64>(p);
  before_access(fiber, site);
  const Actor actor = actor_of(fiber);
  u64 first = 0;
  memcpy(&first, value, bytes < 8 ? bytes : 8);
  sim.trace.note(actor, Did::kWeakStore, address, first, site, 0, 0);
  if (!judged(sim, true, actor, address, bytes, site)) stop(fiber);
  memcpy(p, value, bytes);
  changed(sim, *thread_of_fiber(fiber));
}

void spin(Fiber* fiber) {
  ++thread_of_fiber(fiber)->polls;
  step_aside(fiber, State::kSpinning);
}

int block_barrier(Fiber* fiber, Collective kind, int predicate, Site site) {
  BlockRun& block = *block_of(fiber);
  const u32 thread = fiber->thread_index.x, round = block.round;
  arrive_block(block, thread);
  const int result = emulated::block_collective(fiber, kind, predicate, site);
  leave_block(block, thread);
  block.threads[thread].polls = 0;
  if (round + 1 == block.round && block.block.waiting == 0 && thread == 0)
    block.run->sim->trace.note(actor_of(fiber), Did::kBarrier, 0, 0, site, 0, 0);
  return result;
}

unsigned long long warp_collective(Fiber* fiber, Collective kind, unsigned mask, unsigned long long value, int lane,
                                   int width, Site site) {
  BlockRun& block = *block_of(fiber);
  const u32 thread = fiber->thread_index.x;
  if (kind != Collective::kWarpSync) return emulated::warp_collective(fiber, kind, mask, value, lane, width, site);
  if ((mask & block.block.warps[thread / 32].live) != block.block.warps[thread / 32].live) {
    block.run->sim->fail("%s:%d: __syncwarp of a part of a warp is not simulated", site.file, site.line);
    stop(fiber);
  }
  arrive_warp(block, thread);
  const u64 result = emulated::warp_collective(fiber, kind, mask, value, lane, width, site);
  leave_warp(block, thread);
  return result;
}

void* shared_memory(Fiber* fiber, const void* tag, u64 bytes, u64 alignment) {
  Block& block = *fiber->owner;
  for (u32 i = 0; i < block.shared_count; ++i)
    if (block.shared_tag[i] == tag) return block.shared_object[i];
  if (!block.shared) block.shared = static_cast<char*>(aligned_alloc(256, emulated::kSharedBytes));
  const u64 start = (block.shared_used + alignment - 1) / alignment * alignment;
  if (!block.shared || start + bytes > emulated::kSharedBytes || block.shared_count == emulated::kMaxShared) {
    sim_of(fiber).fail("shared memory: %llu bytes, allowed are %llu", start + bytes, emulated::kSharedBytes);
    stop(fiber);
  }
  char* object = block.shared + start;
  memset(object, 0xcd, bytes);
  block.shared_tag[block.shared_count] = tag;
  block.shared_object[block.shared_count++] = object;
  block.shared_used = start + bytes;
  return object;
}

unsigned long long timer_ns() {
  return sim_of(emulated::current()).now_ns;
}

void dependency_wait(Fiber* fiber) {
  BlockRun& block = *block_of(fiber);
  Run& run = *block.run;
  if (!run.dependent) return;
  if (!run.waited) {
    run.awaiting.push(fiber);
    step_aside(fiber, State::kBlocked);
  }
  run.sim->views.join(own_view(block, fiber->thread_index.x), run.waited);
  thread_of_fiber(fiber)->waited = true;
}

void dependency_launch(Fiber* fiber) {
  launch_dependents(*block_of(fiber));
}

}  // namespace

const Operations kSimulatedOperations = {
    {spin, block_barrier, warp_collective, shared_memory, dynamic_shared, timer_ns, emulated::broken},
    load,
    store,
    load_pair,
    store_pair,
    update,
    load_weak,
    store_weak,
    fence,
    dependency_wait,
    dependency_launch,
    &kBulkOperations};

}  // namespace simulated
}  // namespace nvep
