// Weights in any format: their layout in memory, and the product of one piece with activations.
//
// Tensor cores do the products: weights are the A operand (16 rows at a time), activations the B
// operand. Each float32 activation is split into a 16-bit head and a 16-bit rest, which are two
// columns of B, 2 token and 2 token + 1: precision is kept, and up to 4 tokens share one product.
//
// Layout of W ("fragments"): records of 16 rows x 128 columns, [row tiles][K / 128][RECORD_BYTES]. In
// a record, lane = 4 g + t holds of rows g and g + 8, and of every group of 32 columns, the 8 from
// 8 t on.
//   W_BF16: 8 x [32 lanes][16 bytes]: group 0 of row g, group 0 of row g + 8, group 1 of row g, ...,
//           each 8 bf16 in column order
//   W_FP4:  2 x [32 lanes][16 bytes]: a word for group 0 of row g, group 0 of row g + 8, group 1 of
//           row g, group 1 of row g + 8; then the same for groups 2 and 3; then 128 bytes of fp16
//           scales [g][group][rows g and g + 8]. In a word the even column of pair p (columns 2p,
//           2p + 1) lies in the low half: sign and magnitude bits at 15, 11-9 (p = 0), 12, 8-6 (1),
//           14, 5-3 (2), 13, 2-0 (3), so that p = 0 needs one operation to become fp16 and p = 1 two.
//           E2M1 bits under fp16's sign are the value times 2^-14; FORMAT_SCALE undoes that.
#pragma once
#include "common.cuh"

#define W_BF16 0
#define W_FP4 1
#ifndef W_FORMAT
#error "define W_FORMAT as W_BF16 (0) or W_FP4 (1)"
#endif
constexpr int SLICE = 128, TILE = 16;
constexpr int RECORD_BYTES = W_FORMAT == W_FP4 ? 1152 : 4096;
constexpr float FORMAT_SCALE = W_FORMAT == W_FP4 ? 16384.f : 1.f;

// Sums of one record times one slice of activations for rows g and g + 8 (low, high) and the two
// columns of token t (x head, y rest). b: [set of 4 tokens][group] two steps of the B operand.
struct Sums {
  float2 low, high;
};
template <int SETS, class Load>
__device__ __forceinline__ void multiply(Sums (&sums)[SETS], const u8* record, Load load,
                                         const uint4 (&b)[SETS][4], const float (&undo)[SETS]) {
  int lane = threadIdx.x & 31;
  float4 total[SETS] = {};
#if W_FORMAT == W_FP4
  constexpr u32 BOTH = 0x8E008E00u, SIGN = 0x80008000u;
  uint4 scales = load(record + 1024 + (lane >> 2) * 16);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 codes = load(record + half * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int g = half * 2 + i;
      u32 v = i ? codes.z : codes.x, w = i ? codes.w : codes.y;
      uint4 first = make_uint4(v & BOTH, w & BOTH, (v << 3) & BOTH, (w << 3) & BOTH);
      uint4 second = make_uint4((((v << 1) & SIGN) | ((v << 6) & ~SIGN)) & BOTH,
                                (((w << 1) & SIGN) | ((w << 6) & ~SIGN)) & BOTH,
                                (((v << 2) & SIGN) | ((v << 9) & ~SIGN)) & BOTH,
                                (((w << 2) & SIGN) | ((w << 9) & ~SIGN)) & BOTH);
      float2 scale = floats(g == 0 ? scales.x : g == 1 ? scales.y : g == 2 ? scales.z : scales.w);
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        mma_f16(c, first, b[set][g].x, b[set][g].y);
        mma_f16(c, second, b[set][g].z, b[set][g].w);
        total[set].x += scale.x * c[0], total[set].y += scale.x * c[1];
        total[set].z += scale.y * c[2], total[set].w += scale.y * c[3];
      }
    }
  }
#else
  float c[SETS][4] = {};
#pragma unroll
  for (int g = 0; g < 4; g++) {
    uint4 v = load(record + (2 * g) * 512 + lane * 16);
    uint4 w = load(record + (2 * g + 1) * 512 + lane * 16);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      mma_bf16(c[set], make_uint4(v.x, w.x, v.y, w.y), b[set][g].x, b[set][g].y);
      mma_bf16(c[set], make_uint4(v.z, w.z, v.w, w.w), b[set][g].z, b[set][g].w);
    }
  }
#pragma unroll
  for (int set = 0; set < SETS; set++)
    total[set] = make_float4(c[set][0], c[set][1], c[set][2], c[set][3]);
#endif
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    sums[set].low.x += undo[set] * total[set].x, sums[set].low.y += undo[set] * total[set].y;
    sums[set].high.x += undo[set] * total[set].z, sums[set].high.y += undo[set] * total[set].w;
  }
}
