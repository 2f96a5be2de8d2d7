// Weights in any format: their layout in memory, and the product of one piece with activations.
//
// Tensor cores do the products: weights are the A operand (16 rows at a time), activations the B
// operand. Each float32 activation is split into a bf16 head and a bf16 rest, which are two columns
// of B, 2 token and 2 token + 1: 16 bits of precision are kept, and up to 4 tokens share one product.
//
// Layout of W ("fragments"): records of 16 rows x 128 columns, [row tiles][K / 128][RECORD_BYTES]. In
// a record, lane = 4 g + t holds of rows g and g + 8, and of every group of 32 columns, the 8 from
// 8 t on.
//   W_BF16: 8 x [32 lanes][16 bytes]: group 0 of row g, group 0 of row g + 8, group 1 of row g, ...,
//           each 8 bf16 in column order
//   W_FP4:  2 x [32 lanes][16 bytes]: a word for group 0 of row g, group 0 of row g + 8, group 1 of
//           row g, group 1 of row g + 8; then the same for groups 2 and 3; then 128 bytes of fp16
//           scales [g][group][rows g and g + 8]. A word holds four pairs of columns, 2p and 2p + 1,
//           the even one in its low half, their bits (sign, e1, e0, m) where unpacking takes fewest
//           operations: p = 0 at 15, 8, 7, 6 of the half; p = 1 at 5 of the other half and 14, 13, 12;
//           p = 2 at 9, 2, 1, 0; p = 3 at 11, 4, 3, 10. Moved to 15, 8, 7, 6 they are a bf16 (a
//           subnormal one for 0.5) that is the value times 2^-126. Activations are multiplied by
//           2^96 (so they must stay below 2^32) and results by 2^30.
#pragma once
#include "common.cuh"

#define W_BF16 0
#define W_FP4 1
#ifndef W_FORMAT
#error "define W_FORMAT as W_BF16 (0) or W_FP4 (1)"
#endif
constexpr int SLICE = 128, TILE = 16;
constexpr int RECORD_BYTES = W_FORMAT == W_FP4 ? 1152 : 4096;
constexpr float ACTIVATION_SCALE = W_FORMAT == W_FP4 ? 0x1p96f : 1.f;
constexpr float RESULT_SCALE = W_FORMAT == W_FP4 ? 0x1p30f : 1.f;

#if W_FORMAT == W_FP4
// Pairs 0 and 1, or 2 and 3, of a word as bf16.
__device__ __forceinline__ uint2 fp4_front(u32 v) {
  constexpr u32 BITS = 0x81C081C0u;
  return make_uint2(v & BITS, __funnelshift_r(v, v, 6) & BITS);
}
__device__ __forceinline__ uint2 fp4_back(u32 v) {
  return make_uint2((v << 6) & 0x81C081C0u, ((v << 4) & 0x81808180u) | ((v >> 4) & 0x00400040u));
}
#endif

// Adds one record times one slice of activations. sums: rows g (x, y) and g + 8 (z, w) with the head
// and the rest of token t. b: [set of 4 tokens][group] two steps of the B operand.
template <int SETS, class Load>
__device__ __forceinline__ void multiply(float4 (&sums)[SETS], const u8* record, Load load,
                                         const uint4 (&b)[SETS][4]) {
  int lane = threadIdx.x & 31;
#if W_FORMAT == W_FP4
  uint4 scales = load(record + 1024 + (lane >> 2) * 16);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 codes = load(record + half * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int g = half * 2 + i;
      u32 v = i ? codes.z : codes.x, w = i ? codes.w : codes.y;
      uint2 low = fp4_front(v), high = fp4_front(w), low2 = fp4_back(v), high2 = fp4_back(w);
      float2 scale = floats(g == 0 ? scales.x : g == 1 ? scales.y : g == 2 ? scales.z : scales.w);
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        mma_bf16(c, make_uint4(low.x, high.x, low.y, high.y), b[set][g].x, b[set][g].y);
        mma_bf16(c, make_uint4(low2.x, high2.x, low2.y, high2.y), b[set][g].z, b[set][g].w);
        sums[set].x += scale.x * c[0], sums[set].y += scale.x * c[1];
        sums[set].z += scale.y * c[2], sums[set].w += scale.y * c[3];
      }
    }
  }
#else
#pragma unroll
  for (int g = 0; g < 4; g++) {
    uint4 v = load(record + (2 * g) * 512 + lane * 16);
    uint4 w = load(record + (2 * g + 1) * 512 + lane * 16);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      float c[4] = {sums[set].x, sums[set].y, sums[set].z, sums[set].w};
      mma_bf16(c, make_uint4(v.x, w.x, v.y, w.y), b[set][g].x, b[set][g].y);
      mma_bf16(c, make_uint4(v.z, w.z, v.w, w.w), b[set][g].z, b[set][g].w);
      sums[set] = make_float4(c[0], c[1], c[2], c[3]);
    }
  }
#endif
}
