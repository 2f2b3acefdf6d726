// Writes every field of a by-value struct, one word each, to `out`.
#include "primitives/types.cuh"

using namespace nvep;

extern "C" __global__ void fields(const __grid_constant__ FieldsArguments arguments) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  u64* out = arguments.out;
  out[0] = arguments.small;
  out[1] = static_cast<u64>(static_cast<i64>(arguments.negative));
  out[2] = arguments.large;
  out[3] = __float_as_uint(arguments.real);
  for (u32 i = 0; i < 5; ++i) out[4 + i] = arguments.list[i];
  out[9] = arguments.last;
}
