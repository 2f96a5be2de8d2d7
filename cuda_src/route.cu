// router_logits[token][e] = rsqrt(mean(x^2) + eps) * sum_k W[e][k] (x[token][k] norm[k])
//
//   router_logits float32 [tokens][EXPERTS]   out
//   w    bf16 [EXPERTS][K]             in
//   x    float32 [tokens][K]           in: residual stream
//   norm float32 [K]                   in
//   tokens int32; eps float32
// Grid: EXPERTS / 4 blocks of 128 threads; one warp an expert, weights in registers.
// Macros: K (multiple of 128), EXPERTS (multiple of 4).
// Numerics: float32 products and sums, lanes by a butterfly.
#include "common.cuh"

#if K % 128 != 0 || EXPERTS % 4 != 0
#error "route needs K in multiples of 128 and EXPERTS in multiples of 4"
#endif

extern "C" __global__ void __launch_bounds__(128)
route(float* __restrict__ router_logits, const __nv_bfloat16* __restrict__ w, const float* x,
      const float* __restrict__ norm, int tokens, float eps) {
  constexpr int EACH = K / 128;
  int lane = threadIdx.x & 31, expert = blockIdx.x * 4 + (threadIdx.x >> 5);
  uint2 held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    held[i] = __ldg(reinterpret_cast<const uint2*>(w + static_cast<size_t>(expert) * K + i * 128) +
                    lane);
  grid_wait();
  launch_next();
  for (int token = 0; token < tokens; token++) {
    const float* row = x + static_cast<size_t>(token) * K;
    float sum = 0.f, square = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int at = i * 128 + lane * 4;
      float4 q = __ldcg(reinterpret_cast<const float4*>(row + at));
      float4 n = __ldg(reinterpret_cast<const float4*>(norm + at));
      square += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
      sum += __uint_as_float(held[i].x << 16) * (q.x * n.x);
      sum += __uint_as_float(held[i].x & 0xffff0000u) * (q.y * n.y);
      sum += __uint_as_float(held[i].y << 16) * (q.z * n.z);
      sum += __uint_as_float(held[i].y & 0xffff0000u) * (q.w * n.w);
    }
    sum = warp_sum(sum);
    square = warp_sum(square);
    if (lane == 0) router_logits[token * EXPERTS + expert] = sum * rsqrtf(square / K + eps);
  }
}
CPU_KERNEL(route)
