// What AddressSanitizer and ThreadSanitizer are told of emulated threads; empty in builds without them.
//
// To ThreadSanitizer every stack is a thread of its own. Switching orders nothing: only what CUDA orders does, so it
// reports races between the threads of a block as well as between ranks. The runtime's own accesses are left out, since
// they are ordered by running on one OS thread.
#pragma once

#include "emulator/fiber.h"

#if defined(__SANITIZE_ADDRESS__)
#define NVEP_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define NVEP_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NVEP_ASAN 1
#elif __has_feature(thread_sanitizer)
#define NVEP_TSAN 1
#endif
#endif

#if defined(NVEP_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void** kept, const void* bottom, unsigned long size);
void __sanitizer_finish_switch_fiber(void* kept, const void** from_bottom, unsigned long* from_size);
void __asan_unpoison_memory_region(const volatile void* start, unsigned long size);
}
#elif defined(NVEP_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

// A function that other stacks enter and leave: the tool must not count its calls and returns.
#if defined(NVEP_TSAN)
#define NVEP_SWITCHES __attribute__((no_sanitize("thread")))
#else
#define NVEP_SWITCHES
#endif

namespace nvep {
namespace emulated {

// Memory that one emulated thread or block has used is not given to another of the same launch, and every object is an
// allocation of its own.
#if defined(NVEP_ASAN) || defined(NVEP_TSAN)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// The stack of the OS thread that runs a launch, as the tool knows it.
struct SanitizedStack {
  void* thread;
  const void* bottom;
  unsigned long size;
};

// Around every switch, on the stack that is left: `leaving_scheduler` or `leaving_fiber`, and once it goes on,
// `back_on_stack` with what that kept. A thread's first act is `on_new_stack`.
#if defined(NVEP_ASAN)
inline void leaving_scheduler(void** kept, Fiber* fiber, bool) {
  const unsigned long long base = reinterpret_cast<unsigned long long>(fiber) & ~(kStackBytes - 1);
  __sanitizer_start_switch_fiber(kept, reinterpret_cast<void*>(base), kStackBytes);
}
inline void leaving_fiber(void** kept, const SanitizedStack& scheduler, bool for_good) {
  __sanitizer_start_switch_fiber(for_good ? nullptr : kept, scheduler.bottom, scheduler.size);
}
inline void back_on_stack(void* kept) {
  __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
}
inline void on_new_stack(SanitizedStack& scheduler) {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.bottom, &scheduler.size);
}
// Frames that a finished thread never returned from are still marked.
inline void prepare_stack(Fiber*, char* bottom, unsigned long size) {
  __asan_unpoison_memory_region(bottom, size);
}
#elif defined(NVEP_TSAN)
// Only the first switch orders: a thread that starts knows what the launch knows.
NVEP_SWITCHES inline void leaving_scheduler(void**, Fiber* fiber, bool first) {
  __tsan_switch_to_fiber(fiber->sanitized, first ? 0 : 1);
}
NVEP_SWITCHES inline void leaving_fiber(void**, const SanitizedStack& scheduler, bool) {
  __tsan_switch_to_fiber(scheduler.thread, 1);
}
NVEP_SWITCHES inline void back_on_stack(void*) {}
NVEP_SWITCHES inline void on_new_stack(SanitizedStack&) {}
inline void prepare_stack(Fiber* fiber, char*, unsigned long) {
  if (!fiber->sanitized) fiber->sanitized = __tsan_create_fiber(0);
}
#else
inline void leaving_scheduler(void**, Fiber*, bool) {}
inline void leaving_fiber(void**, const SanitizedStack&, bool) {}
inline void back_on_stack(void*) {}
inline void on_new_stack(SanitizedStack&) {}
inline void prepare_stack(Fiber*, char*, unsigned long) {}
#endif

#if defined(NVEP_TSAN)

inline SanitizedStack running_stack() {
  return {__tsan_get_current_fiber(), nullptr, 0};
}

// While one lives, accesses of the calling thread are the runtime's.
struct RuntimeScope {
  RuntimeScope() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~RuntimeScope() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

// Everything before `release` of a token happens before what follows a later `acquire` of it.
inline void release_token(void* token) {
  __tsan_release(token);
}
inline void acquire_token(void* token) {
  __tsan_acquire(token);
}

// The tool does not know fences. After one, a thread's relaxed stores release; at one, it acquires from what its latest
// relaxed loads read.
inline void fenced() {
  Fiber* fiber = current();
  for (const void*& address : fiber->observed) {
    if (address) __tsan_acquire(const_cast<void*>(address));
    address = nullptr;
  }
  fiber->fences = true;
}
inline void storing_relaxed(void* address) {
  if (current()->fences) __tsan_release(address);
}
inline void loaded_relaxed(const void* address) {
  Fiber* fiber = current();
  for (const void* known : fiber->observed)
    if (known == address) return;
  for (unsigned i = kObserved - 1; i > 0; --i) fiber->observed[i] = fiber->observed[i - 1];
  fiber->observed[0] = address;
}

#else

inline SanitizedStack running_stack() {
  return {};
}
struct RuntimeScope {
  ~RuntimeScope() {}
};
inline void release_token(void*) {}
inline void acquire_token(void*) {}
inline void fenced() {}
inline void storing_relaxed(void*) {}
inline void loaded_relaxed(const void*) {}

#endif

}  // namespace emulated
}  // namespace nvep
