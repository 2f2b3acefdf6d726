// Router logits to expert ids and weights, one warp for each token. With replicas, a chosen expert becomes one of its
// physical copies: tokens take turns, and sources start at different ones.
#include "moe/routing.cuh"

using namespace nvep;

extern "C" __global__ void route(const __grid_constant__ RouteArguments arguments) {
  u32 tokens = arguments.num_tokens;
  if (arguments.num_tokens_device) tokens = min(tokens, load_weak(arguments.num_tokens_device));
  const u32 lane = threadIdx.x & 31u;
  const u32 warps = gridDim.x * (blockDim.x / 32);
  for (u32 token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; token < tokens; token += warps) {
    const routing::Logit* row =
        reinterpret_cast<const routing::Logit*>(arguments.logits) + static_cast<u64>(token) * routing::kExperts;
    TokenLogits logits;
    logits.load(row, lane);
    const Scores scores = logits.scores();
    TokenKeys keys;
    keys.fill(logits, scores, arguments.bias, lane);
    if (routing::kGroups > 1) keys.keep_best_groups(lane);
    TokenChoices choices;
    choices.choose(keys, lane);
    choices.weigh(row, scores);
#pragma unroll
    for (u32 c = 0; c < kChoicesPerLane; ++c) {
      const u32 k = lane + 32 * c;
      if (k >= routing::kTopK) continue;
      i32 expert = choices.expert[c];
      if (routing::kReplicas && expert >= 0) {
        const u32 first = load_weak(arguments.replica_starts + expert);
        const u32 copies = load_weak(arguments.replica_starts + expert + 1) - first;
        expert = load_weak(arguments.replicas + first + (token + arguments.turn) % copies);
      }
      const u64 at = static_cast<u64>(token) * routing::kTopK + k;
      store_weak(arguments.expert_ids + at, expert);
      store_weak(arguments.expert_weights + at, __fmul_rn(choices.weight[c], routing::kScale));
    }
  }
}
