// What joins the gate and up projections, in float32 with every operation rounded.
#pragma once
#include "moe/exponential.cuh"

namespace nvep {

// gate / (1 + exp(-gate)) * up
struct ActivateSwiglu {
  __device__ __forceinline__ static float apply(float gate, float up) {
    return __fmul_rn(__fmul_rn(gate, logistic(gate)), up);
  }
};

// gelu(gate) * up with the tanh form of gelu: x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct ActivateGeglu {
  __device__ __forceinline__ static float apply(float gate, float up) {
    const float cube = __fmul_rn(__fmul_rn(gate, gate), gate);
    const float inner = __fmul_rn(1.59576912f, __fadd_rn(gate, __fmul_rn(0.044715f, cube)));
    return __fmul_rn(__fmul_rn(gate, logistic(inner)), up);
  }
};

// gpt-oss: gate at most 7, up from -7 to 7, gate * logistic(1.702 gate) * (up + 1).
struct ActivateSwigluClamped {
  __device__ __forceinline__ static float apply(float gate, float up) {
    const float limit = 7.0f;
    if (gate > limit) gate = limit;  // NaN stays
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
    return __fmul_rn(__fmul_rn(gate, logistic(__fmul_rn(1.702f, gate))), __fadd_rn(up, 1.0f));
  }
};

// gate * up
struct ActivatePlain {
  __device__ __forceinline__ static float apply(float gate, float up) { return __fmul_rn(gate, up); }
};

}  // namespace nvep
