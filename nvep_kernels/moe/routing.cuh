// From logits to experts and weights: one warp for each token, expert e with lane e % 32. The prelude gives the sizes and
// the function (nvep/moe/routing.py); nvep/reference/routing.py computes the same bits.
#pragma once
#include "moe/exponential.cuh"
#include "primitives/memory.cuh"
#include "primitives/reduce.cuh"

namespace nvep {

constexpr u32 kPerLane = (routing::kExperts + 31) / 32;
constexpr u32 kChoicesPerLane = (routing::kTopK + 31) / 32;
constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr u32 kMinusInfinity = 0xff800000u;
constexpr u32 kNobody = 0;  // the key of an expert that cannot be chosen

__device__ __forceinline__ float load_logit(const float* p) {
  return load_weak(p);
}
__device__ __forceinline__ float load_logit(const u16* p) {
  return bf16_to_float(load_weak(p));
}

// Infinite becomes the largest float; -infinity and NaN stay, and mean that the expert is not available.
__device__ __forceinline__ float clamp_logit(float v) {
  return v > kLargestFloat ? kLargestFloat : v;
}
__device__ __forceinline__ bool is_available(float v) {
  return v >= -kLargestFloat;
}

// Integers that compare like the floats; of a value that is not available, kNobody. Both zeros are one value.
__device__ __forceinline__ u32 order_key(float v) {
  if (!is_available(v)) return kNobody;
  const u32 bits = float_to_bits(__fadd_rn(v, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_value(u32 key) {
  return bits_to_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// What turns logits into scores: the largest logit and, for a softmax over all experts, the sum of exponentials.
struct Scores {
  float largest;
  float sum;

  // The share of one expert in `sum`, or its logistic score.
  __device__ __forceinline__ float numerator(float logit) const {
    if (!is_available(logit)) return 0.0f;
    return routing::kSigmoid ? logistic(logit) : exp_nonpositive(__fsub_rn(logit, largest));
  }
  __device__ __forceinline__ float score(float logit) const {
    return routing::kSigmoid ? numerator(logit) : __fdiv_rn(numerator(logit), sum);
  }
};

// Whether scores, and not logits, decide; whether the sum over all experts is needed.
constexpr bool kChooseByScore = routing::kBias || (routing::kGroups > 1 && routing::kGroupTopTwo);
constexpr bool kNeedsSum = !routing::kSigmoid && (kChooseByScore || !routing::kRenormalise);

struct TokenLogits {
  float of[kPerLane];

  template <class Logit>
  __device__ __forceinline__ void load(const Logit* row, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 expert = lane + 32 * i;
      of[i] = expert < routing::kExperts ? clamp_logit(load_logit(row + expert)) : bits_to_float(kMinusInfinity);
    }
  }

  __device__ __forceinline__ Scores scores() const {
    u32 largest = kNobody;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) largest = max(largest, order_key(of[i]));
    Scores result = {routing::kSigmoid ? 0.0f : key_value(warp_max(largest)), 1.0f};
    if (!kNeedsSum) return result;
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) sum = __fadd_rn(sum, result.numerator(of[i]));
    result.sum = warp_sum(sum);
    return result;
  }
};

// Keys by which experts are chosen.
struct TokenKeys {
  u32 of[kPerLane];

  __device__ __forceinline__ void fill(const TokenLogits& logits, const Scores& scores, const float* bias, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      float value = logits.of[i];
      if (kChooseByScore && is_available(value)) {
        value = scores.score(value);
        if (routing::kBias) value = clamp_logit(__fadd_rn(value, load_weak(bias + lane + 32 * i)));
      }
      of[i] = order_key(value);
    }
  }

  // Score of a group of experts: its best value, or the sum of its best two.
  __device__ __forceinline__ u32 group_key(u32 group, u32 lane) const {
    constexpr u32 size = routing::kExperts / routing::kGroups;
    u32 best = kNobody, second = kNobody;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 key = (lane + 32 * i) / size == group ? of[i] : kNobody;
      second = max(second, min(best, key));
      best = max(best, key);
    }
    const u32 first = warp_max(best);
    if (!routing::kGroupTopTwo || first == kNobody) return first;
    const u32 holders = __ballot_sync(kFullWarp, best == first);
    if (lane == static_cast<u32>(__ffs(static_cast<int>(holders))) - 1) best = second;
    const u32 next = warp_max(best);
    if (next == kNobody) return first;
    return order_key(clamp_logit(__fadd_rn(key_value(first), key_value(next))));
  }

  // Leaves only the experts of the best groups; of equal groups the first wins.
  __device__ __forceinline__ void keep_best_groups(u32 lane) {
    u32 mine = kNobody;
    for (u32 group = 0; group < routing::kGroups; ++group) {
      const u32 key = group_key(group, lane);
      if (lane == group) mine = key;
    }
    u32 better = 0;
    for (u32 group = 0; group < routing::kGroups; ++group) {
      const u32 other = __shfl_sync(kFullWarp, mine, static_cast<int>(group));
      better += other > mine || (other == mine && group < lane);
    }
    const bool kept = lane < routing::kGroups && better < routing::kTopGroups;
    const u32 groups = __ballot_sync(kFullWarp, kept);
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 group = (lane + 32 * i) / (routing::kExperts / routing::kGroups);
      if (group >= 32 || !((groups >> group) & 1u)) of[i] = kNobody;
    }
  }

  // Takes the best expert out, of equal ones the first; -1 if nobody is left.
  __device__ __forceinline__ i32 take_best(u32 lane) {
    u32 best = kNobody;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) best = max(best, of[i]);
    const u32 key = warp_max(best);
    if (key == kNobody) return -1;
    u32 expert = 0xffffffffu;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      if (of[i] == key) expert = min(expert, lane + 32 * i);
    }
    expert = warp_min(expert);
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i == expert) of[i] = kNobody;
    }
    return static_cast<i32>(expert);
  }
};

// The choices of a token: number k with lane k % 32.
struct TokenChoices {
  i32 expert[kChoicesPerLane];
  float weight[kChoicesPerLane];

  __device__ __forceinline__ void choose(TokenKeys& keys, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < kChoicesPerLane; ++c) {
      expert[c] = -1;
      const u32 rounds = min(32u, routing::kTopK - 32 * c);
      for (u32 k = 0; k < rounds; ++k) {
        const i32 best = keys.take_best(lane);
        if (lane == k) expert[c] = best;
      }
    }
  }

  template <class Logit>
  __device__ __forceinline__ void weigh(const Logit* row, const Scores& scores) {
#pragma unroll
    for (u32 c = 0; c < kChoicesPerLane; ++c) {
      weight[c] = 0.0f;
      if (expert[c] < 0) continue;
      const float logit = clamp_logit(load_logit(row + expert[c]));
      weight[c] = routing::kRenormalise ? scores.numerator(logit) : scores.score(logit);
    }
    if (!routing::kRenormalise) return;
    float sum = 0.0f;  // in the order of the choices
#pragma unroll
    for (u32 c = 0; c < kChoicesPerLane; ++c) {
      const u32 rounds = min(32u, routing::kTopK - 32 * c);
      for (u32 k = 0; k < rounds; ++k) sum = __fadd_rn(sum, __shfl_sync(kFullWarp, weight[c], static_cast<int>(k)));
    }
    sum = __fadd_rn(sum, 1e-20f);  // scores may all be zero
#pragma unroll
    for (u32 c = 0; c < kChoicesPerLane; ++c) weight[c] = __fdiv_rn(weight[c], sum);
  }
};

}  // namespace nvep
