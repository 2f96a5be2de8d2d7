// The choice of experts alone, for tests: ids int32 and weights float32 [tokens][TOP_K] of logits
// float32 [tokens][EXPERTS]. Grid: tokens blocks of 64 threads. Macros: EXPERTS, TOP_K, RENORMALIZE.
#include "route.cuh"

extern "C" __global__ void choose(int* ids, float* weights, const float* logits) {
  __shared__ Choice<TOP_K> choice;
  choose_experts<EXPERTS, TOP_K, RENORMALIZE>(choice, logits + blockIdx.x * EXPERTS);
  __syncthreads();
  int k = static_cast<int>(threadIdx.x) - 32;  // the second warp reads what the first has chosen
  if (k < 0 || k >= TOP_K) return;
  ids[blockIdx.x * TOP_K + k] = choice.id[k];
  weights[blockIdx.x * TOP_K + k] = choice.weight[k];
}
CPU_KERNEL(choose)
