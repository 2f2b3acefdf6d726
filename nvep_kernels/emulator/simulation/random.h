// The only source of chance in a simulation.
#pragma once

namespace nvep {
namespace simulated {

class Random {
 public:
  explicit Random(unsigned long long seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) {}
  unsigned long long next() {
    unsigned long long z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  unsigned below(unsigned n) { return static_cast<unsigned>((next() >> 32) * n >> 32); }
  bool chance(unsigned out_of_1024) { return out_of_1024 && (next() & 1023u) < out_of_1024; }

 private:
  unsigned long long state_;
};

}  // namespace simulated
}  // namespace nvep
