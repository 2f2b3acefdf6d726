// A schedule written by hand: what threads do at a source line instead of what chance says.
#pragma once

#include <string.h>

#include "emulator/simulation/view.h"

namespace nvep {
namespace simulated {

enum class Directive : u32 {
  kLate = 1,   // threads stay back here until nobody else gets on
  kStale = 2,  // loads take the oldest value
  kEarly = 3,  // stores go as early as they may
};
constexpr u32 kAny = 0xffffffffu;

// Mirrored by nvep/runtime/simulated_library.py.
struct Rule {
  Directive directive;
  u32 rank, block, thread;  // or kAny
  u32 line;                 // 0: everywhere
  u32 skip;                 // times it does not apply first
  u32 times;                // times it applies
  char file[128];           // end of the file's name
  char kernel[32];          // empty: any
};

// Where a thread is about to do something.
struct Place {
  u32 rank, block, thread;
  const char* kernel;
  const char* file;
  u32 line;
};

class Rules {
 public:
  ~Rules() { rules_.free_all(); }
  void add(const Rule& rule) { rules_.push(rule); }
  bool any() const { return rules_.size != 0; }
  bool apply(Directive directive, const Place& place) {
    for (u32 i = 0; i < rules_.size; ++i) {
      Rule& rule = rules_[i];
      if (rule.directive != directive || !matches(rule, place)) continue;
      if (rule.skip) {
        --rule.skip;
        continue;
      }
      if (!rule.times) continue;
      if (rule.times != kAny) --rule.times;
      return true;
    }
    return false;
  }

 private:
  static bool matches(const Rule& rule, const Place& place) {
    if (rule.rank != kAny && rule.rank != place.rank) return false;
    if (rule.block != kAny && rule.block != place.block) return false;
    if (rule.thread != kAny && rule.thread != place.thread) return false;
    if (rule.kernel[0] && strcmp(rule.kernel, place.kernel) != 0) return false;
    if (!rule.line) return true;
    if (rule.line != place.line || !place.file) return false;
    const size_t have = strlen(place.file), want = strlen(rule.file);
    return have >= want && strcmp(place.file + have - want, rule.file) == 0;
  }
  Vec<Rule> rules_;
};

}  // namespace simulated
}  // namespace nvep
