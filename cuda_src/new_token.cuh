// Heads of a new token: their RMS norm, rotary, rotation if ROTATED, and K and V into their page. A warp holds a head, lane
// l elements 2 l and 2 l + 1 of every 64.
//
// Macros: HEADS, KV_HEADS, HEAD_DIM (64 or 128), PAGE (tokens a page), K_FORMAT, V_FORMAT, KV_GROUP, ROTATED.
// Numerics: float32; see kv_formats.cuh for what is stored.
#pragma once
#include "hadamard.cuh"
#include "kv_formats.cuh"

#if (HEAD_DIM != 64 && HEAD_DIM != 128) || HEADS % KV_HEADS != 0 || HEADS / KV_HEADS > 16
#error "attention needs HEAD_DIM 64 or 128 and 1 to 16 query heads a KV head"
#endif
#if !defined(K_FORMAT) || !defined(V_FORMAT) || K_FORMAT < KV_BF16 || K_FORMAT > KV_FP8 || V_FORMAT < KV_BF16 || \
    V_FORMAT > KV_FP8
#error "define K_FORMAT and V_FORMAT as 0 to 7: bf16, fp4, mxfp4, nvfp4, int4, int4_asym, int8, fp8"
#endif
#if KV_GROUP != 16 && KV_GROUP != 32 && KV_GROUP != 64 && (KV_GROUP != 128 || HEAD_DIM != 128)
#error "attention needs KV_GROUP 16, 32, 64, or 128 in heads of 128"
#endif
#ifndef ROTATED
#define ROTATED 0
#endif
#ifndef WINDOWED
#define WINDOWED 0
#endif

typedef KV<K_FORMAT> KFormat;
typedef KV<V_FORMAT> VFormat;
// Query heads of a KV head that read it together: all, or an equal part of more than 8.
__device__ constexpr int head_parts(int heads) {
  int parts = 1;
  while (heads % parts || heads / parts > 8) parts++;
  return parts;
}
constexpr int HEAD_PARTS = head_parts(HEADS / KV_HEADS), HEAD_GROUPS = KV_HEADS * HEAD_PARTS;
constexpr int D = HEAD_DIM, GROUPS = D / KV_GROUP;
constexpr bool K_SCALED = KFormat::SCALED, V_SCALED = VFormat::SCALED;
// Bytes of a token's codes, scales and zero points.
constexpr int K_ROW = D * KFormat::BITS / 8, V_ROW = D * VFormat::BITS / 8;
constexpr int K_SCALE_ROW = GROUPS * KFormat::SCALE_BYTES, V_SCALE_ROW = GROUPS * VFormat::SCALE_BYTES;
constexpr int K_ZERO_ROW = KFormat::ZEROED * GROUPS, V_ZERO_ROW = VFormat::ZEROED * GROUPS;

// What a lane needs for norm and rotary, spread as store_piece wants the elements.
struct HeadFactors {
  float norm[D / 32];
  float2 turn[2];
  __device__ __forceinline__ HeadFactors(const float* weight, const float2* cos_sin) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
      norm[i] = weight ? __ldg(weight + i / 2 * 64 + 2 * lane + i % 2) : 1.f;
#pragma unroll
    for (int i = 0; i < 2; i++) turn[i] = __ldg(cos_sin + (2 * lane + i) % (D / 2));
  }
};

__device__ __forceinline__ void load_head(float* v, const float* x) {
#pragma unroll
  for (int h = 0; h < D / 64; h++) {
    float2 q = __ldcg(reinterpret_cast<const float2*>(x) + h * 32 + (threadIdx.x & 31));
    v[2 * h] = q.x, v[2 * h + 1] = q.y;
  }
}

// Norms a loaded head if `normed` and turns it.
__device__ __forceinline__ void turn_head(float* v, const HeadFactors& factors, bool normed,
                                          float eps) {
  int lane = threadIdx.x & 31;
  if (normed) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < D / 32; i++) square += v[i] * v[i];
    float inverse = rsqrtf(warp_sum(square) / D + eps);
#pragma unroll
    for (int i = 0; i < D / 32; i++) v[i] *= inverse * factors.norm[i];
  }
#if HEAD_DIM == 128
#pragma unroll
  for (int i = 0; i < 2; i++) {  // element 2 l + i turns with element 64 + 2 l + i
    float2 cs = factors.turn[i];
    float a = v[i], b = v[2 + i];
    v[i] = a * cs.x - b * cs.y;
    v[2 + i] = b * cs.x + a * cs.y;
  }
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {  // element 2 l + i turns with the one 16 lanes on
    float other = __shfl_xor_sync(ALL_LANES, v[i], 16);
    float2 cs = factors.turn[i];
    v[i] = lane < 16 ? v[i] * cs.x - other * cs.y : v[i] * cs.x + other * cs.y;
  }
#endif
}

// Where one KV head's rows are.
struct Pages {
  u8 *k_codes, *k_scales, *k_zeros, *v_codes, *v_scales, *v_zeros;
  const int* table;
  int kv_head;
  __device__ __forceinline__ size_t row(int page, int token) const {
    return (static_cast<size_t>(page) * KV_HEADS + kv_head) * PAGE + token % PAGE;
  }
  __device__ __forceinline__ Row at(bool key, size_t row) const {
    return {(key ? k_codes : v_codes) + row * (key ? K_ROW : V_ROW),
            (key ? k_scales : v_scales) + row * (key ? K_SCALE_ROW : V_SCALE_ROW),
            (key ? k_zeros : v_zeros) + row * (key ? K_ZERO_ROW : V_ZERO_ROW)};
  }
};

// The new token as its pages hold it.
struct NewToken {
  u8 k[K_ROW], v[V_ROW], k_scales[2 * GROUPS], v_scales[2 * GROUPS], k_zeros[GROUPS], v_zeros[GROUPS];
  __device__ __forceinline__ Row at(bool key) {
    return {key ? k : v, key ? k_scales : v_scales, key ? k_zeros : v_zeros};
  }
};

// One warp's share of storing a new token, near and in its pages: one of the PIECES of 64 elements of its key or of
// its value.
constexpr int PIECES = D / 64;
__device__ __forceinline__ void store_new(const float* projected, const Pages& pages, int length,
                                          bool key, int piece, const HeadFactors& factors, bool normed,
                                          float eps, NewToken& near, bool in_pages = true) {
  float v[D / 32];
  load_head(v, projected + (HEADS + (key ? 0 : KV_HEADS) + pages.kv_head) * D);
  size_t row = pages.row(__ldg(pages.table + (length - 1) / PAGE), length - 1);
  if (key) turn_head(v, factors, normed, eps);
  if (ROTATED) hadamard<32>(v);
  float own[OWN] = {v[0], v[1]};
  if constexpr (OWN == 4) own[2] = v[D / 32 - 2], own[3] = v[D / 32 - 1];
  if (piece) {
    own[0] = v[D / 32 - 2], own[1] = v[D / 32 - 1];
    if constexpr (OWN == 4) own[2] = v[0], own[3] = v[1];
  }
  // Another part of the heads has put it into the pages: then near twice.
  auto row_of = [&](bool is_key) { return HEAD_PARTS == 1 || in_pages ? pages.at(is_key, row) : near.at(is_key); };
  if constexpr (K_FORMAT == V_FORMAT)  // the code once
    store_piece<K_FORMAT>(row_of(key), near.at(key), piece, own);
  else if (key)
    store_piece<K_FORMAT>(row_of(true), near.at(true), piece, own);
  else
    store_piece<V_FORMAT>(row_of(false), near.at(false), piece, own);
}
