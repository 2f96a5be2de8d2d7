// router_logits[token][e] = rsqrt(mean(x^2) + eps) * sum_k W[e][k] (x[token][k] norm[k]) + bias[e]
//
//   router_logits float32 [tokens][EXPERTS]   out
//   w    bf16 [EXPERTS][K]             in
//   bias float32 [EXPERTS] or null     in
//   x    float32 [tokens][K]           in: residual stream
//   norm float32 [K]                   in
//   tokens (1 to 8) int32; eps float32
// Grid: EXPERTS blocks of 32 WARPS threads; the warps of a block share K, weights in registers.
// Macros: K (multiple of 128), EXPERTS, WARPS (4 or 8), NORM_SIZE (columns of which the mean is; K by default,
// others hold zeros).
// Alignment: w 8 bytes, x and norm 16 bytes.
// Numerics: float32 products and sums; lanes by a butterfly, then warps in order.
#include "common.cuh"

#if K % 128 != 0
#error "route needs K in multiples of 128"
#endif
#if WARPS != 4 && WARPS != 8
#error "route needs WARPS 4 or 8"
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
route(float* __restrict__ router_logits, const __nv_bfloat16* __restrict__ w,
      const float* __restrict__ bias, const float* x, const float* __restrict__ norm, int tokens, float eps) {
  constexpr int SLICES = K / 128, EACH = (SLICES + WARPS - 1) / WARPS;
  __shared__ float2 parts[8][WARPS];  // of the tokens
  STAMP(0);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, expert = blockIdx.x;
  uint2 held[EACH] = {};
  float4 factor[EACH] = {};
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int slice = warp + i * WARPS;
    if (slice < SLICES) {
      const __nv_bfloat16* row = w + static_cast<size_t>(expert) * K + slice * 128;
      held[i] = __ldg(reinterpret_cast<const uint2*>(row) + lane);
      factor[i] = __ldg(reinterpret_cast<const float4*>(norm + slice * 128) + lane);
    }
  }
  float added = bias ? __ldg(bias + expert) : 0.f;
  STAMP(1);
  launch_next();  // gate_up reads nothing before its own wait
  grid_wait();
  STAMP(3);
  for (int token = 0; token < tokens; token++) {
    float sum = 0.f, square = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int slice = warp + i * WARPS;
      if (slice < SLICES) {
        const float* row = x + static_cast<size_t>(token) * K + slice * 128;
        float4 q = __ldcg(reinterpret_cast<const float4*>(row) + lane), n = factor[i];
        square += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
        sum += __uint_as_float(held[i].x << 16) * (q.x * n.x);
        sum += __uint_as_float(held[i].x & 0xffff0000u) * (q.y * n.y);
        sum += __uint_as_float(held[i].y << 16) * (q.z * n.z);
        sum += __uint_as_float(held[i].y & 0xffff0000u) * (q.w * n.w);
      }
    }
    sum = warp_sum(sum);
    square = warp_sum(square);
    if (lane == 0) parts[token][warp] = make_float2(sum, square);
  }
  __syncthreads();
  if (threadIdx.x < tokens) {
    const float2(&own)[WARPS] = parts[threadIdx.x];
    float dot = own[0].x, squares = own[0].y;
#pragma unroll
    for (int w = 1; w < WARPS; w++) dot += own[w].x, squares += own[w].y;
    router_logits[threadIdx.x * EXPERTS + expert] = dot * rsqrtf(squares / NORM_SIZE + eps) + added;
  }
  STAMP(7);
}
CPU_KERNEL(route)
