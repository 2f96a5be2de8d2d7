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
//   partial   float32 [seqs][KV_HEADS][gridDim.x][RATIO][D + 2]   scratch: sums, maximum, weight
//   arrived   u32 [seqs][KV_HEADS], zero; left zero     scratch
//   max_pages int32; eps, scale float32
// Grid: (splits <= 32, KV_HEADS, seqs) blocks of 256 threads. A split takes the next ceil(len / splits)
// tokens, rounded up to 64; the last block of a head to arrive combines the splits.
// Macros: HEADS, KV_HEADS, HEAD_DIM (D: 64 or 128), PAGE (tokens a page), K_FORMAT, V_FORMAT, KV_GROUP (32).
// Numerics: float32 throughout; splits are combined in order.
#include "kv_formats.cuh"

#if (HEAD_DIM != 64 && HEAD_DIM != 128) || HEADS % KV_HEADS != 0 || KV_GROUP != 32
#error "attention needs HEAD_DIM 64 or 128, KV_GROUP 32, and HEADS a multiple of KV_HEADS"
#endif

constexpr int D = HEAD_DIM, RATIO = HEADS / KV_HEADS, THREADS = 256, TOKENS_A_TILE = 64;
constexpr int QUARTERS = 4, PART = D / QUARTERS, PAD = PART + 4, CHUNKS = D / 8;
constexpr int GROUPS = THREADS / CHUNKS, EACH = TOKENS_A_TILE / GROUPS;

// RMS norm and rotary of one head, spread over a warp as store_head wants it.
__device__ __forceinline__ void load_head(float* v, const float* x, const float* norm,
                                          const float2* cos_sin, float eps) {
  int lane = threadIdx.x & 31;
  float square = 0.f;
#pragma unroll
  for (int h = 0; h < D / 64; h++) {
    float2 q = __ldcg(reinterpret_cast<const float2*>(x) + h * 32 + lane);
    v[2 * h] = q.x, v[2 * h + 1] = q.y;
    square += q.x * q.x + q.y * q.y;
  }
  if (norm) {
    float inverse = rsqrtf(warp_sum(square) / D + eps);
#pragma unroll
    for (int h = 0; h < D / 64; h++) {
      v[2 * h] *= inverse * norm[h * 64 + 2 * lane];
      v[2 * h + 1] *= inverse * norm[h * 64 + 2 * lane + 1];
    }
  }
  if (!cos_sin) return;
#if HEAD_DIM == 128
#pragma unroll
  for (int i = 0; i < 2; i++) {  // element 2 l + i turns with element 64 + 2 l + i
    float2 cs = cos_sin[2 * lane + i];
    float a = v[i], b = v[2 + i];
    v[i] = a * cs.x - b * cs.y;
    v[2 + i] = b * cs.x + a * cs.y;
  }
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {  // element 2 l + i turns with the one 16 lanes on
    float other = __shfl_xor_sync(ALL_LANES, v[i], 16);
    float2 cs = cos_sin[(2 * lane + i) % 32];
    v[i] = lane < 16 ? v[i] * cs.x - other * cs.y : v[i] * cs.x + other * cs.y;
  }
#endif
}

template <int FORMAT>
__device__ __forceinline__ size_t row_of(const int* table, int token, int head) {
  return (static_cast<size_t>(table[token / PAGE]) * KV_HEADS + head) * PAGE + token % PAGE;
}

template <int FORMAT, int N>  // elements [at, at + N) of a row
__device__ __forceinline__ void load_part(const u8* codes, const __half* scales, size_t row, int at,
                                          float (&out)[N]) {
  constexpr int BYTES = N * KV<FORMAT>::BITS / 8;
  u32 words[BYTES / 4];
  const u8* p = codes + row * (D * KV<FORMAT>::BITS / 8) + at * KV<FORMAT>::BITS / 8;
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
      uint4 q = __ldcg(reinterpret_cast<const uint4*>(p) + i);
      words[4 * i] = q.x, words[4 * i + 1] = q.y, words[4 * i + 2] = q.z, words[4 * i + 3] = q.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++) words[i] = __ldcg(reinterpret_cast<const u32*>(p) + i);
  }
  float scale = KV<FORMAT>::SCALED ? __half2float(scales[row * (D / KV_GROUP) + at / KV_GROUP]) : 1.f;
  decode<FORMAT, N>(words, scale, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention(float* __restrict__ out, const float* projected, const float* __restrict__ q_norm,
          const float* __restrict__ k_norm, const float2* __restrict__ cos_sin, u8* k_codes,
          __half* k_scales, u8* v_codes, __half* v_scales, const int* block_table,
          const int* seq_lens, float* partial, u32* arrived, int max_pages, float eps,
          float scale) {
  __shared__ __align__(16) float q_shared[RATIO][QUARTERS][PAD];
  __shared__ float weights[RATIO][TOKENS_A_TILE];
  __shared__ float top[RATIO], total[RATIO], shrink[RATIO];
  __shared__ __align__(16) float sums[THREADS / 32][RATIO][D];
  __shared__ bool last;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  int kv = blockIdx.y, seq = blockIdx.z, splits = gridDim.x;
  grid_wait();
  launch_next();
  int length = seq_lens[seq];
  const int* table = block_table + static_cast<size_t>(seq) * max_pages;
  int each = ((length + splits - 1) / splits + TOKENS_A_TILE - 1) / TOKENS_A_TILE * TOKENS_A_TILE;
  int active = (length + each - 1) / each;
  int begin = blockIdx.x * each, end = min(begin + each, length);
  if (static_cast<int>(blockIdx.x) >= active) return;

  const float* mine = projected + static_cast<size_t>(seq) * (HEADS + 2 * KV_HEADS) * D;
  const float2* turn = cos_sin + static_cast<size_t>(length - 1) * (D / 2);
  for (int h = warp; h < RATIO + 2; h += THREADS / 32) {
    float v[D / 32];
    if (h < RATIO) {
      load_head(v, mine + (kv * RATIO + h) * D, q_norm, turn, eps);
#pragma unroll
      for (int i = 0; i < D / 32; i++) {
        int d = i / 2 * 64 + 2 * lane + i % 2;
        q_shared[h][d / PART][d % PART] = v[i] * scale;
      }
    } else if (end == length) {  // this split owns the new token
      size_t row = row_of<K_FORMAT>(table, length - 1, kv);
      if (h == RATIO) {
        load_head(v, mine + (HEADS + kv) * D, k_norm, turn, eps);
        store_head<K_FORMAT, D>(k_codes + row * (D * KV<K_FORMAT>::BITS / 8),
                                k_scales + row * (D / KV_GROUP), v);
      } else {
        load_head(v, mine + (HEADS + KV_HEADS + kv) * D, nullptr, nullptr, eps);
        store_head<V_FORMAT, D>(v_codes + row * (D * KV<V_FORMAT>::BITS / 8),
                                v_scales + row * (D / KV_GROUP), v);
      }
    }
  }
  if (tid < RATIO) top[tid] = -INFINITE, total[tid] = 0.f;
  __threadfence_block();
  __syncthreads();

  float mixed[RATIO][8] = {};
  int chunk = tid % CHUNKS, group = tid / CHUNKS;
  for (int first = begin; first < end; first += TOKENS_A_TILE) {
    {  // scores: a thread takes a quarter of one token's key
      int token = first + tid / QUARTERS, quarter = tid % QUARTERS;
      float k[PART] = {};
      if (token < end)
        load_part<K_FORMAT, PART>(k_codes, k_scales, row_of<K_FORMAT>(table, token, kv),
                                  quarter * PART, k);
#pragma unroll
      for (int h = 0; h < RATIO; h++) {
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < PART; i += 4) {
          float4 q = *reinterpret_cast<const float4*>(&q_shared[h][quarter][i]);
          dot += q.x * k[i] + q.y * k[i + 1] + q.z * k[i + 2] + q.w * k[i + 3];
        }
        dot += __shfl_xor_sync(ALL_LANES, dot, 1);
        dot += __shfl_xor_sync(ALL_LANES, dot, 2);
        if (quarter == h % QUARTERS) weights[h][tid / QUARTERS] = token < end ? dot : -INFINITE;
      }
    }
    __syncthreads();
    for (int h = warp; h < RATIO; h += THREADS / 32) {
      float a = weights[h][lane], b = weights[h][lane + 32];
      float before = top[h], now = fmaxf(before, warp_max(fmaxf(a, b)));
      a = __expf(a - now), b = __expf(b - now);
      float sum = warp_sum(a + b);
      weights[h][lane] = a, weights[h][lane + 32] = b;
      __syncwarp();
      if (lane == 0) {
        shrink[h] = __expf(before - now);
        total[h] = total[h] * shrink[h] + sum;
        top[h] = now;
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < RATIO; h++)
#pragma unroll
      for (int i = 0; i < 8; i++) mixed[h][i] *= shrink[h];
#pragma unroll
    for (int n = 0; n < EACH; n++) {  // values: a thread takes 8 elements of every GROUPS-th token
      int at = group + n * GROUPS;
      if (first + at < end) {
        float v[8];
        load_part<V_FORMAT, 8>(v_codes, v_scales, row_of<V_FORMAT>(table, first + at, kv), chunk * 8,
                               v);
#pragma unroll
        for (int h = 0; h < RATIO; h++)
#pragma unroll
          for (int i = 0; i < 8; i++) mixed[h][i] += weights[h][at] * v[i];
      }
    }
    __syncthreads();
  }

  // Groups of a warp by a butterfly, then warps through shared memory.
#pragma unroll
  for (int h = 0; h < RATIO; h++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float v = mixed[h][i];
#pragma unroll
      for (int o = 16; o >= CHUNKS; o >>= 1) v += __shfl_xor_sync(ALL_LANES, v, o);
      if (lane < CHUNKS) sums[warp][h][chunk * 8 + i] = v;
    }
  __syncthreads();
  float* own = partial + ((static_cast<size_t>(seq) * KV_HEADS + kv) * splits) * RATIO * (D + 2);
  for (int i = tid; i < RATIO * D; i += THREADS) {
    int h = i / D, d = i % D;
    float v = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) v += sums[w][h][d];
    if (active == 1)
      out[(static_cast<size_t>(seq) * HEADS + kv * RATIO + h) * D + d] = v / total[h];
    else
      own[(blockIdx.x * RATIO + h) * (D + 2) + d] = v;
  }
  if (active == 1) return;
  if (tid < RATIO) {
    own[(blockIdx.x * RATIO + tid) * (D + 2) + D] = top[tid];
    own[(blockIdx.x * RATIO + tid) * (D + 2) + D + 1] = total[tid];
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) {
    u32 before = atomicAdd(arrived + seq * KV_HEADS + kv, 1u);
    last = before == static_cast<u32>(active - 1);
    if (last) arrived[seq * KV_HEADS + kv] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  // Factors of each split first, a warp a head, then the weighted sums.
  float* factors = &sums[0][0][0];  // [RATIO][splits], at most 32 splits
  for (int h = warp; h < RATIO; h += THREADS / 32) {
    const float* part = own + (lane * RATIO + h) * (D + 2) + D;
    float highest = lane < active ? __ldcg(part) : -INFINITE;
    float weight = lane < active ? __ldcg(part + 1) : 0.f;
    float factor = __expf(highest - warp_max(highest));
    factors[h * 32 + lane] = factor / warp_sum(factor * weight);
  }
  __syncthreads();
  for (int i = tid; i < RATIO * D; i += THREADS) {
    int h = i / D, d = i % D;
    float sum = 0.f;
#pragma unroll 8
    for (int s = 0; s < active; s++)
      sum += factors[h * 32 + s] * __ldcg(own + (s * RATIO + h) * (D + 2) + d);
    out[(static_cast<size_t>(seq) * HEADS + kv * RATIO + h) * D + d] = sum;
  }
}
CPU_KERNEL(attention)
