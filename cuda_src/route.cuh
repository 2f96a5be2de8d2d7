// The choice of experts from router logits; route.cu computes the logits, and every block of gate_up or
// experts chooses for itself, since a kernel for the choice would cost a step.
#pragma once
#include "common.cuh"

// The chosen experts in shared memory, most probable first, and their combine weights; filled by one warp
// while others of the block wait for what they need.
template <int CHOSEN>
struct Choice {
  int id[CHOSEN];
  float weight[CHOSEN];
  int complete;

  __device__ __forceinline__ void clear() {  // by one warp, before a barrier of the block
    int lane = threadIdx.x & 31;
    if (lane < CHOSEN) id[lane] = -1;
    if (lane == 0) complete = 0;
  }
  __device__ __forceinline__ void await_id(int k) const {
    while (*static_cast<const volatile int*>(id + k) < 0) let_others_run();
  }
  __device__ __forceinline__ void await_weights() const {
    while (!*static_cast<const volatile int*>(&complete)) let_others_run();
    __threadfence_block();
  }
};

// Fills `choice` by one warp, each round the best expert that is left; of equal ones the lower id; the
// combine weights last. logits float32 [COUNT] in global memory. NORMALIZED: the weights sum to 1, else
// they are softmax over all experts.
template <int COUNT, int CHOSEN, bool NORMALIZED>
__device__ __forceinline__ void choose_experts(Choice<CHOSEN>& choice, const float* logits) {
  static_assert(CHOSEN <= 32 && CHOSEN <= COUNT, "a lane keeps the weight of one chosen expert");
  constexpr int HELD = (COUNT + 31) / 32;
  int lane = threadIdx.x & 31;
  u32 keys[HELD];  // of experts HELD * lane and following
#pragma unroll
  for (int i = 0; i < HELD; i++)
    keys[i] = lane * HELD + i < COUNT ? ordered(__ldcg(logits + lane * HELD + i)) : 0u;
  u32 logit = 0;      // of lane k the k-th choice's, as `ordered` has it
  float total = 0.f;  // of the exponentials relative to the best, of all experts or of the chosen
#pragma unroll 1
  for (int k = 0; k < CHOSEN; k++) {
    u32 own = keys[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < HELD; i++)
      if (keys[i] > own) own = keys[i], at = i;
    u32 best = __reduce_max_sync(ALL_LANES, own);
    bool winner = lane == __ffs(__ballot_sync(ALL_LANES, own == best)) - 1;
    if (winner) *static_cast<volatile int*>(choice.id + k) = lane * HELD + at;
    if (lane == k) logit = best;
    if (k == 0 && !NORMALIZED) {
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (lane * HELD + i < COUNT) total += expf(unordered(keys[i]) - unordered(best));
      total = warp_sum(total);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (winner && i == at) keys[i] = 0u;
  }
  float top = unordered(__shfl_sync(ALL_LANES, logit, 0));
  float weight = lane < CHOSEN ? expf(unordered(logit) - top) : 0.f;
  if (NORMALIZED) total = warp_sum(weight);
  if (lane < CHOSEN) choice.weight[lane] = weight / total;
  __threadfence_block();
  __syncwarp();
  if (lane == 0) *static_cast<volatile int*>(&choice.complete) = 1;
}
