#include "emulator/simulation/location.h"

namespace nvep {
namespace simulated {

Shadow::~Shadow() {
  for (Page* page : buckets_) {
    while (page) {
      Page* next = page->next;
      for (Unit& unit : page->units) {
        if (!unit.more_reads) continue;
        unit.more_reads->free_all();
        free(unit.more_reads);
      }
      free(page);
      page = next;
    }
  }
}

void Shadow::forget() {
  for (Page* page : buckets_) {
    for (; page; page = page->next) {
      for (Unit& unit : page->units) {
        unit.write = unit.read = {};
        unit.word = nullptr;
        if (unit.more_reads) unit.more_reads->size = 0;
      }
    }
  }
}

Unit* Shadow::find(u64 address, bool make) {
  const u64 number = address / (4 * kPageUnits);
  if (!last_ || last_->number != number) {
    Page** bucket = &buckets_[number % kBuckets];
    Page* page = *bucket;
    while (page && page->number != number) page = page->next;
    if (!page) {
      if (!make) return nullptr;
      page = static_cast<Page*>(calloc(1, sizeof(Page)));
      if (!page) abort();
      page->number = number;
      page->next = *bucket;
      *bucket = page;
    }
    last_ = page;
  }
  return &last_->units[address / 4 % kPageUnits];
}

bool ordered(const Actor& actor, Stamp stamp) {
  if (!stamp) return true;
  if (slot_of(stamp) == actor.slot && thread_of(stamp) == actor.thread && epoch_of(stamp) >= actor.first_epoch)
    return true;
  return covers(actor.view, stamp);
}

namespace {

// A strong store also comes after what the axiom of completed grids puts before it.
bool before_store(const Actor& actor, Stamp stamp) {
  return ordered(actor, stamp) || (actor.floor && covers(actor.floor, stamp));
}

bool includes(Scope scope, u32 rank, u32 other) {
  return scope == Scope::kSystem || rank == other;
}

}  // namespace

Memory::~Memory() {
  for (u32 i = 0; i < words_.size; ++i) {
    words_[i]->writes.free_all();
    words_[i]->reads.free_all();
    free(words_[i]);
  }
  words_.free_all();
}

void Memory::drop(Write& write) {
  views_.release(write.released[0]);
  views_.release(write.released[1]);
  views_.release(write.completed);
}

void Memory::forget() {
  for (u32 i = 0; i < words_.size; ++i) {
    Word& word = *words_[i];
    for (u32 w = 0; w < word.writes.size; ++w) drop(word.writes[w]);
    word.writes.size = word.reads.size = 0;
  }
  shadow_.forget();
}

void Memory::put(u64 address, u64 value, u32 bytes) {
  memcpy(reinterpret_cast<void*>(address), &value, bytes);
}

Word* Memory::make_word(const Actor& actor, u64 address, u32 bytes, Site site) {
  Mark initial = {};
  for (u64 at = address; at < address + bytes; at += 4) {
    const Unit* unit = shadow_.find(at, true);
    if (!ordered(actor, unit->write.stamp)) {
      judge_.conflict(actor, site, at, "not ordered behind an ordinary write", unit->write);
      return nullptr;
    }
    if (unit->write.stamp) initial = unit->write;
  }
  Word* word = static_cast<Word*>(calloc(1, sizeof(Word)));
  if (!word) abort();
  words_.push(word);
  word->bytes = bytes;
  u64 value = 0;
  memcpy(&value, reinterpret_cast<const void*>(address), bytes);
  word->writes.push({value, initial, {nullptr, nullptr}, nullptr, actor.rank, Scope::kSystem, true, false});
  for (u64 at = address; at < address + bytes; at += 4) shadow_.find(at, true)->word = word;
  return word;
}

Word* Memory::word_at(const Actor& actor, u64 address, u32 bytes, Site site) {
  Unit* unit = shadow_.find(address, true);
  if (unit->word && unit->word->bytes == bytes) return unit->word;
  if (unit->word && !dissolve(actor, address, unit->word, site)) return nullptr;
  if (bytes == 8) {
    Unit* half = shadow_.find(address + 4, true);
    if (half->word && !dissolve(actor, address + 4, half->word, site)) return nullptr;
  }
  return make_word(actor, address, bytes, site);
}

// Position of the last write that must not be read over, or stored before.
u32 Memory::floor_of(const Actor& actor, u64 address, Word& word, bool for_store, Scope scope, Site site, bool& sound) {
  u32 floor = word.writes.size;
  while (--floor > 0) {
    const Write& write = word.writes[floor];
    if (for_store ? before_store(actor, write.mark.stamp) : ordered(actor, write.mark.stamp)) break;
    const bool strong = includes(scope, actor.rank, write.rank) && includes(write.scope, write.rank, actor.rank);
    if (!write.weak && strong) continue;
    sound = false;
    judge_.conflict(actor, site, address, write.weak ? "not ordered behind an ordinary write" : "scopes do not meet",
                    write.mark);
  }
  if (floor == 0 && word.writes[0].weak && !ordered(actor, word.writes[0].mark.stamp)) {
    sound = false;
    judge_.conflict(actor, site, address, "not ordered behind an ordinary write", word.writes[0].mark);
  }
  for (u32 i = 0; i < word.reads.size; ++i) {
    const Read& read = word.reads[i];
    if (read.position <= floor) continue;
    if (for_store ? before_store(actor, read.first.stamp) : ordered(actor, read.first.stamp)) floor = read.position;
  }
  return floor;
}

void Memory::note_read(const Actor& actor, Word& word, u32 position, Scope scope, Site site, bool weak) {
  const Mark mark = {actor.stamp, site};
  for (u32 i = word.reads.size; i-- > 0;) {
    Read& read = word.reads[i];
    if (slot_of(read.last.stamp) != actor.slot || thread_of(read.last.stamp) != actor.thread) continue;
    if (read.position == position || (read.first.stamp == actor.stamp && read.position < position)) {
      read.position = position;
      read.last = mark;
      read.weak |= weak;
      return;
    }
  }
  word.reads.push({mark, mark, position, actor.rank, scope, weak});
}

const Write* Memory::load(const Actor& actor, u64 address, u32 bytes, Scope scope, Site site) {
  Word* word = word_at(actor, address, bytes, site);
  if (!word) return nullptr;
  bool sound = true;
  const u32 floor = floor_of(actor, address, *word, false, scope, site, sound);
  if (!sound) return nullptr;
  const u32 newest = word->writes.size - 1;
  const u32 position = newest == floor ? newest : newest - judge_.older(actor, site, newest - floor);
  note_read(actor, *word, position, scope, site, false);
  return &word->writes[position];
}

// Drops writes that nobody can read any more, and reads that bind nobody.
void Memory::prune(Word& word) {
  u32 dropped = 0;
  while (word.writes.size > dropped + 1 && judge_.seen_by_all(word.writes[dropped + 1].mark.stamp)) ++dropped;
  if (!dropped) return;
  for (u32 i = 0; i < dropped; ++i) drop(word.writes[i]);
  for (u32 i = dropped; i < word.writes.size; ++i) word.writes[i - dropped] = word.writes[i];
  word.writes.size -= dropped;
  for (u32 i = 0; i < word.reads.size;) {
    Read& read = word.reads[i];
    if (read.position <= dropped && judge_.seen_by_all(read.last.stamp)) {
      word.reads.swap_out(i);
      continue;
    }
    read.position -= read.position < dropped ? read.position : dropped;
    ++i;
  }
}

Write* Memory::store(const Actor& actor, u64 address, u64 value, u32 bytes, Scope scope, Site site) {
  Word* word = word_at(actor, address, bytes, site);
  if (!word) return nullptr;
  bool sound = true;
  const u32 floor = floor_of(actor, address, *word, true, scope, site, sound);
  for (u64 at = address; at < address + bytes; at += 4)
    if (!reads_ordered(actor, at, *shadow_.find(at, true), site)) sound = false;
  for (u32 i = 0; i < word->reads.size; ++i) {
    const Read& read = word->reads[i];
    if (!read.weak || ordered(actor, read.last.stamp)) continue;
    judge_.conflict(actor, site, address, "a write that is not ordered behind an ordinary read", read.last);
    sound = false;
  }
  if (!sound) return nullptr;
  u32 at = word->writes.size;
  if (floor + 1 < at) at -= judge_.earlier(actor, site, at - floor - 1);
  while (at < word->writes.size && word->writes[at].update) ++at;
  word->writes.insert(at, {value, {actor.stamp, site}, {nullptr, nullptr}, nullptr, actor.rank, scope, false, false});
  for (u32 i = 0; i < word->reads.size; ++i)
    if (word->reads[i].position >= at) ++word->reads[i].position;
  const bool newest = at + 1 == word->writes.size;
  if (newest) {
    put(address, value, bytes);
    prune(*word);
    return &word->writes.last();
  }
  return &word->writes[at];
}

const Write* Memory::last(const Actor& actor, u64 address, u32 bytes, Scope scope, Site site) {
  Word* word = word_at(actor, address, bytes, site);
  if (!word) return nullptr;
  bool sound = true;
  floor_of(actor, address, *word, false, scope, site, sound);
  if (!sound) return nullptr;
  note_read(actor, *word, word->writes.size - 1, scope, site, false);
  return &word->writes.last();
}

Write* Memory::replace(const Actor& actor, u64 address, u64 value, u32 bytes, Scope scope, Site site) {
  Word* word = word_at(actor, address, bytes, site);
  if (!word) return nullptr;
  word->writes.push({value, {actor.stamp, site}, {nullptr, nullptr}, nullptr, actor.rank, scope, false, true});
  put(address, value, bytes);
  prune(*word);
  return &word->writes.last();
}

}  // namespace simulated
}  // namespace nvep
