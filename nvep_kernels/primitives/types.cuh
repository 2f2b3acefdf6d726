// Scalar names used by every kernel. NVRTC bundles no <cstdint>, so they are spelled out here.
#pragma once

namespace nvep {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// Two 8-byte elements moved by one access. The access may tear between `a` and `b`, never inside one of them.
struct alignas(16) u64x2 {
  u64 a;
  u64 b;
};

}  // namespace nvep
