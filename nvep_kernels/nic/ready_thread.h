// The host thread of Free Flow. Compiled for the host behind the ring layouts, called by a thread that holds no
// interpreter lock; returns once told to.
#pragma once
#include "nic/ready_scan.cuh"

extern "C" int sched_yield();
extern "C" int usleep(unsigned microseconds);

struct ReadyThread {
  nvep::u64 queues;  // ReadyQueue[count]
  nvep::u64 count;
  nvep::u64 stop;       // written by the host
  nvep::u64 heartbeat;  // scans so far
  nvep::u64 rung;       // entries so far
  nvep::u64 doorbells;
};

namespace nvep {

constexpr u32 kBusyScans = 4096;   // without anything ready, before the core is offered to others
constexpr u32 kYieldScans = 8192;  // and before it sleeps
constexpr unsigned kNapMicroseconds = 50;

inline void rest(u32 idle) {
  if (idle > kYieldScans) {
    usleep(kNapMicroseconds);
  } else if (idle > kBusyScans) {
    sched_yield();
  }
}

}  // namespace nvep

extern "C" __attribute__((visibility("default"))) void nvep_ready_run(ReadyThread* self) {
  using namespace nvep;
  ReadyQueue* queues = reinterpret_cast<ReadyQueue*>(self->queues);
  u32 idle = 0;
  while (__atomic_load_n(&self->stop, __ATOMIC_ACQUIRE) == 0) {
    u64 rung = 0;
    for (u64 q = 0; q < self->count; ++q) {
      u32 n = scan_ready(queues[q]);
      rung += n;
      if (n != 0) __atomic_store_n(&self->doorbells, self->doorbells + 1, __ATOMIC_RELAXED);
    }
    idle = rung == 0 ? idle + 1 : 0;
    __atomic_store_n(&self->rung, self->rung + rung, __ATOMIC_RELAXED);
    __atomic_store_n(&self->heartbeat, self->heartbeat + 1, __ATOMIC_RELEASE);
    rest(idle);
  }
}
