// What the litmus kernels share; the prelude of each. How a test writes and reads is chosen at run time, so that all of
// them compile once.
#include "primitives/launch.cuh"
#include "primitives/memory.cuh"
#include "primitives/shared.cuh"
#include "primitives/time.cuh"

namespace nvep {

enum Writer : u32 { kRelaxedWriter, kReleaseWriter, kFenceWriter, kDeviceFenceWriter };
enum Reader : u32 { kRelaxedReader, kAcquireReader, kFenceReader, kDeviceFenceReader };

inline void write(const LitmusArguments& a, u64* p, u64 value) {
  if (a.device)
    store_relaxed_device(p, value);
  else
    store_relaxed_system(p, value);
}

inline u64 read(const LitmusArguments& a, const u64* p) {
  return a.device ? load_relaxed_device(p) : load_relaxed_system(p);
}

// The write that is to carry what came before it.
inline void publish(const LitmusArguments& a, u64* p, u64 value) {
  if (a.writer == kFenceWriter) fence_acq_rel_system();
  if (a.writer == kDeviceFenceWriter) fence_acq_rel_device();
  if (a.writer != kReleaseWriter) return write(a, p, value);
  if (a.device)
    store_release_device(p, value);
  else
    store_release_system(p, value);
}

// The read that is to bring it.
inline u64 observe(const LitmusArguments& a, const u64* p) {
  if (a.reader == kAcquireReader) return a.device ? load_acquire_device(p) : load_acquire_system(p);
  const u64 value = read(a, p);
  if (a.reader == kFenceReader) fence_acq_rel_system();
  if (a.reader == kDeviceFenceReader) fence_acq_rel_device();
  return value;
}

}  // namespace nvep
