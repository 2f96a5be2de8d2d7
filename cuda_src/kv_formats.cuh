// One element of the KV cache in any format: decoding rows, and quantising a head into its page. See
// npmoe/formats for the definitions.
//
//   format        code                       of a group of KV_GROUP elements
//   KV_BF16       bf16                       nothing
//   KV_FP4        E2M1                       fp16 scale
//   KV_MXFP4      E2M1                       E8M0 scale, a byte
//   KV_NVFP4      E2M1                       E4M3 scale, a byte
//   KV_INT4       sign and 3 bits            fp16 scale
//   KV_INT4_ASYM  4 bits, value + zero       fp16 scale; zero, a byte
//   KV_INT8       8 bits, two's complement   fp16 scale
//   KV_FP8        E4M3                       fp16 scale
// 16 bits of a page hold four codes of KV_INT4_ASYM, the first lowest. Where a code has a sign, its bits lie where
// unpacking takes few operations. The sign and the three bits below it, of elements 0 to 3, of E2M1: bits 15, 11-9;
// 12, 8-6; 13, 2-0; 14, 5-3; of KV_INT4: 15, 6-4; 11, 2-0; 3, 10-8; 7, 14-12.
#pragma once
#include "common.cuh"

#define KV_BF16 0
#define KV_FP4 1
#define KV_MXFP4 2
#define KV_NVFP4 3
#define KV_INT4 4
#define KV_INT4_ASYM 5
#define KV_INT8 6
#define KV_FP8 7
#ifndef KV_GROUP
#define KV_GROUP 32
#endif

template <int FORMAT>
struct KV {
  static constexpr int BITS = FORMAT == KV_BF16 ? 16 : FORMAT == KV_INT8 || FORMAT == KV_FP8 ? 8 : 4;
  static constexpr bool SCALED = FORMAT != KV_BF16;  // products are of fp16, and of codes without their scales
  static constexpr bool E2M1 = FORMAT == KV_FP4 || FORMAT == KV_MXFP4 || FORMAT == KV_NVFP4;
  static constexpr bool ZEROED = FORMAT == KV_INT4_ASYM;
  static constexpr int SCALE_BYTES = !SCALED ? 0 : FORMAT == KV_MXFP4 || FORMAT == KV_NVFP4 ? 1 : 2;
  // What unpacked codes are to be multiplied by, and scales.
  static constexpr float UNDO = E2M1 ? 0x1p14f : FORMAT == KV_INT4 ? 0x1p20f : FORMAT == KV_FP8 ? 0x1p8f : 1.f;
  static constexpr float SCALE_UNDO = FORMAT == KV_NVFP4 ? 0x1p8f : 1.f;
};

// Codes of 4 or 8 bits as pairs of fp16, each divided by UNDO: of n codes in a word codes i and i + n / 2.
// zeros: two fp16, 1024 + the zero points of both, where the format has any.
template <int FORMAT>
__device__ __forceinline__ void unpack(u32 v, u32* pairs, u32 zeros = 0) {
  auto minus = [](u32 a, u32 b) {
    return bits(__hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b)));
  };
  if constexpr (KV<FORMAT>::E2M1) {  // times 2^-14, see weight_formats.cuh
    constexpr u32 SIGNS = 0x80008000u, REST = 0x0E000E00u;
    pairs[0] = v & (SIGNS | REST);
    pairs[1] = (v << 3) & (SIGNS | REST);
    pairs[2] = ((v << 2) & SIGNS) | ((v << 9) & REST);
    pairs[3] = ((v << 1) & SIGNS) | ((v << 6) & REST);
  } else if constexpr (FORMAT == KV_INT4) {  // times 2^-20: subnormal numbers
    constexpr u32 SIGNS = 0x80008000u, REST = 0x00700070u;
    pairs[0] = v & (SIGNS | REST);
    pairs[1] = (v << 4) & (SIGNS | REST);
    pairs[2] = ((v << 12) & SIGNS) | ((v >> 4) & REST);
    pairs[3] = ((v << 8) & SIGNS) | ((v >> 8) & REST);
  } else if constexpr (FORMAT == KV_INT4_ASYM) {  // 1024 + code, less 1024 + zero
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = minus((v >> 4 * i & 0x000F000Fu) | 0x64006400u, zeros);
  } else if constexpr (FORMAT == KV_INT8) {  // 1024 + (code + 128), less 1152
    u32 above = v ^ 0x80808080u;
    pairs[0] = minus(__byte_perm(above, 0x64u, 0x4240), 0x64806480u);
    pairs[1] = minus(__byte_perm(above, 0x64u, 0x4341), 0x64806480u);
  } else {  // E4M3's bits as the upper ones of an fp16, whose exponent is 8 less
    constexpr u32 SIGNS = 0x80008000u, REST = 0x3F803F80u;
    pairs[0] = ((v << 8) & SIGNS) | ((v << 7) & REST);
    pairs[1] = (v & SIGNS) | ((v >> 1) & REST);
  }
}
// Two codes of 4 bits where a page has elements 0 and 1 of its four, or 2 and 3.
template <int FORMAT>
__device__ __forceinline__ u32 placed_codes(u32 a, u32 b, bool later) {
  if constexpr (KV<FORMAT>::E2M1) {
    u32 signs = later ? (a & 8u) << 10 | (b & 8u) << 11 : (a & 8u) << 12 | (b & 8u) << 9;
    return signs | (later ? (a & 7u) | (b & 7u) << 3 : (a & 7u) << 9 | (b & 7u) << 6);
  } else if constexpr (FORMAT == KV_INT4) {
    u32 signs = later ? (a & 8u) | (b & 8u) << 4 : (a & 8u) << 12 | (b & 8u) << 8;
    return signs | (later ? (a & 7u) << 8 | (b & 7u) << 12 : (a & 7u) << 4 | (b & 7u));
  } else {
    return (a | b << 4) << (later ? 8 : 0);
  }
}
// An E4M3 number without a sign, divided by 256, as the bits of an fp16.
__device__ __forceinline__ u32 e4m3_half(u32 code) { return code << 7; }

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

// The E4M3 number that a float rounds to, to nearest even, saturating at 448; and the code of one, or of a number that
// rounds to one.
__device__ __forceinline__ float round_e4m3(float v) {
  float a = fminf(fabsf(v), 448.f);
  // As above; a step is an eighth of the power of two below, at least 2^-9.
  float power = fmaxf(__uint_as_float(__float_as_uint(a) & 0x7f800000u), 0x1p-6f);
  float steps = power * 0x1.8p20f;
  return copysignf(__fsub_rn(__fadd_rn(a, steps), steps), v);
}
__device__ __forceinline__ u32 encode_e4m3(float v) {
  __half_raw raw = __float2half_rn(round_e4m3(v) * (1.f / 256.f));
  return (raw.x >> 7 & 0x7fu) | (raw.x >> 8 & 0x80u);
}

// The largest over the lanes that share a group: `width` lanes in a row.
__device__ __forceinline__ float group_max(float v, int width) {
  for (int o = width / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, o));
  return v;
}

// A lane's first two elements of a group as E2M1 codes, and the bits of its scale. v: all that it has of the group.
// width: lanes in a row that share it.
template <int FORMAT, int OWN>
__device__ __forceinline__ void encode_e2m1_pair(const float (&v)[OWN], float amax, int width, u32 (&code)[2],
                                                 u32& stored) {
  constexpr float SIXTH = 1.f / 6;
  constexpr int WAYS = FORMAT == KV_MXFP4 ? 1 : 2;  // amax becomes 6, or 4: the better one; of E8M0 6 or less
  float x[WAYS][OWN], loss[WAYS];
  u32 kept[WAYS];
#pragma unroll
  for (int i = 0; i < WAYS; i++) {
    float wanted = i ? amax * 0.25f : divide(amax, 6.f, SIXTH), scale;
    if constexpr (FORMAT == KV_FP4) {
      __half_raw raw = __float2half_rn(wanted);
      kept[i] = raw.x, scale = __half2float(__half(raw));
    } else if constexpr (FORMAT == KV_NVFP4) {
      kept[i] = encode_e4m3(wanted), scale = floats(e4m3_half(kept[i])).x * KV<FORMAT>::SCALE_UNDO;
    } else {  // the power of two from there on
      u32 b = __float_as_uint(wanted);
      kept[i] = min((b >> 23) + ((b & 0x7fffffu) != 0), 254u), scale = __uint_as_float(kept[i] << 23);
    }
    float inverse = reciprocal(scale);
    float square[OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++) x[i][j] = copysignf(round_e2m1(divide(v[j], scale, inverse)), v[j]);
    if (scale == 0.f)
#pragma unroll
      for (int j = 0; j < OWN; j++) x[i][j] = FORMAT == KV_MXFP4 ? copysignf(0.f, v[j]) : 0.f;  // 2^-127 is no zero
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      float off = __fsub_rn(__fmul_rn(x[i][j], scale), v[j]);
      square[j] = __fmul_rn(off, off);
    }
    loss[i] = __fadd_rn(square[0], square[1]);
    if constexpr (OWN == 4) loss[i] = __fadd_rn(loss[i], __fadd_rn(square[2], square[3]));
  }
  bool second = false;
  if constexpr (WAYS == 2) {
    for (int o = width / 2; o; o >>= 1) {
#pragma unroll
      for (int i = 0; i < 2; i++) loss[i] = __fadd_rn(loss[i], __shfl_xor_sync(ALL_LANES, loss[i], o));
    }
    second = loss[1] < loss[0];
  }
#pragma unroll
  for (int j = 0; j < 2; j++) code[j] = e2m1_code(second ? x[WAYS - 1][j] : x[0][j]);
  stored = second ? kept[WAYS - 1] : kept[0];
}

// The same as integers or E4M3 codes with an fp16 scale; zero: their group's zero point, or 0.
template <int FORMAT, int OWN>
__device__ __forceinline__ void encode_pair(const float (&v)[OWN], float amax, int width, u32 (&code)[2],
                                            u32& stored, u32& zero) {
  constexpr float LARGEST = FORMAT == KV_FP8 ? 448.f : FORMAT == KV_INT8 ? 127.f : FORMAT == KV_INT4 ? 7.f : 15.f;
  constexpr float PART = 1.f / LARGEST;
  float low = 0.f, range = amax;
  if constexpr (KV<FORMAT>::ZEROED) {
    float least = 0.f, most = 0.f;
#pragma unroll
    for (float one : v) least = fminf(least, one), most = fmaxf(most, one);
    low = -group_max(-least, width);
    range = __fsub_rn(group_max(most, width), low);
  }
  __half_raw raw = __float2half_rn(divide(range, LARGEST, PART));
  float scale = __half2float(__half(raw)), inverse = reciprocal(scale);
  stored = raw.x;
  auto over_scale = [&](float v) { return scale == 0.f ? 0.f : divide(v, scale, inverse); };
  float x[2] = {over_scale(v[0]), over_scale(v[1])};
  if constexpr (KV<FORMAT>::ZEROED) zero = static_cast<u32>(fminf(rintf(over_scale(-low)), 15.f));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (FORMAT == KV_FP8) {
      code[i] = encode_e4m3(scale == 0.f ? 0.f : copysignf(x[i], v[i]));
    } else if constexpr (FORMAT == KV_INT4_ASYM) {
      code[i] = static_cast<u32>(fminf(fmaxf(rintf(x[i]) + static_cast<float>(zero), 0.f), 15.f));
    } else {
      int whole = static_cast<int>(fminf(fmaxf(rintf(x[i]), -LARGEST), LARGEST));
      code[i] = FORMAT == KV_INT4 ? static_cast<u32>(abs(whole)) | (whole < 0 ? 8u : 0u)
                                  : static_cast<u32>(whole) & 0xffu;
    }
  }
}

// Where a token's row of one head is, of keys or of values.
struct Row {
  u8 *codes, *scales, *zeros;
};

// Elements that a lane of store_piece has of a group.
constexpr int OWN = KV_GROUP == 128 ? 4 : 2;
// Quantises one piece of a head, its piece-th 64 elements, by a warp: lane l holds elements 2 l and 2 l + 1 of them,
// v[0] and v[1], and, where the group goes on, those of the other piece. near: a second place for the same.
template <int FORMAT>
__device__ __forceinline__ void store_piece(const Row& row, const Row& near, int piece, const float (&v)[OWN]) {
  using F = KV<FORMAT>;
  int lane = threadIdx.x & 31, at = piece * 32 + lane;  // index of the pair
  if constexpr (!F::SCALED) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(v[0], v[1]);
    reinterpret_cast<__nv_bfloat162*>(row.codes)[at] = pair;
    reinterpret_cast<__nv_bfloat162*>(near.codes)[at] = pair;
  } else {
    constexpr int LANES = KV_GROUP / OWN;
    u32 code[2], stored, zero = 0;  // stored: the scale's bits
    float amax = fmaxf(fabsf(v[0]), fabsf(v[1]));
    if constexpr (OWN == 4) amax = fmaxf(amax, fmaxf(fabsf(v[2]), fabsf(v[3])));
    amax = group_max(amax, LANES);
    if constexpr (F::E2M1)
      encode_e2m1_pair<FORMAT>(v, amax, LANES, code, stored);
    else
      encode_pair<FORMAT>(v, amax, LANES, code, stored, zero);
    if constexpr (F::BITS == 8) {
      u16 both = static_cast<u16>(code[0] | code[1] << 8);
      reinterpret_cast<u16*>(row.codes)[at] = both, reinterpret_cast<u16*>(near.codes)[at] = both;
    } else {
      u32 placed = placed_codes<FORMAT>(code[0], code[1], lane % 2);
      placed |= __shfl_xor_sync(ALL_LANES, placed, 1);
      if (lane % 2 == 0) {
        u16 four = static_cast<u16>(placed);
        reinterpret_cast<u16*>(row.codes)[at / 2] = four, reinterpret_cast<u16*>(near.codes)[at / 2] = four;
      }
    }
    if (lane % LANES || (OWN == 4 && piece)) return;
    int group = at / LANES;
    if constexpr (F::SCALE_BYTES == 2) {
      u16 scale = static_cast<u16>(stored);
      reinterpret_cast<u16*>(row.scales)[group] = scale, reinterpret_cast<u16*>(near.scales)[group] = scale;
    } else {
      row.scales[group] = near.scales[group] = static_cast<u8>(stored);
    }
    if constexpr (F::ZEROED) row.zeros[group] = near.zeros[group] = static_cast<u8>(zero);
  }
}
