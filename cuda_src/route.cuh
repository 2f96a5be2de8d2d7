// The choice of experts from router logits; route.cu computes the logits, and the expert kernels
// choose for themselves, since a kernel for the choice would cost a step.
#pragma once
#include "common.cuh"

// The chosen experts, most probable first, and their combine weights.
template <int CHOSEN>
struct Choice {
  int id[CHOSEN];
  float weight[CHOSEN];
};

// Fills `choice` (shared memory) by one warp, each round the best expert that is left;
// of equal ones the lower id. Other warps see it after the block's next barrier. logits float32
// [COUNT] in global memory. NORMALIZED: weights sum to 1, else they are softmax over all experts.
template <int COUNT, int CHOSEN, bool NORMALIZED>
__device__ __forceinline__ void choose_experts(Choice<CHOSEN>& choice, const float* logits) {
  static_assert(CHOSEN <= 32 && CHOSEN <= COUNT, "a lane keeps the weight of one chosen expert");
  constexpr int HELD = (COUNT + 31) / 32;
  int lane = threadIdx.x & 31;
  u32 keys[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++)
    keys[i] = i * 32 + lane < COUNT ? ordered(__ldcg(logits + i * 32 + lane)) : 0u;
  float top = 0.f, total = 0.f, mine = 0.f;
#pragma unroll 1  // short code: it runs once, from a cold instruction cache
  for (int k = 0; k < CHOSEN; k++) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) best = max(best, keys[i]);
    best = __reduce_max_sync(ALL_LANES, best);
    u32 id = HELD * 32;
#pragma unroll
    for (int i = HELD - 1; i >= 0; i--)
      if (keys[i] == best) id = i * 32 + lane;
    id = __reduce_min_sync(ALL_LANES, id);
    float logit = unordered(best);
    if (k == 0) top = logit;
    if (k == 0 && !NORMALIZED) {
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (i * 32 + lane < COUNT) total += expf(unordered(keys[i]) - top);
      total = warp_sum(total);
    }
    float weight = expf(logit - top);
    if (NORMALIZED) total += weight;
    if (lane == k) mine = weight;
    if (lane == 0) choice.id[k] = id;
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (id == i * 32 + lane) keys[i] = 0u;
  }
  if (lane < CHOSEN) choice.weight[lane] = mine / total;
  __syncwarp();
}
