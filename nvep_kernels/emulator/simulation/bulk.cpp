// Dynamic shared memory, and bulk copies: weak accesses of an actor of their own, which becomes known to threads only
// where a copy is waited for, and which knows only what was before the grid or before a proxy fence of its thread.
//
// When a copy moves its bytes is open until somebody waits for it: at issue or at the last moment.
#include "emulator/simulation/simulation.h"

namespace nvep {
namespace simulated {

void* dynamic_shared(Fiber* fiber) {
  Block& block = *fiber->owner;
  const u64 bytes = block.grid->dynamic_bytes;
  if (!block.dynamic) {
    block.dynamic = static_cast<char*>(aligned_alloc(128, (bytes + 128) & ~127ull));
    if (!block.dynamic) abort();
    memset(block.dynamic, 0xcd, bytes);
  }
  return block.dynamic;
}

constexpr u32 kFirstBarrier = 512;  // stamps of copies name the thread that stores, or the barrier of a load

struct Copy {
  void* to;
  const void* from;
  u64 bytes;
  u32 who;     // thread, or kFirstBarrier + barrier
  u32 number;  // among the copies of `who`
  bool moved;
};

struct Barrier {
  const void* address;
  u32 phase, pending;
  long long bytes;  // expected and not yet here
  u32 loads;
};

struct Issuer {
  u32 thread, stores;
  View* known;  // what its copies come after, or null: what was before the grid
  Vec<u32> groups;
};

struct Bulk {
  Vec<Copy> copies;
  Vec<Barrier> barriers;
  Vec<Issuer> issuers;
};

u32 bulk_slot(const BlockRun& block) {
  return block.slot + 2 * block.run->sim->options.blocks;
}

namespace {

[[noreturn]] void complain(Fiber* fiber, Site site, const char* what) {
  emulated::broken(fiber, what, site);
  abort();
}

Bulk& bulk_of(Fiber* fiber) {
  BlockRun& block = *block_of(fiber);
  if (!block.bulk) block.bulk = static_cast<Bulk*>(calloc(1, sizeof(Bulk)));
  if (!block.bulk) abort();
  return *block.bulk;
}

Issuer& issuer_of(Fiber* fiber) {
  Bulk& bulk = bulk_of(fiber);
  const u32 thread = fiber->thread_index.x;
  for (u32 i = 0; i < bulk.issuers.size; ++i)
    if (bulk.issuers[i].thread == thread) return bulk.issuers[i];
  bulk.issuers.push({thread, 0, nullptr, {}});
  return bulk.issuers.last();
}

Barrier& barrier_at(Fiber* fiber, const void* address, Site site) {
  Bulk& bulk = bulk_of(fiber);
  for (u32 i = 0; i < bulk.barriers.size; ++i)
    if (bulk.barriers[i].address == address) return bulk.barriers[i];
  complain(fiber, site, "a barrier that was never initialised");
}

const View* before_grid(Fiber* fiber) {
  Run& run = *block_of(fiber)->run;
  return run.waited && thread_of_fiber(fiber)->waited ? run.waited : run.view;
}

Actor copier(Fiber* fiber, u32 who, u32 number) {
  BlockRun& block = *block_of(fiber);
  const Issuer& issuer = issuer_of(fiber);
  Actor actor = actor_of(fiber);
  actor.slot = bulk_slot(block);
  actor.first_epoch = ~0u;  // no program order
  actor.stamp = make_stamp(actor.slot, who, block.first_epoch, number);
  actor.view = issuer.known ? issuer.known : before_grid(fiber);
  return actor;
}

void move(Copy& copy) {
  if (!copy.moved) memcpy(copy.to, copy.from, copy.bytes);
  copy.moved = true;
}

// `thread` learns of the copies of `who` up to `number`; so do its own later copies.
void learn(Fiber* fiber, u32 who, u32 number) {
  BlockRun& block = *block_of(fiber);
  Views& views = block.run->sim->views;
  const Extra done = {static_cast<u16>(bulk_slot(block)), static_cast<u16>(who), block.first_epoch, number};
  views.add(own_view(block, fiber->thread_index.x), done);
  Issuer& issuer = issuer_of(fiber);
  if (!issuer.known) issuer.known = views.copy(before_grid(fiber));
  views.add(issuer.known, done);
}

void issue(Fiber* fiber, const Copy& copy, bool store, Site site) {
  Sim& sim = sim_of(fiber);
  const u64 to = reinterpret_cast<u64>(copy.to), from = reinterpret_cast<u64>(copy.from);
  if (((to | from | copy.bytes) & 15u) != 0) complain(fiber, site, "a bulk copy is not of whole 16-byte units");
  if (block_of(fiber)->run->grid.threads > kFirstBarrier)
    complain(fiber, site, "bulk copies of blocks of more than 512 threads are not simulated");
  const Actor actor = copier(fiber, copy.who, copy.number);
  sim.trace.note(actor, store ? Did::kBulkStore : Did::kBulkLoad, store ? to : from, copy.bytes, site, 0, 0);
  if (!judged(sim, store, actor, store ? to : from, copy.bytes, site)) stop(fiber);
  bulk_of(fiber).copies.push(copy);
  if (sim.at_once(actor, site)) move(bulk_of(fiber).copies.last());
  changed(sim, *thread_of_fiber(fiber));
}

void init(Fiber* fiber, const void* address, Site site) {
  Bulk& bulk = bulk_of(fiber);
  for (u32 i = 0; i < bulk.barriers.size; ++i)
    if (bulk.barriers[i].address == address) complain(fiber, site, "a barrier is initialised twice");
  if (bulk.barriers.size == kFirstBarrier - 1) complain(fiber, site, "more barriers than are simulated");
  bulk.barriers.push({address, 0, 1, 0, 0});
}

void end_phase_if_complete(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = 1;
}

void expect(Fiber* fiber, const void* address, u64 bytes, Site site) {
  before_access(fiber, site);
  Barrier& barrier = barrier_at(fiber, address, site);
  if (barrier.pending == 0) complain(fiber, site, "a barrier expects bytes twice in a phase");
  barrier.bytes += static_cast<long long>(bytes);
  barrier.pending = 0;
  end_phase_if_complete(barrier);
  changed(sim_of(fiber), *thread_of_fiber(fiber));
}

void load(Fiber* fiber, void* shared, const void* global, u64 bytes, const void* address, Site site) {
  before_access(fiber, site);
  Barrier& barrier = barrier_at(fiber, address, site);
  const u32 who = kFirstBarrier + static_cast<u32>(&barrier - bulk_of(fiber).barriers.data);
  issue(fiber, {shared, global, bytes, who, barrier.loads++, false}, false, site);
}

// Which loads have ended is open while others may still run; who only waits sees the end of all.
void deliver(Fiber* fiber, Barrier& barrier) {
  Sim& sim = sim_of(fiber);
  Bulk& bulk = bulk_of(fiber);
  const u32 who = kFirstBarrier + static_cast<u32>(&barrier - bulk.barriers.data);
  const bool all = sim.fresh || thread_of_fiber(fiber)->polls >= sim.options.spin_bound || !sim.options.stale;
  for (u32 i = 0; i < bulk.copies.size;) {
    Copy& copy = bulk.copies[i];
    if (copy.who != who || (!all && sim.random.chance(512))) {
      ++i;
      continue;
    }
    move(copy);
    barrier.bytes -= static_cast<long long>(copy.bytes);
    bulk.copies.swap_out(i);
    changed(sim, *thread_of_fiber(fiber));
  }
  end_phase_if_complete(barrier);
}

bool arrived(Fiber* fiber, const void* address, u32 parity, Site site) {
  before_access(fiber, site);
  Barrier& barrier = barrier_at(fiber, address, site);
  if ((barrier.phase & 1u) == parity) deliver(fiber, barrier);
  if ((barrier.phase & 1u) == parity) return false;
  const u32 who = kFirstBarrier + static_cast<u32>(&barrier - bulk_of(fiber).barriers.data);
  const Bulk& bulk = bulk_of(fiber);
  u32 ended = barrier.loads;
  for (u32 i = 0; i < bulk.copies.size; ++i)  // those of the next phase have not
    if (bulk.copies[i].who == who && bulk.copies[i].number < ended) ended = bulk.copies[i].number;
  if (ended) learn(fiber, who, ended - 1);
  sim_of(fiber).trace.note(actor_of(fiber), Did::kBulkEnd, 0, 0, site, 0, 0);
  thread_of_fiber(fiber)->polls = 0;
  return true;
}

void store(Fiber* fiber, void* global, const void* shared, u64 bytes, Site site) {
  before_access(fiber, site);
  issue(fiber, {global, shared, bytes, fiber->thread_index.x, issuer_of(fiber).stores++, false}, true, site);
}

void commit(Fiber* fiber) {
  Issuer& issuer = issuer_of(fiber);
  issuer.groups.push(issuer.stores);
}

void wait(Fiber* fiber, u32 left, bool read_only, Site site) {
  before_access(fiber, site);
  Bulk& bulk = bulk_of(fiber);
  Issuer& issuer = issuer_of(fiber);
  if (issuer.groups.size <= left) return;
  const u32 ended = issuer.groups[issuer.groups.size - 1 - left];  // copies of groups that have ended
  for (u32 i = 0; i < bulk.copies.size;) {
    Copy& copy = bulk.copies[i];
    const bool covered = copy.who == issuer.thread && copy.number < ended;
    if (covered) move(copy);
    if (covered && !read_only)
      bulk.copies.swap_out(i);
    else
      ++i;
  }
  if (read_only) return;
  if (ended) learn(fiber, issuer.thread, ended - 1);
  sim_of(fiber).trace.note(actor_of(fiber), Did::kBulkEnd, 0, left, site, 0, 0);
}

void fence(Fiber* fiber, Site site) {
  before_access(fiber, site);
  BlockRun& block = *block_of(fiber);
  Views& views = block.run->sim->views;
  View* known = publish(block, fiber->thread_index.x);
  Issuer& issuer = issuer_of(fiber);
  views.join(known, issuer.known);
  views.release(issuer.known);
  issuer.known = known;
  block.run->sim->trace.note(actor_of(fiber), Did::kProxyFence, 0, 0, site, 0, 0);
}

}  // namespace

bool bulk_left(Fiber* fiber) {
  const Bulk* bulk = block_of(fiber)->bulk;
  if (!bulk) return false;
  const bool last = block_of(fiber)->block.live == 1;
  for (u32 i = 0; i < bulk->copies.size; ++i) {
    const Copy& copy = bulk->copies[i];
    if (copy.who >= kFirstBarrier ? last : !copy.moved && copy.who == fiber->thread_index.x) return true;
  }
  return false;
}

void free_bulk(BlockRun& block) {
  Bulk* bulk = block.bulk;
  if (!bulk) return;
  for (u32 i = 0; i < bulk->issuers.size; ++i) {
    block.run->sim->views.release(bulk->issuers[i].known);
    bulk->issuers[i].groups.free_all();
  }
  bulk->copies.free_all();
  bulk->barriers.free_all();
  bulk->issuers.free_all();
  free(bulk);
  block.bulk = nullptr;
}

const BulkOperations kBulkOperations = {init, expect, arrived, load, store, commit, wait, fence};

}  // namespace simulated
}  // namespace nvep
