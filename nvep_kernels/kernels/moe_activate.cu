// Activation between the grouped GEMMs of a library: a block takes a pair at a time.
#include "moe/activation.cuh"
#include "moe/library.cuh"

using namespace nvep;

extern "C" __global__ void moe_activate(const __grid_constant__ LibraryArguments arguments) {
  for_pairs(arguments, [&](u32 pair, u32 expert) {
    const u64 first = moe::Place::of(arguments, pair, expert) * moe::kIntermediate;
    const u16* gates = reinterpret_cast<const u16*>(arguments.projected) + first;
    const u16* ups = reinterpret_cast<const u16*>(arguments.projected + moe::kUpResults) + first;
    u16* results = reinterpret_cast<u16*>(arguments.intermediate) + first;
    for (u32 i = threadIdx.x; i < moe::kIntermediate; i += blockDim.x) {
      float gate = bf16_to_float(load_weak(gates + i)), up = bf16_to_float(load_weak(ups + i));
      if (moe::kBiases) {
        const u64 element = static_cast<u64>(expert) * moe::kIntermediate + i;
        gate = __fadd_rn(gate, load_weak(reinterpret_cast<const float*>(arguments.gate_biases) + element));
        up = __fadd_rn(up, load_weak(reinterpret_cast<const float*>(arguments.up_biases) + element));
      }
      store_weak(results + i, float_to_bf16(moe::Activation::apply(gate, up)));
    }
  });
}
