// Heads of a new token: their RMS norm and rotary, and K and V into their page. A warp holds a head, lane
// l elements 2 l and 2 l + 1 of every 64.
//
// Macros: HEADS, KV_HEADS, HEAD_DIM (64 or 128), PAGE (tokens a page), K_FORMAT, V_FORMAT.
// Numerics: float32; see kv_formats.cuh for what is stored.
#pragma once
#include "kv_formats.cuh"

#if (HEAD_DIM != 64 && HEAD_DIM != 128) || HEADS % KV_HEADS != 0 || HEADS / KV_HEADS > 8
#error "attention needs HEAD_DIM 64 or 128 and 1 to 8 query heads a KV head"
#endif
#if (K_FORMAT != KV_BF16 && K_FORMAT != KV_FP4) || (V_FORMAT != KV_BF16 && V_FORMAT != KV_FP4)
#error "define K_FORMAT and V_FORMAT as KV_BF16 (0) or KV_FP4 (1)"
#endif

constexpr int D = HEAD_DIM, GROUPS = D / 32;
constexpr bool K_SCALED = KV<K_FORMAT>::SCALED, V_SCALED = KV<V_FORMAT>::SCALED;
constexpr int K_ROW = D * KV<K_FORMAT>::BITS / 8, V_ROW = D * KV<V_FORMAT>::BITS / 8;  // bytes

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
  u8 *k_codes, *v_codes;
  __half *k_scales, *v_scales;
  const int* table;
  int kv_head;
  __device__ __forceinline__ size_t row(int page, int token) const {
    return (static_cast<size_t>(page) * KV_HEADS + kv_head) * PAGE + token % PAGE;
  }
};

// The new token as its pages hold it.
struct NewToken {
  u8 k[K_ROW], v[V_ROW];
  __half k_scales[4], v_scales[4];
};

// One warp's share of storing a new token: one of the PIECES of 64 elements of its key or of its
// value.
constexpr int PIECES = D / 64;
__device__ __forceinline__ void store_new(const float* projected, const Pages& pages, int length,
                                          bool key, int piece, const HeadFactors& factors, bool normed,
                                          float eps, NewToken& near) {
  float v[D / 32];
  load_head(v, projected + (HEADS + (key ? 0 : KV_HEADS) + pages.kv_head) * D);
  size_t row = pages.row(__ldg(pages.table + (length - 1) / PAGE), length - 1);
  if (key) turn_head(v, factors, normed, eps);
  float a = v[0], b = v[1];
  if (piece) a = v[D / 32 - 2], b = v[D / 32 - 1];
  if constexpr (K_FORMAT == V_FORMAT) {  // the code once
    store_piece<K_FORMAT>((key ? pages.k_codes : pages.v_codes) + row * K_ROW,
                          (key ? pages.k_scales : pages.v_scales) + row * GROUPS, key ? near.k : near.v,
                          key ? near.k_scales : near.v_scales, piece, a, b);
  } else if (key) {
    store_piece<K_FORMAT>(pages.k_codes + row * K_ROW, pages.k_scales + row * GROUPS, near.k, near.k_scales,
                          piece, a, b);
  } else {
    store_piece<V_FORMAT>(pages.v_codes + row * V_ROW, pages.v_scales + row * GROUPS, near.v, near.v_scales,
                          piece, a, b);
  }
}
