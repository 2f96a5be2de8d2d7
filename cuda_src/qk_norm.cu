// What lies between the projection to q, k and v and attention, where it needs all heads together:
//
//   x[token][q] = bound(x[token][q] / sqrt(mean(x[token][q]^2) + eps) q_norm), the same of k; v is bounded alone
//
//   x        float32 [tokens][Q_ROWS + 2 K_ROWS]   in and out: rows of q, then k, then v
//   q_norm   float32 [Q_ROWS] or null              in: null: q and k are bounded alone
//   k_norm   float32 [K_ROWS] or null              in
//   eps, clip float32: bound(v) lies between -clip and clip, which may be infinite
// Grid: (3, tokens) blocks of THREADS threads, q, k and v; with an infinite clip (2, tokens) will do.
// Macros: Q_ROWS, K_ROWS (multiples of 4).
// Alignment: 16 bytes everywhere.
// Numerics: float32; squares of a thread in order, then a butterfly over each warp, then warps in order.
#include "common.cuh"

#if Q_ROWS % 4 != 0 || K_ROWS % 4 != 0
#error "qk_norm needs Q_ROWS and K_ROWS in multiples of 4"
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
qk_norm(float* x, const float* __restrict__ q_norm, const float* __restrict__ k_norm, float eps, float clip) {
  __shared__ float squares[WARPS];
  int part = blockIdx.x, fours = (part == 0 ? Q_ROWS : K_ROWS) / 4;
  size_t first = static_cast<size_t>(blockIdx.y) * (Q_ROWS + 2 * K_ROWS) + (part ? Q_ROWS + (part - 1) * K_ROWS : 0);
  float4* row = reinterpret_cast<float4*>(x + first);
  const float4* weight = reinterpret_cast<const float4*>(part == 0 ? q_norm : part == 1 ? k_norm : nullptr);
  grid_wait();
  launch_next();
  float inverse = 1.f;
  if (weight) {
    float square = 0.f;
    for (int i = threadIdx.x; i < fours; i += THREADS) {
      float4 v = __ldcg(row + i);
      square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
    __syncthreads();
    float all = 0.f;
    for (float one : squares) all += one;
    inverse = rsqrtf(all / (4 * fours) + eps);
  }
  auto bound = [&](float v) { return fminf(fmaxf(v, -clip), clip); };
  for (int i = threadIdx.x; i < fours; i += THREADS) {
    float4 v = __ldcg(row + i), w = weight ? __ldg(weight + i) : make_float4(1.f, 1.f, 1.f, 1.f);
    row[i] = make_float4(bound(v.x * inverse * w.x), bound(v.y * inverse * w.y), bound(v.z * inverse * w.z),
                         bound(v.w * inverse * w.w));
  }
}
CPU_KERNEL(qk_norm)
