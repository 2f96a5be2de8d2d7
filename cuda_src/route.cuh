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

// What the lanes of the warp that has chosen know: lane k the k-th choice's logit (as `ordered` has it);
// all of them the sum of all experts' exponentials relative to the best, 0 if NORMALIZED.
struct Chosen {
  u32 logit;
  float total;
};

// Fills the ids of `choice` (shared memory) by one warp, each round the best expert that is left; of
// equal ones the lower id. logits float32 [COUNT] in global memory. Weights: weigh_experts; the sum
// that it needs is there if they are not NORMALIZED.
template <int COUNT, int CHOSEN, bool NORMALIZED>
__device__ __forceinline__ Chosen choose_experts(Choice<CHOSEN>& choice, const float* logits) {
  static_assert(CHOSEN <= 32 && CHOSEN <= COUNT, "a lane keeps the weight of one chosen expert");
  constexpr int HELD = (COUNT + 31) / 32;
  int lane = threadIdx.x & 31;
  u32 keys[HELD];  // of experts HELD * lane and following
#pragma unroll
  for (int i = 0; i < HELD; i++)
    keys[i] = lane * HELD + i < COUNT ? ordered(__ldcg(logits + lane * HELD + i)) : 0u;
  Chosen mine = {0u, 0.f};
#pragma unroll 1
  for (int k = 0; k < CHOSEN; k++) {
    u32 own = keys[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < HELD; i++)
      if (keys[i] > own) own = keys[i], at = i;
    u32 best = __reduce_max_sync(ALL_LANES, own);
    bool winner = lane == __ffs(__ballot_sync(ALL_LANES, own == best)) - 1;
    if (winner) choice.id[k] = lane * HELD + at;
    if (lane == k) mine.logit = best;
    if (k == 0 && !NORMALIZED) {
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (lane * HELD + i < COUNT) mine.total += expf(unordered(keys[i]) - unordered(best));
      mine.total = warp_sum(mine.total);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (winner && i == at) keys[i] = 0u;
  }
  __syncwarp();
  return mine;
}

// Fills the combine weights, by the warp that has chosen; other warps see ids and weights after the
// block's next barrier. NORMALIZED: they sum to 1, else they are softmax over all experts.
template <int CHOSEN, bool NORMALIZED>
__device__ __forceinline__ void weigh_experts(Choice<CHOSEN>& choice, const Chosen& mine) {
  int lane = threadIdx.x & 31;
  float top = unordered(__shfl_sync(ALL_LANES, mine.logit, 0));
  float weight = lane < CHOSEN ? expf(unordered(mine.logit) - top) : 0.f;
  float total = NORMALIZED ? warp_sum(weight) : mine.total;
  if (lane < CHOSEN) choice.weight[lane] = weight / total;
}
