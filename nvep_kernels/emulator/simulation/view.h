// Causality in clocks. Accesses are stamped; a view says which stamps happened before.
//
// A *slot* is one block position of one stream (or the stream's own copies); its *epoch* advances at every block barrier
// and kernel boundary. A view's clock[slot] = e covers every access of that slot before epoch e. Synchronisation finer than
// a barrier is held as extras: in epoch e of a slot, one thread's (or one warp's) accesses up to a count of releases.
#pragma once

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// Objects are made in memory of malloc: there is no C++ library to link with.
inline void* operator new(size_t, void* place) noexcept {
  return place;
}

namespace nvep {
namespace simulated {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// A growing array of plain data.
template <class T>
struct Vec {
  T* data = nullptr;
  u32 size = 0;
  u32 capacity = 0;

  T& operator[](u32 i) { return data[i]; }
  const T& operator[](u32 i) const { return data[i]; }
  T& last() { return data[size - 1]; }
  void reserve(u32 wanted) {
    if (wanted <= capacity) return;
    capacity = wanted > 2 * capacity ? wanted : 2 * capacity;
    data = static_cast<T*>(realloc(static_cast<void*>(data), capacity * sizeof(T)));
    if (!data) abort();
  }
  void push(const T& value) {
    const T copy = value;
    reserve(size + 1);
    data[size++] = copy;
  }
  void insert(u32 at, const T& value) {
    push(value);
    for (u32 i = size - 1; i > at; --i) data[i] = data[i - 1];
    data[at] = value;
  }
  void erase(u32 at) {
    for (u32 i = at + 1; i < size; ++i) data[i - 1] = data[i];
    --size;
  }
  void swap_out(u32 at) { data[at] = data[--size]; }
  void free_all() {
    free(data);
    data = nullptr;
    size = capacity = 0;
  }
};

// slot:10 thread:10 epoch:24 releases:20. Zero: before the simulation, known to everybody.
using Stamp = u64;

inline Stamp make_stamp(u32 slot, u32 thread, u32 epoch, u32 releases) {
  return static_cast<u64>(slot) << 54 | static_cast<u64>(thread) << 44 | static_cast<u64>(epoch) << 20 | releases;
}
inline u32 slot_of(Stamp s) {
  return static_cast<u32>(s >> 54);
}
inline u32 thread_of(Stamp s) {
  return static_cast<u32>(s >> 44) & 1023u;
}
inline u32 epoch_of(Stamp s) {
  return static_cast<u32>(s >> 20) & 0xffffffu;
}
inline u32 releases_of(Stamp s) {
  return static_cast<u32>(s) & 0xfffffu;
}

constexpr u16 kWholeWarp = 0x8000;

struct Extra {
  u16 slot;
  u16 who;  // a thread, or kWholeWarp | warp
  u32 epoch;
  u32 releases;  // accesses with a count up to this are covered
};

// Immutable once shared; counted references.
struct View {
  u32 references;
  Vec<Extra> extras;
  u32 clock[1];  // as many as there are slots
};

class Views {
 public:
  explicit Views(u32 slots) : slots_(slots) {}
  ~Views();
  View* fresh();
  View* copy(const View* from);
  void join(View* into, const View* from);
  void add(View* into, const Extra& extra);
  void release(View* view);
  u32 slots() const { return slots_; }

 private:
  u32 slots_;
  Vec<View*> spare_;
};

inline View* retain(View* view) {
  if (view) ++view->references;
  return view;
}

inline bool covers(const View* view, Stamp stamp) {
  const u32 slot = slot_of(stamp), epoch = epoch_of(stamp);
  if (view->clock[slot] > epoch) return true;
  for (u32 i = 0; i < view->extras.size; ++i) {
    const Extra& extra = view->extras[i];
    if (extra.slot != slot || extra.epoch != epoch || extra.releases < releases_of(stamp)) continue;
    if (extra.who == thread_of(stamp) || extra.who == (kWholeWarp | thread_of(stamp) / 32)) return true;
  }
  return false;
}

}  // namespace simulated
}  // namespace nvep
