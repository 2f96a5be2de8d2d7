// One element of the KV cache in any format: decoding rows, and quantising a head into its page.
//   KV_BF16: bf16. KV_FP4: E2M1, one fp16 scale per group of KV_GROUP elements.
// In a page, 16 bits hold four E2M1 codes, in places where unpacking takes few operations, left shifts and
// masks only. The sign and the three bits below it, of elements 0 to 3: bits 15, 11-9; 12, 8-6; 13,
// 2-0; 14, 5-3.
#pragma once
#include "common.cuh"

#define KV_BF16 0
#define KV_FP4 1
#ifndef KV_GROUP
#define KV_GROUP 32
#endif

template <int FORMAT>
struct KV {
  static constexpr int BITS = FORMAT == KV_FP4 ? 4 : 16;
  static constexpr bool SCALED = FORMAT == KV_FP4;
};

// A word of eight codes as pairs of fp16, each times 2^-14 (see weight_formats.cuh): elements i and i + 4.
__device__ __forceinline__ void fp4_pairs(u32 v, u32 (&pairs)[4]) {
  constexpr u32 SIGNS = 0x80008000u, REST = 0x0E000E00u;
  pairs[0] = v & (SIGNS | REST);
  pairs[1] = (v << 3) & (SIGNS | REST);
  pairs[2] = ((v << 2) & SIGNS) | ((v << 9) & REST);
  pairs[3] = ((v << 1) & SIGNS) | ((v << 6) & REST);
}
// Two codes where a page has elements 0 and 1 of its four, or 2 and 3.
__device__ __forceinline__ u32 placed_codes(u32 a, u32 b, bool later) {
  u32 signs = later ? (a & 8u) << 10 | (b & 8u) << 11 : (a & 8u) << 12 | (b & 8u) << 9;
  return signs | (later ? (a & 7u) | (b & 7u) << 3 : (a & 7u) << 9 | (b & 7u) << 6);
}

// The E2M1 number that a float rounds to, to nearest even, saturating at 6; and its code.
__device__ __forceinline__ float round_e2m1(float v) {
  float a = fminf(fabsf(v), 6.f);
  // Adding 1.5 * 2^23 steps rounds to a step: half the power of two below, at least 0.5.
  float power = fmaxf(__uint_as_float(__float_as_uint(a) & 0x7f800000u), 1.f);
  float steps = power * 0x1.8p22f;
  return copysignf(__fsub_rn(__fadd_rn(a, steps), steps), v);
}
__device__ __forceinline__ u32 e2m1_code(float v) {  // of a value of E2M1
  u32 b = __float_as_uint(v);
  int above = static_cast<int>((b & 0x7fffffffu) >> 22) - 252;  // 2 for 1, 3 for 1.5, ..., 0 for 0.5
  return (max(above, 0) + (fabsf(v) == 0.5f)) | b >> 31 << 3;
}
// v / scale, correctly rounded where it is no subnormal number (a zero loses its sign); inverse: of the
// scale, within 1 ulp.
__device__ __forceinline__ float divide(float v, float scale, float inverse) {
  float q = __fmul_rn(v, inverse);
  return __fmaf_rn(__fmaf_rn(-q, scale, v), inverse, q);
}

// E2M1 code of a float.
__device__ __forceinline__ u32 encode_e2m1(float v) { return e2m1_code(round_e2m1(v)); }
__device__ __forceinline__ float e2m1_value(u32 code) {
  u32 half_bits = (code & 8u) << 12 | (code & 7u) << 9;
  return floats(half_bits).x * 16384.f;
}

// The largest over the lanes that share a group: `width` lanes in a row.
__device__ __forceinline__ float group_max(float v, int width) {
  for (int o = width / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, o));
  return v;
}

// Quantises one piece of a head, its piece-th 64 elements, by a warp: lane l holds elements 2 l (lo) and
// 2 l + 1 (hi) of them. codes, scales: the token's row in its page; near_codes, near_scales: a second
// place for the same.
template <int FORMAT>
__device__ __forceinline__ void store_piece(void* codes, __half* scales, void* near_codes,
                                           __half* near_scales, int piece, float lo, float hi) {
  int lane = threadIdx.x & 31, at = piece * 32 + lane;  // index of the pair
  if constexpr (FORMAT == KV_BF16) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    reinterpret_cast<__nv_bfloat162*>(codes)[at] = pair;
    reinterpret_cast<__nv_bfloat162*>(near_codes)[at] = pair;
  } else {
    constexpr int LANES = KV_GROUP / 2;
    float amax = group_max(fmaxf(fabsf(lo), fabsf(hi)), LANES);
    float x[2], y[2], loss[2];
    __half stored[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {  // amax becomes 6, or 4: the better one
      constexpr float SIXTH = 1.f / 6;
      stored[i] = __float2half_rn(i ? amax * 0.25f : divide(amax, 6.f, SIXTH));
      float scale = __half2float(stored[i]), inverse = reciprocal(scale);
      x[i] = copysignf(round_e2m1(divide(lo, scale, inverse)), lo);
      y[i] = copysignf(round_e2m1(divide(hi, scale, inverse)), hi);
      if (scale == 0.f) x[i] = y[i] = 0.f;
      float ex = __fsub_rn(__fmul_rn(x[i], scale), lo), ey = __fsub_rn(__fmul_rn(y[i], scale), hi);
      loss[i] = __fadd_rn(__fmul_rn(ex, ex), __fmul_rn(ey, ey));
    }
    for (int o = LANES / 2; o; o >>= 1) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        loss[i] = __fadd_rn(loss[i], __shfl_xor_sync(ALL_LANES, loss[i], o));
    }
    bool second = loss[1] < loss[0];
    u32 placed = placed_codes(e2m1_code(second ? x[1] : x[0]), e2m1_code(second ? y[1] : y[0]), lane % 2);
    placed |= __shfl_xor_sync(ALL_LANES, placed, 1);
    if (lane % 2 == 0) {
      reinterpret_cast<u16*>(codes)[at / 2] = static_cast<u16>(placed);
      reinterpret_cast<u16*>(near_codes)[at / 2] = static_cast<u16>(placed);
    }
    if (lane % LANES == 0) scales[at / LANES] = near_scales[at / LANES] = second ? stored[1] : stored[0];
  }
}
