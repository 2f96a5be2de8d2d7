// The choice of experts from router logits; route.cu computes the logits, and every block of the expert
// kernels chooses for itself, since a kernel for the choice would cost a step.
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

// Chooses experts by one warp, each round the best that is left; of equal ones the lower id.
// NORMALIZED: the weights sum to 1, else they are softmax over all experts.
template <int COUNT, int CHOSEN, bool NORMALIZED>
struct Chooser {
  static_assert(CHOSEN <= 32 && CHOSEN <= COUNT, "a lane keeps the weight of one chosen expert");
  static constexpr int HELD = (COUNT + 31) / 32;
  Choice<CHOSEN>& choice;  // in shared memory
  const u32* logits;       // [COUNT] floats in global memory; waits for those that are EMPTY
  int round = 0;           // the next
  u32 keys[HELD] = {};     // of experts HELD * lane and following
  u32 logit = 0;           // of lane k the k-th choice's, as `ordered` has it
  float total = 0.f;       // of all experts' exponentials relative to the best, if not NORMALIZED
  __device__ __forceinline__ Chooser(Choice<CHOSEN>& choice, const float* logits)
      : choice(choice), logits(reinterpret_cast<const u32*>(logits)) {}

  __device__ __forceinline__ void next() {
    int lane = threadIdx.x & 31;
    if (round == 0) {
      u32 seen[HELD] = {};
      if constexpr (COUNT % 128 == 0) {
#pragma unroll
        for (int i = 0; i < HELD; i += 4) {
          uint4 v = look(reinterpret_cast<const float*>(logits + lane * HELD + i));
          seen[i] = v.x, seen[i + 1] = v.y, seen[i + 2] = v.z, seen[i + 3] = v.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < HELD; i++)
          if (lane * HELD + i < COUNT) seen[i] = look(logits + lane * HELD + i);
      }
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (lane * HELD + i < COUNT)
          keys[i] = ordered(__uint_as_float(seen[i] == EMPTY ? take_over(logits + lane * HELD + i) : seen[i]));
    }
    u32 own = keys[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < HELD; i++)
      if (keys[i] > own) own = keys[i], at = i;
    u32 best = __reduce_max_sync(ALL_LANES, own);
    bool winner = lane == __ffs(__ballot_sync(ALL_LANES, own == best)) - 1;
    if (winner) *static_cast<volatile int*>(choice.id + round) = lane * HELD + at;
    if (lane == round) logit = best;
    if (round == 0 && !NORMALIZED) {
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (lane * HELD + i < COUNT) total += expf(unordered(keys[i]) - unordered(best));
      total = warp_sum(total);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (winner && i == at) keys[i] = 0u;
    round++;
  }
  __device__ __forceinline__ void choose() {  // all experts, then their weights
#pragma unroll 1
    while (round < CHOSEN) next();
    int lane = threadIdx.x & 31;
    float top = unordered(__shfl_sync(ALL_LANES, logit, 0));
    float weight = lane < CHOSEN ? expf(unordered(logit) - top) : 0.f;
    float sum = NORMALIZED ? warp_sum(weight) : total;
    if (lane < CHOSEN) choice.weight[lane] = weight / sum;
    __threadfence_block();
    __syncwarp();
    if (lane == 0) *static_cast<volatile int*>(&choice.complete) = 1;
  }
};
