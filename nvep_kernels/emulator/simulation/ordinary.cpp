// Ordinary (weak) accesses: they have values only where causality orders them; anything else is reported.
#include "emulator/simulation/location.h"

namespace nvep {
namespace simulated {

// Every weak read of the unit must have happened before a write.
bool Memory::reads_ordered(const Actor& actor, u64 address, Unit& unit, Site site) {
  if (!ordered(actor, unit.read.stamp)) {
    judge_.conflict(actor, site, address, "a write that is not ordered behind an ordinary read", unit.read);
    return false;
  }
  for (u32 i = 0; unit.more_reads && i < unit.more_reads->size; ++i) {
    if (ordered(actor, (*unit.more_reads)[i].stamp)) continue;
    judge_.conflict(actor, site, address, "a write that is not ordered behind an ordinary read", (*unit.more_reads)[i]);
    return false;
  }
  unit.read = {};
  if (unit.more_reads) unit.more_reads->size = 0;
  return true;
}

bool Memory::word_ordered(const Actor& actor, u64 address, const Word& word, bool reads_too, Site site,
                          const char* what) {
  for (u32 i = word.writes.size; i-- > 0;) {
    if (ordered(actor, word.writes[i].mark.stamp)) continue;
    judge_.conflict(actor, site, address, what, word.writes[i].mark);
    return false;
  }
  for (u32 i = 0; reads_too && i < word.reads.size; ++i) {
    if (ordered(actor, word.reads[i].last.stamp)) continue;
    judge_.conflict(actor, site, address, what, word.reads[i].last);
    return false;
  }
  return true;
}

// Back to ordinary memory: an access of another kind or size, ordered behind all others.
bool Memory::dissolve(const Actor& actor, u64 address, Word* word, Site site) {
  if (!word_ordered(actor, address, *word, true, site, "an access of another size or kind overlaps")) return false;
  const u64 start = address & ~static_cast<u64>(word->bytes - 1);
  const Mark mark = word->writes.last().mark;
  for (u64 at = start; at < start + word->bytes; at += 4) {
    Unit* unit = shadow_.find(at, true);
    unit->word = nullptr;
    unit->write = mark;
  }
  for (u32 i = 0; i < word->writes.size; ++i) drop(word->writes[i]);
  word->writes.size = word->reads.size = 0;
  return true;
}

bool Memory::weak_load(const Actor& actor, u64 address, u64 bytes, Site site, bool make) {
  for (u64 at = address & ~3ull; at < address + bytes; at += 4) {
    Unit* unit = shadow_.find(at, make);
    if (!unit) continue;
    if (unit->word) {
      if (!word_ordered(actor, at, *unit->word, false, site, "an ordinary read is not ordered behind a write"))
        return false;
      note_read(actor, *unit->word, unit->word->writes.size - 1, Scope::kSystem, site, true);
      continue;
    }
    if (!ordered(actor, unit->write.stamp)) {
      judge_.conflict(actor, site, at, "an ordinary read is not ordered behind a write", unit->write);
      return false;
    }
    if (!ordered(actor, unit->read.stamp)) {
      if (!unit->more_reads) unit->more_reads = static_cast<Vec<Mark>*>(calloc(1, sizeof(Vec<Mark>)));
      Vec<Mark>& more = *unit->more_reads;
      for (u32 i = 0; i < more.size;) {
        if (ordered(actor, more[i].stamp))
          more.swap_out(i);
        else
          ++i;
      }
      more.push(unit->read);
    }
    unit->read = {actor.stamp, site};
  }
  return true;
}

bool Memory::weak_store(const Actor& actor, u64 address, u64 bytes, Site site, bool make) {
  for (u64 at = address & ~3ull; at < address + bytes; at += 4) {
    Unit* unit = shadow_.find(at, make);
    if (!unit) continue;
    if (unit->word && !dissolve(actor, at, unit->word, site)) return false;
    if (!ordered(actor, unit->write.stamp)) {
      judge_.conflict(actor, site, at, "a write that is not ordered behind another", unit->write);
      return false;
    }
    if (!reads_ordered(actor, at, *unit, site)) return false;
    unit->write = {actor.stamp, site};
  }
  return true;
}

}  // namespace simulated
}  // namespace nvep
