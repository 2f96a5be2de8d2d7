// The choice of experts alone, for tests: ids int32 and weights float32 [tokens][TOP_K] of logits
// float32 [tokens][EXPERTS]. Grid: tokens blocks of 32 threads. Macros: EXPERTS, TOP_K, RENORMALIZE.
#include "route.cuh"

extern "C" __global__ void choose(int* ids, float* weights, const float* logits) {
  Routing mine = choose_experts<EXPERTS, TOP_K, RENORMALIZE>(logits + blockIdx.x * EXPERTS);
  if (threadIdx.x < TOP_K) {
    ids[blockIdx.x * TOP_K + threadIdx.x] = mine.id;
    weights[blockIdx.x * TOP_K + threadIdx.x] = mine.weight;
  }
}
CPU_KERNEL(choose)
