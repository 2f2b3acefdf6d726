// The last events of a simulation.
#pragma once

#include "emulator/simulation/location.h"

namespace nvep {
namespace simulated {

enum class Did : u32 {
  kLoad = 1,
  kStore,
  kUpdate,
  kFence,
  kWeakLoad,
  kWeakStore,
  kBarrier,
  kStart,
  kEnd,
  kCopy,
  kConflict,
  kBulkLoad,
  kBulkStore,
  kBulkEnd,
  kProxyFence,
};

// Mirrored by nvep/runtime/simulated_library.py.
struct Event {
  u64 number;
  u64 address;
  u64 value;
  const char* file;
  const char* kernel;
  u32 line;
  Did did;
  u32 rank, stream, block, thread;
  u32 order;     // of a strong access
  u32 distance;  // values that were newer than the one read, or later than the one stored
};

class Trace {
 public:
  explicit Trace(u32 kept) : kept_(kept) { events_.reserve(kept); }
  ~Trace() { events_.free_all(); }
  void note(const Actor& actor, Did did, u64 address, u64 value, Site site, u32 order, u32 distance) {
    if (!kept_ || frozen_) return;
    const Event event = {total_++, address,    value,        site.file,   actor.kernel, static_cast<u32>(site.line),
                         did,      actor.rank, actor.stream, actor.block, actor.thread, order,
                         distance};
    if (events_.size < kept_)
      events_.push(event);
    else
      events_[static_cast<u32>((total_ - 1) % kept_)] = event;
  }
  // What follows is not kept: it would push out what matters.
  void freeze() { frozen_ = true; }
  void go_on() { frozen_ = false; }
  bool frozen() const { return frozen_; }
  // The i-th of the events kept, oldest first.
  u32 size() const { return events_.size; }
  const Event& at(u32 i) const {
    return events_.size < kept_ ? events_[i] : events_[static_cast<u32>((total_ + i) % kept_)];
  }

 private:
  u32 kept_;
  bool frozen_ = false;
  u64 total_ = 0;
  Vec<Event> events_;
};

}  // namespace simulated
}  // namespace nvep
