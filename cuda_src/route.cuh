// The choice of experts from router logits, by one warp without a barrier; route.cu computes the
// logits, and the expert kernels choose for themselves, since each choice would cost a kernel.
#pragma once
#include "common.cuh"

// The k-th chosen expert and its combine weight are in lane k. Ties go to the lower expert.
struct Routing {
  int id;
  float weight;
};

// logits float32 [COUNT] in memory that an earlier kernel wrote. NORMALIZED: weights sum to 1,
// else they are softmax over all experts.
template <int COUNT, int CHOSEN, bool NORMALIZED>
__device__ __forceinline__ Routing choose_experts(const float* logits) {
  constexpr int EACH = (COUNT + 31) / 32;
  int lane = threadIdx.x & 31;
  u32 keys[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int e = i * 32 + lane;
    keys[i] = e < COUNT ? ordered(__ldcg(logits + e)) : 0u;
  }
  Routing mine = {0, 0.f};
  float top = 0.f, total = 0.f;
#pragma unroll
  for (int k = 0; k < CHOSEN; k++) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) best = max(best, keys[i]);
    best = __reduce_max_sync(ALL_LANES, best);
    u32 id = EACH * 32;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--)
      if (keys[i] == best) id = i * 32 + lane;
    id = __reduce_min_sync(ALL_LANES, id);
    float logit = unordered(best);
    if (k == 0) top = logit;
    if (k == 0 && !NORMALIZED) {
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (i * 32 + lane < COUNT) total += expf(unordered(keys[i]) - top);
      total = warp_sum(total);
    }
    float weight = expf(logit - top);
    if (NORMALIZED) total += weight;
    if (lane == k) mine = {static_cast<int>(id), weight};
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (id == i * 32 + lane) keys[i] = 0u;
  }
  mine.weight /= total;
  return mine;
}
