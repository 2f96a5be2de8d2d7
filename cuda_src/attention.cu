// One token a sequence: q/k norm, rotary, K and V into their page, paged attention over the context.
//
//   out[s][h] = sum_j softmax_j(scale q[s][h] . k[j]) v[j],   j < seq_lens[s]
//
//   out       float32 [seqs][HEADS][D]           out
//   projected float32 [seqs][(HEADS + 2 KV_HEADS) D]   in: rows of q, then k, then v
//   q_norm, k_norm float32 [D] or null           in: RMS norm of each head
//   cos_sin   float2 [max_positions][D / 2]      in: rotary factors
//   k_codes, v_codes   pages [num_pages][KV_HEADS][PAGE][D], bf16 or packed   in and out
//   k_scales, v_scales fp16 [num_pages][KV_HEADS][PAGE][D / KV_GROUP]        in and out
//   block_table int32 [seqs][max_pages]; seq_lens int32 [seqs], the new token counted   in
//   partial   float32 [seqs][KV_HEADS][splits / CLUSTER][3][RATIO D]   scratch: sums, maxima, weights
//   arrived   u32 [seqs][KV_HEADS][CLUSTER], zero; left zero     scratch
//   max_pages int32; eps, scale float32
// Grid: (splits, KV_HEADS, seqs) blocks of 256 threads, splits a multiple of CLUSTER and at most
// 32 CLUSTER. A split takes the next ceil(len / splits) tokens, rounded up to 64. The CLUSTER splits
// of a cluster are combined through shared memory, each block for its share of the outputs; where
// there are several clusters a head, the last block to arrive combines their shares.
// Macros: HEADS, KV_HEADS, HEAD_DIM (D: 64 or 128), PAGE (tokens a page), K_FORMAT, V_FORMAT,
// KV_GROUP (32), CLUSTER (8 or 1).
// Alignment: 16 bytes everywhere.
// Numerics: tensor-core products of exact codes with activations and weights split in a 16-bit head
// and rest, float32 sums, group scales applied in float32; splits are combined in order.
// Limit: values in fp4 pages below 49,000 (their scale times 8 must fit fp16).
#include "kv_formats.cuh"

#if (HEAD_DIM != 64 && HEAD_DIM != 128) || HEADS % KV_HEADS != 0 || HEADS / KV_HEADS > 8
#error "attention needs HEAD_DIM 64 or 128 and 1 to 8 query heads a KV head"
#endif
#if (K_FORMAT != KV_BF16 && K_FORMAT != KV_FP4) || (V_FORMAT != KV_BF16 && V_FORMAT != KV_FP4)
#error "define K_FORMAT and V_FORMAT as KV_BF16 (0) or KV_FP4 (1)"
#endif
#if KV_GROUP != 32 || PAGE < 1 || (CLUSTER != 1 && CLUSTER != 8)
#error "attention needs KV_GROUP 32, PAGE 1 or more, and CLUSTER 1 or 8"
#endif

constexpr int D = HEAD_DIM, RATIO = HEADS / KV_HEADS, THREADS = 256, SPAN = 64;  // tokens a tile
constexpr int GROUPS = D / 32, DIM_TILES = D / 64;  // tiles of 8 dims a warp has of the output
constexpr int K_ROW = D * KV<K_FORMAT>::BITS / 8, V_ROW = D * KV<V_FORMAT>::BITS / 8;  // bytes
constexpr int K_WORDS = KV<K_FORMAT>::BITS / 4;  // 32-bit words of 8 elements
constexpr int V_PARTS = V_ROW / 16, V_EACH = SPAN * V_PARTS / THREADS > 0 ? SPAN * V_PARTS / THREADS : 1;
constexpr int V_STRIDE = V_ROW + 16;  // in shared memory: rows 2 t on different banks
constexpr float V_FACTOR = KV<V_FORMAT>::SCALED ? 8.f : 1.f;
constexpr float V_UNDO = KV<V_FORMAT>::SCALED ? 2048.f : 1.f;  // 2^14 of the codes / V_FACTOR

// What a lane needs for norm and rotary, spread as store_head wants the elements.
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

// A pair of floats as 16-bit numbers, bf16 where the other operand is bf16, and what is left of them.
template <int FORMAT>
__device__ __forceinline__ uint2 head_and_rest(float a, float b) {
  if constexpr (FORMAT == KV_BF16) {
    __nv_bfloat162 head = __floats2bfloat162_rn(a, b);
    float2 f = __bfloat1622float2(head);
    return make_uint2(bits(head), bits(__floats2bfloat162_rn(a - f.x, b - f.y)));
  } else {
    __half2 head = __floats2half2_rn(a, b);
    float2 f = __half22float2(head);
    return make_uint2(bits(head), bits(__floats2half2_rn(a - f.x, b - f.y)));
  }
}
template <int FORMAT>
__device__ __forceinline__ void mma(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  if constexpr (FORMAT == KV_BF16)
    mma_bf16(c, a, b0, b1);
  else
    mma_f16(c, a, b0, b1);
}

// What a thread holds of a tile of SPAN tokens between its loads and its use.
struct Tile {
  u32 k[GROUPS][K_WORDS];  // token 8 warp + lane / 4: of each group the 8 elements from 8 t on
  uint2 k_scales[2];       // tokens 8 warp + 2 t and the next: fp16 a group
  uint4 v[V_EACH];
  uint2 v_scales;          // token threadIdx.x
};

struct Pages {
  u8 *k_codes, *v_codes;
  __half *k_scales, *v_scales;
  const int* table;
  int kv_head;
  __device__ __forceinline__ size_t row(int token) const {
    return (static_cast<size_t>(__ldg(table + token / PAGE)) * KV_HEADS + kv_head) * PAGE +
           token % PAGE;
  }
};

__device__ __forceinline__ uint2 load_scales(const __half* scales, size_t row) {
  if constexpr (GROUPS == 4) return __ldcg(reinterpret_cast<const uint2*>(scales) + row);
  return make_uint2(__ldcg(reinterpret_cast<const u32*>(scales) + row), 0u);
}

// Loads a thread's part of the tokens [first, first + SPAN) that lie in [only, end).
__device__ __forceinline__ void load_tile(Tile& tile, const Pages& pages, int first, int only,
                                          int end) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  int token = first + warp * 8 + (lane >> 2);
  if (token >= only && token < end) {
    const u8* row = pages.k_codes + pages.row(token) * K_ROW + t * (K_WORDS * 4);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const u8* p = row + g * (K_WORDS * 16);
      if constexpr (K_WORDS == 4) {
        uint4 q = __ldcg(reinterpret_cast<const uint4*>(p));
        tile.k[g][0] = q.x, tile.k[g][1] = q.y, tile.k[g][2] = q.z, tile.k[g][3] = q.w;
      } else {
        tile.k[g][0] = __ldcg(reinterpret_cast<const u32*>(p));
      }
    }
  }
  if constexpr (KV<K_FORMAT>::SCALED)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      token = first + warp * 8 + 2 * t + i;
      if (token >= only && token < end)
        tile.k_scales[i] = load_scales(pages.k_scales, pages.row(token));
    }
#pragma unroll
  for (int i = 0; i < V_EACH; i++) {
    int at = threadIdx.x + i * THREADS;
    token = first + at / V_PARTS;
    if (at < SPAN * V_PARTS && token >= only && token < end)
      tile.v[i] = __ldcg(reinterpret_cast<const uint4*>(pages.v_codes + pages.row(token) * V_ROW) +
                         at % V_PARTS);
  }
  if constexpr (KV<V_FORMAT>::SCALED) {
    token = first + threadIdx.x;
    if (threadIdx.x < SPAN && token >= only && token < end)
      tile.v_scales = load_scales(pages.v_scales, pages.row(token));
  }
}

// Replaces what was loaded for the tile's token `at` by the rows that this block has just made.
__device__ __forceinline__ void take_new_token(Tile& tile, int at, const u8* k, const __half* k_scales,
                                               const u8* v, const __half* v_scales) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  if (at == warp * 8 + (lane >> 2))
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int i = 0; i < K_WORDS; i++)
        tile.k[g][i] = reinterpret_cast<const u32*>(k)[(g * 4 + t) * K_WORDS + i];
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (at == warp * 8 + 2 * t + i) tile.k_scales[i] = *reinterpret_cast<const uint2*>(k_scales);
#pragma unroll
  for (int i = 0; i < V_EACH; i++) {
    int part = threadIdx.x + i * THREADS;
    if (at == part / V_PARTS) tile.v[i] = reinterpret_cast<const uint4*>(v)[part % V_PARTS];
  }
  if (at == static_cast<int>(threadIdx.x)) tile.v_scales = *reinterpret_cast<const uint2*>(v_scales);
}

// Scores of 8 tokens for all heads: c[0], c[1] = head lane / 4 with tokens 2 t and 2 t + 1.
__device__ __forceinline__ float2 scores(const Tile& tile, const uint4 (&q)[GROUPS][2]) {
  float2 sum = make_float2(0.f, 0.f);
  float c[4] = {};
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    if constexpr (K_FORMAT == KV_BF16) {
      mma<K_FORMAT>(c, q[g][0], tile.k[g][0], tile.k[g][1]);
      mma<K_FORMAT>(c, q[g][1], tile.k[g][2], tile.k[g][3]);
    } else {
      u32 pairs[4];
      fp4_pairs(tile.k[g][0], pairs);
      float d[4] = {};
      mma<K_FORMAT>(d, q[g][0], pairs[0], pairs[1]);
      mma<K_FORMAT>(d, q[g][1], pairs[2], pairs[3]);
      float2 low = floats(g < 2 ? tile.k_scales[0].x : tile.k_scales[0].y);
      float2 high = floats(g < 2 ? tile.k_scales[1].x : tile.k_scales[1].y);
      sum.x += (g % 2 ? low.y : low.x) * (d[0] + d[2]);
      sum.y += (g % 2 ? high.y : high.x) * (d[1] + d[3]);
    }
  }
  if constexpr (K_FORMAT == KV_BF16) return make_float2(c[0] + c[2], c[1] + c[3]);
  return make_float2(sum.x * 16384.f, sum.y * 16384.f);
}

// Adds a tile's values times `weights` [8 heads][SPAN] to mixed: c of the warp's tiles of 8 dims.
__device__ __forceinline__ void mix(float (&mixed)[DIM_TILES][4], const float (*weights)[SPAN + 4],
                                    const u8* values, const __half (*scales)[4]) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, g = lane >> 2;
#pragma unroll
  for (int step = 0; step < SPAN / 16; step++) {
    float p[4];
    u32 raw[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = step * 16 + 2 * t + i % 2 + i / 2 * 8;
      p[i] = weights[g][token];
      if constexpr (KV<V_FORMAT>::SCALED) {
        p[i] *= __half2float(scales[token][warp * DIM_TILES * 8 / 32]) * V_FACTOR;
        int element = (warp * 8 + g) * DIM_TILES;  // its byte holds elements of both dim tiles
        raw[i] = values[token * V_STRIDE + element / 2];
        if (DIM_TILES == 1) raw[i] >>= element % 2 * 4;
      } else {
        const u8* at = values + token * V_STRIDE + (warp * 8 + g) * DIM_TILES * 2;
        raw[i] = DIM_TILES == 2 ? *reinterpret_cast<const u32*>(at)
                                : *reinterpret_cast<const unsigned short*>(at);
      }
    }
    uint2 first = head_and_rest<V_FORMAT>(p[0], p[1]), second = head_and_rest<V_FORMAT>(p[2], p[3]);
    uint4 a = make_uint4(first.x, first.y, second.x, second.y);
#pragma unroll
    for (int j = 0; j < DIM_TILES; j++) {
      u32 b[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if constexpr (KV<V_FORMAT>::SCALED) {
          u32 both = (raw[2 * i] >> 4 * j & 15u) | (raw[2 * i + 1] >> 4 * j & 15u) << 16;
          b[i] = (both << 12 & 0x80008000u) | (both << 9 & 0x0E000E00u);
        } else {
          b[i] = __byte_perm(raw[2 * i], raw[2 * i + 1], j ? 0x7632 : 0x5410);
        }
      }
      mma<V_FORMAT>(mixed[j], a, b[0], b[1]);
    }
  }
}

#if CLUSTER > 1
#define CLUSTER_BOUNDS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_BOUNDS
#endif

extern "C" __global__ void CLUSTER_BOUNDS __launch_bounds__(THREADS, 2)
attention(float* __restrict__ out, const float* projected, const float* __restrict__ q_norm,
          const float* __restrict__ k_norm, const float2* __restrict__ cos_sin, u8* k_codes,
          __half* k_scales, u8* v_codes, __half* v_scales, const int* block_table,
          const int* seq_lens, float* partial, u32* arrived, int max_pages, float eps,
          float scale) {
  __shared__ __align__(16) float q_shared[8][D];
  __shared__ __align__(16) float weights[8][SPAN + 4];
  __shared__ __align__(16) u8 values[SPAN * V_STRIDE];
  __shared__ __align__(16) __half value_scales[SPAN][4];
  __shared__ __align__(16) u8 new_k[K_ROW], new_v[V_ROW];  // the new token, where it is ours
  __shared__ __align__(8) __half new_k_scales[4], new_v_scales[4];
  __shared__ float sums[8][D], top[8], total[8], shrink[8];
  __shared__ bool last;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, t = lane & 3, g = lane >> 2;
  int kv = blockIdx.y, seq = blockIdx.z, splits = gridDim.x;

  // Lengths, tables and older tokens do not depend on the kernel before: fetch them early.
  int length = __ldcg(seq_lens + seq);
  int each = ((length + splits - 1) / splits + SPAN - 1) / SPAN * SPAN;
  int active = (length + each - 1) / each;
  int clusters = (active + CLUSTER - 1) / CLUSTER, cluster = blockIdx.x / CLUSTER;
  int begin = min(static_cast<int>(blockIdx.x) * each, length), end = min(begin + each, length);
  bool newest = begin < end && end == length;
  Pages pages = {k_codes, v_codes, k_scales, v_scales,
                 block_table + static_cast<size_t>(seq) * max_pages, kv};
  Tile tile = {};
  load_tile(tile, pages, begin, begin, end);
  const float2* turn = cos_sin + static_cast<size_t>(length - 1) * (D / 2);
  const HeadFactors q_factors(q_norm, turn), k_factors(k_norm, turn);
  STAMP(1);
  grid_wait();
  launch_next();
  STAMP(3);
  if (cluster >= clusters) {
    STAMP(7);
    return;
  }

  const float* mine = projected + static_cast<size_t>(seq) * (HEADS + 2 * KV_HEADS) * D;
  {
    float v[D / 32] = {}, n[D / 32];
    if (warp < RATIO) load_head(v, mine + (kv * RATIO + warp) * D);
    bool writes = newest && warp < 2;  // this split owns the new token: its key and its value
    if (writes) load_head(n, mine + (HEADS + warp * KV_HEADS + kv) * D);
    if (warp < RATIO) turn_head(v, q_factors, q_norm, eps);
#pragma unroll
    for (int i = 0; i < D / 32; i++)
      q_shared[warp][i / 2 * 64 + 2 * lane + i % 2] = v[i] * scale;
    size_t row = writes ? pages.row(length - 1) : 0;
    if (writes && warp == 0) {
      turn_head(n, k_factors, k_norm, eps);
      store_head<K_FORMAT, D>(k_codes + row * K_ROW, k_scales + row * GROUPS, new_k, new_k_scales, n);
    } else if (writes) {
      store_head<V_FORMAT, D>(v_codes + row * V_ROW, v_scales + row * GROUPS, new_v, new_v_scales, n);
    }
  }
  if (tid < 8) top[tid] = -INFINITE, total[tid] = 0.f;
  __syncthreads();
  STAMP(4);
  uint4 q[GROUPS][2];
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const float* x = &q_shared[g][i * 32 + t * 8];
    float e[8];
#pragma unroll
    for (int k = 0; k < 8; k++) e[k] = x[k];
#pragma unroll
    for (int step = 0; step < 2; step++) {
      // Elements in the order in which a word of codes gives them out.
      constexpr bool PACKED = K_FORMAT != KV_BF16;
      int a = PACKED ? 2 * step : 4 * step, b = PACKED ? a + 1 : a + 2, far = PACKED ? 4 : 1;
      uint2 first = head_and_rest<K_FORMAT>(e[a], e[a + far]);
      uint2 second = head_and_rest<K_FORMAT>(e[b], e[b + far]);
      q[i][step] = make_uint4(first.x, first.y, second.x, second.y);
    }
  }

  float mixed[DIM_TILES][4] = {};
#pragma unroll 1
  for (int first = begin; first < end; first += SPAN) {
    if (newest && length - first <= SPAN)
      take_new_token(tile, length - 1 - first, new_k, new_k_scales, new_v, new_v_scales);
    float2 s = scores(tile, q);
    int token = warp * 8 + 2 * t;
    weights[g][token] = first + token < end ? s.x : -INFINITE;
    weights[g][token + 1] = first + token + 1 < end ? s.y : -INFINITE;
#pragma unroll
    for (int i = 0; i < V_EACH; i++) {
      int at = tid + i * THREADS;
      bool there = first + at / V_PARTS < end;
      if (at < SPAN * V_PARTS)
        *reinterpret_cast<uint4*>(values + at / V_PARTS * V_STRIDE + at % V_PARTS * 16) =
            there ? tile.v[i] : make_uint4(0, 0, 0, 0);
    }
    if (KV<V_FORMAT>::SCALED && tid < SPAN)
      *reinterpret_cast<uint2*>(value_scales[tid]) =
          first + tid < end ? tile.v_scales : make_uint2(0, 0);
    if (first + SPAN < end) load_tile(tile, pages, first + SPAN, first + SPAN, end);
    __syncthreads();
    if (warp < RATIO) {
      float a = weights[warp][lane], b = weights[warp][lane + 32];
      float before = top[warp], now = fmaxf(before, warp_max(fmaxf(a, b)));
      a = __expf(a - now), b = __expf(b - now);
      float sum = warp_sum(a + b);
      weights[warp][lane] = a, weights[warp][lane + 32] = b;
      if (lane == 0) {
        shrink[warp] = __expf(before - now);
        total[warp] = total[warp] * shrink[warp] + sum;
        top[warp] = now;
      }
    } else {
      weights[warp][lane] = 0.f, weights[warp][lane + 32] = 0.f;
      if (lane == 0) shrink[warp] = 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < DIM_TILES; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) mixed[j][i] *= shrink[g];
    mix(mixed, weights, values, value_scales);
    __syncthreads();
  }

#pragma unroll
  for (int j = 0; j < DIM_TILES; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      sums[g][(warp * 8 + 2 * t + i) * DIM_TILES + j] = (mixed[j][i] + mixed[j][i + 2]) * V_UNDO;
  STAMP(5);
  cluster_sync();
  STAMP(6);
  constexpr int SHARE = (RATIO * D + CLUSTER - 1) / CLUSTER, EACH = (SHARE + THREADS - 1) / THREADS;
  int rank = cluster_rank();
  float sum[EACH], highest[EACH], weight[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = rank * SHARE + min(tid + i * THREADS, SHARE - 1), h = at / D;
    float tops[CLUSTER];
    highest[i] = -INFINITE, sum[i] = 0.f, weight[i] = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) tops[r] = peer_float(top + h, r);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) highest[i] = fmaxf(highest[i], tops[r]);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      float factor = __expf(tops[r] - highest[i]);
      sum[i] += factor * peer_float(&sums[0][0] + at, r);
      weight[i] += factor * peer_float(total + h, r);
    }
  }
  cluster_sync();  // nobody leaves while others read its memory
  float* result = out + (static_cast<size_t>(seq) * HEADS + kv * RATIO) * D;
  float* own = partial +
               (static_cast<size_t>(seq) * KV_HEADS + kv) * (splits / CLUSTER) * 3 * RATIO * D;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = rank * SHARE + tid + i * THREADS;
    if (tid + i * THREADS < SHARE) {
      if (clusters == 1) {
        result[at] = sum[i] / weight[i];
      } else {
        float* place = own + cluster * 3 * RATIO * D + at;
        place[0] = sum[i], place[RATIO * D] = highest[i], place[2 * RATIO * D] = weight[i];
      }
    }
  }
  if (clusters == 1) {
    STAMP(7);
    return;
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) {
    u32* counter = arrived + (seq * KV_HEADS + kv) * CLUSTER + rank;
    last = atomicAdd(counter, 1u) == static_cast<u32>(clusters - 1);
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) {
    STAMP(7);
    return;
  }
  __threadfence();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = rank * SHARE + tid + i * THREADS;
    if (tid + i * THREADS < SHARE) {
      float whole = -INFINITE, total_sum = 0.f, total_weight = 0.f;
#pragma unroll 8
      for (int c = 0; c < clusters; c++)
        whole = fmaxf(whole, __ldcg(own + (c * 3 + 1) * RATIO * D + at));
#pragma unroll 8
      for (int c = 0; c < clusters; c++) {
        const float* place = own + c * 3 * RATIO * D + at;
        float factor = __expf(__ldcg(place + RATIO * D) - whole);
        total_sum += factor * __ldcg(place);
        total_weight += factor * __ldcg(place + 2 * RATIO * D);
      }
      result[at] = total_sum / total_weight;
    }
  }
  STAMP(7);
}
CPU_KERNEL(attention)
