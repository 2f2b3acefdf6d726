// What the model knows of memory: for each 4-byte unit the last ordinary accesses, and for words that strong accesses
// touched the coherence-ordered writes. The real memory always holds the write that is last in coherence order.
#pragma once

#include "emulator/simulation/operations.h"
#include "emulator/simulation/view.h"

namespace nvep {
namespace simulated {

using emulated::Site;

// Who accesses memory: a thread of a kernel, or a stream that copies.
struct Actor {
  u32 rank;
  u32 stream;
  u32 block;
  u32 thread;
  u32 slot;
  u32 first_epoch;    // accesses of this thread and slot from here on are its own
  Stamp stamp;        // of its next access
  const View* view;   // what happened before
  const View* floor;  // further accesses that its strong stores come after (the axiom of completed grids), or null
  const char* kernel;
};

struct Mark {
  Stamp stamp;
  Site site;
};

struct Write {
  u64 value;
  Mark mark;
  View* released[2];  // by Scope: what a reader of the same rank, or of any rank, may acquire
  View* completed;    // grids of the writer's rank that had completed before the writer's grid
  u32 rank;
  Scope scope;
  bool weak;
  bool update;  // nothing may come between it and the write before it
};

struct Read {
  Mark first;  // earliest read that saw `position`, by this thread in this epoch
  Mark last;
  u32 position;
  u32 rank;
  Scope scope;
  bool weak;
};

// A word that strong accesses use: writes in coherence order, and who read how far.
struct Word {
  u32 bytes;
  Vec<Write> writes;
  Vec<Read> reads;
};

struct Unit {
  Mark write;
  Mark read;
  Vec<Mark>* more_reads;
  Word* word;  // of the aligned 4 or 8 bytes that this unit belongs to
};

constexpr u32 kPageUnits = 256;  // 1 KiB of memory

class Shadow {
 public:
  ~Shadow();
  // The unit of `address`, made if `make`; else null where nothing is known of its page.
  Unit* find(u64 address, bool make);
  void forget();

 private:
  struct Page {
    u64 number;
    Page* next;
    Unit units[kPageUnits];
  };
  static constexpr u32 kBuckets = 4096;
  Page* buckets_[kBuckets] = {};
  Page* last_ = nullptr;
};

// Where the model leaves decisions and reports.
class Judge {
 public:
  // Which of `count` older values (1: the next older) a read takes; 0: the newest.
  virtual u32 older(const Actor&, Site, u32 count) = 0;
  // How many of `count` later writes a store is placed before.
  virtual u32 earlier(const Actor&, Site, u32 count) = 0;
  // Two accesses that must not meet. `what` is a short sentence.
  virtual void conflict(const Actor&, Site, u64 address, const char* what, const Mark& other) = 0;
  // Everybody's view covers it.
  virtual bool seen_by_all(Stamp) const = 0;

 protected:
  ~Judge() = default;
};

class Memory {
 public:
  Memory(Views& views, Judge& judge) : views_(views), judge_(judge) {}
  ~Memory();

  // A host that waited for everything writes memory from here: all of it is ordinary and ordered again.
  void forget();

  // Strong accesses. The write that was read stays valid until the next store to the word; null after a conflict.
  const Write* load(const Actor&, u64 address, u32 bytes, Scope, Site);
  Write* store(const Actor&, u64 address, u64 value, u32 bytes, Scope, Site);
  // The last write, which the caller replaces by `replace` or leaves.
  const Write* last(const Actor&, u64 address, u32 bytes, Scope, Site);
  Write* replace(const Actor&, u64 address, u64 value, u32 bytes, Scope, Site);

  // Ordinary accesses of `bytes` at `address`, in units of 4; true unless they conflict. Only ranges that are known
  // are looked at where `make` is false.
  bool weak_load(const Actor&, u64 address, u64 bytes, Site, bool make);
  bool weak_store(const Actor&, u64 address, u64 bytes, Site, bool make);

 private:
  Word* word_at(const Actor&, u64 address, u32 bytes, Site);
  Word* make_word(const Actor&, u64 address, u32 bytes, Site);
  bool dissolve(const Actor&, u64 address, Word* word, Site);
  u32 floor_of(const Actor&, u64 address, Word& word, bool for_store, Scope scope, Site, bool& sound);
  void note_read(const Actor&, Word&, u32 position, Scope, Site, bool weak);
  bool reads_ordered(const Actor&, u64 address, Unit& unit, Site);
  bool word_ordered(const Actor&, u64 address, const Word& word, bool reads_too, Site, const char* what);
  void prune(Word&);
  void put(u64 address, u64 value, u32 bytes);
  void drop(Write&);

  Views& views_;
  Judge& judge_;
  Shadow shadow_;
  Vec<Word*> words_;
};

bool ordered(const Actor& actor, Stamp stamp);

}  // namespace simulated
}  // namespace nvep
