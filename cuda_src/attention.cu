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
//   partial   float32 [seqs][KV_HEADS][splits][RATIO D / CLUSTER + 2 RATIO, rounded up to 4]   scratch: a
//             block's share of its cluster's sums, and of every head its maximum and weight
//   arrived   u32 [seqs][KV_HEADS][CLUSTER], zero; left zero     scratch
//   max_pages int32; eps, scale float32
// store_kv does the first part alone, q/k norm and rotary of the new key and K and V into their page;
// attention with FUSED 0 then reads them there like all others. So several new tokens of one sequence
// can be rows of one step, each with its own length.
// Grid of store_kv: (2 KV_HEADS, seqs) blocks of D / 2 threads, keys first.
// Grid of attention: (splits, KV_HEADS, seqs) blocks of 32 WARPS threads, splits a multiple of
// CLUSTER. A split takes the next ceil(len / splits) tokens, rounded up to CHUNK, at
// least LEAST (or twice that, where one cluster would not do); its warps take turns at chunks of CHUNK
// tokens, each on its own: a ring of STAGES chunks in shared memory filled by asynchronous copies, a
// running maximum, sums in registers. Then the warps of a block are combined through shared memory,
// the CLUSTER splits of a cluster too, each block for its share of the outputs; where there are
// several clusters a head, the last block to arrive combines their shares.
// Dynamic shared memory: WARPS STAGES STAGE_BYTES; STAGE_BYTES as npmoe/models/stream.py counts it:
// CHUNK rows of K and of V, each 16 bytes longer than its codes, and their scales.
// Macros: HEADS, KV_HEADS, HEAD_DIM (D: 64 or 128), PAGE (tokens a page), K_FORMAT, V_FORMAT,
// KV_GROUP (32), CLUSTER (1, 2, 4 or 8), WARPS (2 to 16, a power of two), STAGES (2 or more), LEAST (a
// multiple of 16), FUSED (1, or 0: the new tokens are in their pages).
// Alignment: 16 bytes everywhere.
// Numerics: tensor-core products of exact codes with q split in a 16-bit head and rest; weights split
// likewise over bf16 values, times scales in fp16 over fp4 values; float32 sums, key scales applied in
// float32; chunks of a warp in order, then warps, then blocks of a cluster, then clusters.
// Limit: values in fp4 pages below 49,000 (their scale times 8 must fit fp16).
#include "attention_chunk.cuh"

#if KV_GROUP != 32 || PAGE < 1 || (CLUSTER & (CLUSTER - 1)) || CLUSTER > 8
#error "attention needs KV_GROUP 32, PAGE 1 or more, and CLUSTER 1, 2, 4 or 8"
#endif
#if (WARPS != 2 && WARPS != 4 && WARPS != 8 && WARPS != 16) || STAGES < 2 || LEAST < 16 || LEAST % 16 != 0
#error "attention needs WARPS 2, 4, 8 or 16, STAGES 2 or more and LEAST a multiple of 16"
#endif
#if !defined(FUSED) || (FUSED != 0 && FUSED != 1)
#error "define FUSED as 0 or 1"
#endif

constexpr int RATIO = HEADS / KV_HEADS, THREADS = 32 * WARPS;
constexpr int RESULT_STRIDE = D + 1;  // floats between the heads of a warp's result, in its ring
// Where a head's result is: lanes that write together, of heads 2 t, are on different banks.
__device__ __forceinline__ int result_row(int head) { return head % 2 * 4 + head / 2; }
static_assert(STAGES * STAGE_BYTES >= 8 * RESULT_STRIDE * 4, "a warp's result needs more stages");
constexpr float LOG2_E = 1.44269504f;

extern "C" __global__ void __launch_bounds__(32 * PIECES)
store_kv(const float* projected, const float* __restrict__ k_norm,
         const float2* __restrict__ cos_sin, u8* k_codes, __half* k_scales, u8* v_codes,
         __half* v_scales, const int* block_table, const int* seq_lens, int max_pages, float eps) {
  __shared__ __align__(16) NewToken unused;
  int seq = blockIdx.y, length = __ldcg(seq_lens + seq);
  Pages pages = {k_codes, v_codes, k_scales, v_scales,
                 block_table + static_cast<size_t>(seq) * max_pages,
                 static_cast<int>(blockIdx.x) % KV_HEADS};
  const HeadFactors factors(k_norm, cos_sin + static_cast<size_t>(length - 1) * (D / 2));
  launch_next();  // attention reads nothing before its own wait
  grid_wait();
  store_new(projected + static_cast<size_t>(seq) * (HEADS + 2 * KV_HEADS) * D, pages, length,
            blockIdx.x < KV_HEADS, threadIdx.x / 32, factors, k_norm, eps, unused);
}
CPU_KERNEL(store_kv)

#if CLUSTER > 1 && !defined(CUDA_CPU)
#define CLUSTER_BOUNDS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_BOUNDS
#endif

extern "C" __global__ void CLUSTER_BOUNDS __launch_bounds__(THREADS, 16 / WARPS)
attention(float* __restrict__ out, const float* projected, const float* __restrict__ q_norm,
          const float* __restrict__ k_norm, const float2* __restrict__ cos_sin, u8* k_codes,
          __half* k_scales, u8* v_codes, __half* v_scales, const int* block_table,
          const int* seq_lens, float* partial, u32* arrived, int max_pages, float eps,
          float scale) {
  SHARED_MEMORY(shared);
  __shared__ __align__(16) float q_shared[8][Q_STRIDE];
  __shared__ uint4 q_operands[D / 16][32];
  __shared__ __align__(16) NewToken new_token;
  __shared__ float warp_top[WARPS][8], warp_total[WARPS][8];
  __shared__ __align__(16) float sums[8][D];
  __shared__ float top[8], total[8];
  __shared__ bool last;
  STAMP(0);
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, t = lane & 3, g = lane >> 2;
  int kv = blockIdx.y, seq = blockIdx.z, splits = gridDim.x;

  // Lengths, tables and older tokens do not depend on the kernel before: fetch them early.
  int length = __ldcg(seq_lens + seq);
  int least = length > CLUSTER * LEAST ? 2 * LEAST : LEAST;  // a second cluster costs a microsecond
  int each = max(((length + splits - 1) / splits + CHUNK - 1) / CHUNK * CHUNK, least);
  int active = (length + each - 1) / each;
  int clusters = (active + CLUSTER - 1) / CLUSTER, cluster = blockIdx.x / CLUSTER;
  int begin = min(static_cast<int>(blockIdx.x) * each, length), end = min(begin + each, length);
  bool newest = FUSED && begin < end && end == length;
  int older = newest ? end - 1 : end;  // what is in the pages already
  Pages pages = {k_codes, v_codes, k_scales, v_scales,
                 block_table + static_cast<size_t>(seq) * max_pages, kv};
  if (!FUSED) {  // the pages are what the kernel before writes
    launch_next();
    grid_wait();
  }
  u8* ring = shared + warp * STAGES * STAGE_BYTES;
  const SharedAt ring_at = ring;
  const LaneShare lane_share(pages, ring_at);
  // This warp's chunks begin at `first`, `first` + STRIDE, ...
  constexpr int STRIDE = WARPS * CHUNK;
  int first = begin + warp * CHUNK;
  // Where the table names the page of a chunk; its address is counted up where that is possible.
  constexpr bool COUNTED = PAGE % CHUNK == 0 && STRIDE % PAGE == 0;
  const int* entry = pages.table + first / PAGE;
  auto page_of = [&](int chunk) {
    int token = PAGE % CHUNK ? chunk + lane % CHUNK : chunk;  // a chunk begins at a multiple of CHUNK
    if (!COUNTED) entry = pages.table + token / PAGE;
    int found = token < older ? __ldg(entry) : 0;
    entry += STRIDE / PAGE;
    return found;
  };
  int page = page_of(first);
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    int next = page_of(first + (s + 1) * STRIDE);
    if (first + s * STRIDE < older)
      fetch_chunk(lane_share, pages, s * STAGE_BYTES, first + s * STRIDE, older, page);
    async_commit();
    page = next;
  }
  const float2* turn = cos_sin + static_cast<size_t>(length - 1) * (D / 2);
  const HeadFactors q_factors(q_norm, turn), k_factors(k_norm, turn);
  STAMP(1);
  if (FUSED) {
    launch_next();  // output reads nothing but weights before its own wait
    grid_wait();
  }
  STAMP(3);
  if (cluster >= clusters) {
    STAMP(7);
    return;
  }

  const float* mine = projected + static_cast<size_t>(seq) * (HEADS + 2 * KV_HEADS) * D;
#pragma unroll 1
  for (int task = warp; newest && task < 2 * PIECES; task += WARPS)
    store_new(mine, pages, length, task < PIECES, task % PIECES, k_factors, k_norm, eps, new_token);
  // The other warps take the query heads, two at a time, where there are enough of them.
  constexpr int STORING = WARPS > 2 * PIECES ? 2 * PIECES : 0;
  int workers = newest ? WARPS - STORING : WARPS, worker = WARPS - 1 - warp;
#pragma unroll 1
  for (int h = worker; worker < workers && h < 8; h += 2 * workers) {
    float v[2][D / 32] = {};
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (h + k * workers < RATIO) load_head(v[k], mine + (kv * RATIO + h + k * workers) * D);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int head = h + k * workers;
      if (head >= 8) break;
      if (head < RATIO) turn_head(v[k], q_factors, q_norm, eps);
#pragma unroll
      for (int i = 0; i < D / 32; i++)
        q_shared[head][i / 2 * 64 + 2 * lane + i % 2] = v[k][i] * (scale * LOG2_E);
    }
  }
  __syncthreads();
  STAMP(4);
#pragma unroll 1
  for (int step = warp; step < D / 16; step += WARPS)
    q_operands[step][lane] = query_operand(step, q_shared);
  __syncthreads();

  float mixed[D / 16][4] = {};
  float highest = -INFINITE, weight = 0.f;  // of head g; the weight is this lane's share
#pragma unroll 1
  for (int stage = 0; first < end; first += STRIDE) {
    async_wait<STAGES - 2>();
    __syncwarp();
    {
      int ahead = first + (STAGES - 1) * STRIDE, next = page_of(ahead + STRIDE);
      int place = stage ? stage - 1 : STAGES - 1;
      if (ahead < older) fetch_chunk(lane_share, pages, place * STAGE_BYTES, ahead, older, page);
      async_commit();
      page = next;
    }
    u8* here = ring + stage * STAGE_BYTES;
    const SharedAt here_at = ring_at + stage * STAGE_BYTES;
    if (newest && first + CHUNK >= end) {
      take_new_token(here, end - 1 - first, new_token);
      __syncwarp();
    }
    float p[4];
    scores(p, here, here_at, q_operands);
    if (first + CHUNK > end) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (first + k / 2 * 8 + 2 * t + k % 2 >= end) p[k] = -INFINITE;
    }
    float best = fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3]));
    best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 1));
    best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 2));
    if (__any_sync(ALL_LANES, best > highest)) {
      best = fmaxf(best, highest);
      float shrink = power_of_two(highest - best);
      float even = __shfl_sync(ALL_LANES, shrink, t * 8), odd = __shfl_sync(ALL_LANES, shrink, t * 8 + 4);
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        mixed[i][0] *= even, mixed[i][1] *= odd, mixed[i][2] *= even, mixed[i][3] *= odd;
      }
      weight *= shrink;
      highest = best;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) p[k] = power_of_two(p[k] - (highest - LIFT)), weight += p[k];
    if (first + CHUNK > end) {  // values behind the end are whatever lay there
      for (int r = end - first; r < CHUNK; r++) {
        for (int i = lane; i < V_ROW / 4; i += 32)
          reinterpret_cast<u32*>(here + V_AT + r * V_STRIDE)[i] = 0;
        if (V_SCALED && lane < GROUPS)
          reinterpret_cast<__half*>(here + V_SCALES_AT + r * SCALE_ROW)[lane] = __float2half_rn(0.f);
      }
      __syncwarp();
    }
    mix(mixed, here, here_at, p);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  async_wait<0>();
  STAMP(5);

  // The warps of the block: each leaves its sums where its ring was.
  weight += __shfl_xor_sync(ALL_LANES, weight, 1);
  weight += __shfl_xor_sync(ALL_LANES, weight, 2);
  if (t == 0) warp_top[warp][g] = highest, warp_total[warp][g] = weight;
  __syncwarp();
  float* result = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int i = 0; i < D / 16; i++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      result[result_row(2 * t + k % 2) * RESULT_STRIDE + mixed_element(i, g + k / 2 * 8)] =
          mixed[i][k] * V_UNDO;
  __syncthreads();
  int busy = min((end - begin + CHUNK - 1) / CHUNK, WARPS);
#pragma unroll 1
  for (int h = warp; h < RATIO; h += WARPS) {
    float best = -INFINITE, all = 0.f, sum[D / 32] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      if (w < busy) best = fmaxf(best, warp_top[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      if (w < busy) {
        float factor = power_of_two(warp_top[w][h] - best);
        const float* from = reinterpret_cast<const float*>(shared + w * STAGES * STAGE_BYTES);
        all += factor * warp_total[w][h];
#pragma unroll
        for (int i = 0; i < D / 32; i++) sum[i] += factor * from[result_row(h) * RESULT_STRIDE + i * 32 + lane];
      }
#pragma unroll
    for (int i = 0; i < D / 32; i++) sums[h][i * 32 + lane] = sum[i];
    if (lane == 0) top[h] = best, total[h] = all;
  }
  cluster_arrive();
  cluster_wait();
  STAMP(6);
  constexpr int SHARE = (RATIO * D + CLUSTER - 1) / CLUSTER, EACH = (SHARE + THREADS - 1) / THREADS;
  int rank = cluster_rank();
  float sum[EACH], peak[EACH], share[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = rank * SHARE + min(tid + i * THREADS, SHARE - 1), h = at / D;
    float tops[CLUSTER], parts[CLUSTER], totals[CLUSTER];  // all on their way together
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      tops[r] = peer_float(top + h, r), totals[r] = peer_float(total + h, r);
      parts[r] = peer_float(&sums[0][0] + at, r);
    }
    peak[i] = -INFINITE, sum[i] = 0.f, share[i] = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) peak[i] = fmaxf(peak[i], tops[r]);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      float factor = power_of_two(tops[r] - peak[i]);
      sum[i] += factor * parts[r], share[i] += factor * totals[r];
    }
  }
  cluster_arrive();  // nobody leaves while others read its memory
  float* results = out + (static_cast<size_t>(seq) * HEADS + kv * RATIO) * D;
  constexpr int RECORD = SHARE + (2 * RATIO + 3) / 4 * 4;  // floats that a block leaves
  size_t first_record = (static_cast<size_t>(seq) * KV_HEADS + kv) * (splits / CLUSTER) * CLUSTER;
  float* own = partial + (first_record + rank) * RECORD;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = rank * SHARE + tid + i * THREADS;
    if (tid + i * THREADS < SHARE) {
      if (clusters == 1) {
        results[at] = sum[i] / share[i];
      } else {
        float* place = own + cluster * CLUSTER * RECORD;
        place[at - rank * SHARE] = sum[i];
        if (at % D == 0 || at == rank * SHARE)
          reinterpret_cast<float2*>(place + SHARE)[at / D] = make_float2(peak[i], share[i]);
      }
    }
  }
  cluster_wait();
  if (clusters == 1) {
    STAMP(7);
    return;
  }
  __syncthreads();
  if (tid == 0) {
    u32* counter = arrived + (seq * KV_HEADS + kv) * CLUSTER + rank;
    __threadfence();
    last = atomicAdd(counter, 1u) == static_cast<u32>(clusters - 1);
    if (last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) {
    STAMP(7);
    return;
  }
  // HELPERS neighbouring threads bring four outputs together, each from every HELPERS-th cluster.
  constexpr int QUADS = SHARE / 4, AT_ONCE = 8;  // clusters whose loads are in flight together
  constexpr int FIT = THREADS / QUADS, HELPERS = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
#pragma unroll 1
  for (int first = tid - lane; first < QUADS * HELPERS; first += THREADS) {  // whole warps: they shuffle
    int quad = min((first + lane) / HELPERS, QUADS - 1), helper = lane % HELPERS;
    int head = (rank * SHARE + quad * 4) / D;
    float whole = -INFINITE, total_weight = 0.f;
    float4 total_sum = make_float4(0.f, 0.f, 0.f, 0.f);
    auto add = [&](const float4& part, float best, float weight) {
      float higher = fmaxf(whole, best);
      if (higher == -INFINITE) return;  // neither has a token
      float shrink = power_of_two(whole - higher), factor = power_of_two(best - higher);
      total_sum.x = total_sum.x * shrink + part.x * factor;
      total_sum.y = total_sum.y * shrink + part.y * factor;
      total_sum.z = total_sum.z * shrink + part.z * factor;
      total_sum.w = total_sum.w * shrink + part.w * factor;
      total_weight = total_weight * shrink + weight * factor, whole = higher;
    };
#pragma unroll 1
    for (int c = helper; c < clusters; c += HELPERS * AT_ONCE) {
      float4 part[AT_ONCE];
      float2 best[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const float* place = own + min(c + k * HELPERS, clusters - 1) * CLUSTER * RECORD;
        part[k] = __ldcg(reinterpret_cast<const float4*>(place) + quad);
        best[k] = __ldcg(reinterpret_cast<const float2*>(place + SHARE) + head);
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
        if (c + k * HELPERS < clusters) add(part[k], best[k].x, best[k].y);
    }
#pragma unroll
    for (int o = 1; o < HELPERS; o *= 2) {
      float4 part;
      part.x = __shfl_xor_sync(ALL_LANES, total_sum.x, o);
      part.y = __shfl_xor_sync(ALL_LANES, total_sum.y, o);
      part.z = __shfl_xor_sync(ALL_LANES, total_sum.z, o);
      part.w = __shfl_xor_sync(ALL_LANES, total_sum.w, o);
      float best = __shfl_xor_sync(ALL_LANES, whole, o);
      add(part, best, __shfl_xor_sync(ALL_LANES, total_weight, o));
    }
    if (helper == 0 && first + lane < QUADS * HELPERS)
      reinterpret_cast<float4*>(results + rank * SHARE)[quad] =
          make_float4(total_sum.x / total_weight, total_sum.y / total_weight, total_sum.z / total_weight,
                      total_sum.w / total_weight);
  }
  STAMP(7);
}
CPU_CLUSTER_KERNEL(attention)
