// What a kernel calls beyond emulator/fiber.h's operations when it runs under the memory model.
#pragma once

#include "emulator/fiber.h"

namespace nvep {
namespace simulated {

enum class Order : unsigned char { kRelaxed, kAcquire, kRelease, kAcqRel };
enum class Scope : unsigned char { kDevice, kSystem };
enum class Update : unsigned char { kAdd, kExchange, kCompareSwap };

// How a strong access was made, and where.
struct Access {
  Order order;
  Scope scope;
  emulated::Site site;
};

struct Change {
  Update kind;
  unsigned long long operand;
  unsigned long long expected;
};

// Copies by the async proxy: see primitives/bulk.cuh.
struct BulkOperations {
  void (*init)(emulated::Fiber*, const void* barrier, emulated::Site);
  void (*expect)(emulated::Fiber*, const void* barrier, unsigned long long bytes, emulated::Site);
  bool (*arrived)(emulated::Fiber*, const void* barrier, unsigned parity, emulated::Site);
  void (*load)(emulated::Fiber*, void* shared, const void* global, unsigned long long bytes, const void* barrier,
               emulated::Site);
  void (*store)(emulated::Fiber*, void* global, const void* shared, unsigned long long bytes, emulated::Site);
  void (*commit)(emulated::Fiber*);
  // Until at most `left` groups are unfinished, or have at least read their shared memory.
  void (*wait)(emulated::Fiber*, unsigned left, bool read_only, emulated::Site);
  void (*fence)(emulated::Fiber*, emulated::Site);
};

struct Operations : emulated::Operations {
  unsigned long long (*load)(emulated::Fiber*, const void*, unsigned bytes, const Access&);
  void (*store)(emulated::Fiber*, void*, unsigned long long value, unsigned bytes, const Access&);
  // Two 8-byte elements, in either order.
  void (*load_pair)(emulated::Fiber*, const void*, unsigned long long* values, const Access&);
  void (*store_pair)(emulated::Fiber*, void*, const unsigned long long* values, const Access&);
  unsigned long long (*update)(emulated::Fiber*, void*, unsigned bytes, const Change&, const Access&);
  void (*load_weak)(emulated::Fiber*, const void*, void* value, unsigned bytes, emulated::Site);
  void (*store_weak)(emulated::Fiber*, void*, const void* value, unsigned bytes, emulated::Site);
  void (*fence)(emulated::Fiber*, Scope, emulated::Site);
  void (*dependency_wait)(emulated::Fiber*);
  void (*dependency_launch)(emulated::Fiber*);
  const BulkOperations* bulk;
};

}  // namespace simulated
}  // namespace nvep
