// The matrix-vector core of qkv, output, experts and lm_head: up to 8 tokens, any weight format.
//
//   y[token][row] = sum_k W[row][k] x[token][k]
//
// Layout of W and the products: weight_formats.cuh.
// With BULK, one thread keeps a ring of STAGES chunks in shared memory full. A chunk is a run of
// records that follow one another in memory: one of the PARTS of a row tile (of one expert, in the
// experts' down projection).
// Numerics: fp16 or bf16 products; float32 sums over a group on the tensor core, then groups in
// order, then the warps of a block in order.
#pragma once
#include "weight_formats.cuh"

#if !defined(BATCH) || !defined(STAGES)
#error "define BATCH and STAGES"
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef RESIDENT
#define RESIDENT 0  // 1: the ring holds every chunk of a block, nothing is fetched a second time
#endif
#ifndef WARPS
#define WARPS 16
#endif
#if BATCH < 1 || STAGES < 1 || PARTS < 1 || WARPS < 1 || WARPS > 32
#error "BATCH, STAGES, PARTS and WARPS are 1 or more, WARPS at most 32"
#endif
constexpr int BLOCK_THREADS = 32 * WARPS;

// Where 16 bytes (two steps of a group) of a staged slice lie; column: 2 token + (0 head, 1 rest).
// The exclusive or keeps lanes that read together on different banks.
template <int MAX_TOKENS>
__device__ __forceinline__ int staged_at(int slice, int column, int t, int group) {
  return ((slice * 2 * MAX_TOKENS + column) * 4 + t) * 4 + (group ^ (t >> 1) ^ (column % 2 * 2));
}

// Stages one slice of one token in B-operand order. Lane l brings columns 4 l to 4 l + 3, which are
// one step of one group. Returns what undoes the power of two that was multiplied in.
template <int MAX_TOKENS>
__device__ __forceinline__ float stage_slice(uint4* staged, int slice, int token, float4 q) {
  int lane = threadIdx.x & 31;
  float unscale = 1.f;
#if W_FORMAT == W_BF16
  __nv_bfloat162 first = __floats2bfloat162_rn(q.x, q.y), second = __floats2bfloat162_rn(q.z, q.w);
  float2 back = __bfloat1622float2(first), back2 = __bfloat1622float2(second);
  __nv_bfloat162 rest = __floats2bfloat162_rn(q.x - back.x, q.y - back.y);
  __nv_bfloat162 rest2 = __floats2bfloat162_rn(q.z - back2.x, q.w - back2.y);
#else
  // The largest activation moves into [2^13, 2^14): fp16 holds it, and the rests of all others.
  float largest = warp_max(fmaxf(fmaxf(fabsf(q.x), fabsf(q.y)), fmaxf(fabsf(q.z), fabsf(q.w))));
  int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 27), 239);
  float scale = __uint_as_float(static_cast<u32>(267 - exponent) << 23);
  unscale = __uint_as_float(static_cast<u32>(exponent - 13) << 23) * FORMAT_SCALE;
  q.x *= scale, q.y *= scale, q.z *= scale, q.w *= scale;
  __half2 first = __floats2half2_rn(q.x, q.y), second = __floats2half2_rn(q.z, q.w);
  float2 back = __half22float2(first), back2 = __half22float2(second);
  __half2 rest = __floats2half2_rn(q.x - back.x, q.y - back.y);
  __half2 rest2 = __floats2half2_rn(q.z - back2.x, q.w - back2.y);
#endif
  int t = lane / 2 % 4, group = lane / 8, step = lane % 2;
  uint2* heads = reinterpret_cast<uint2*>(
      staged + staged_at<MAX_TOKENS>(slice, 2 * token, t, group));
  uint2* rests = reinterpret_cast<uint2*>(
      staged + staged_at<MAX_TOKENS>(slice, 2 * token + 1, t, group));
  heads[step] = make_uint2(bits(first), bits(second));
  rests[step] = make_uint2(bits(rest), bits(rest2));
  return unscale;
}

// Streams a block's row tiles through its warps, which share the slices of K between them.
//   SLICES: K / 128 of a chunk. CHUNKS: chunks a tile; x has 128 SLICES CHUNKS columns a token.
//   MAX_TOKENS: 1..8. Macros BATCH: tiles between two reductions; STAGES: chunks in the ring. Every
//   warp has a slice in every chunk (SLICES >= WARPS), else it could mistake one round of a barrier
//   for the last but one; or the ring is RESIDENT.
//   EARLY: fetch before grid_wait (the addresses depend on no kernel that may still run).
//   shared: dynamic shared memory; npmoe/models/stream.py computes its size.
//   tiles: this block's number. chunk(j, k): chunk k of its j-th tile.
//   weight: [columns], multiplies x, or null.
//   done(j, row, token, sum, sum_squares): called once for each output by some thread; rows of a
//   tile by neighbouring lanes.
//   ready(): called by the first warp before the first chunk() (to choose experts, say).
template <int SLICES, int CHUNKS, int MAX_TOKENS, bool EARLY, class Ready, class ChunkAt, class Done>
__device__ __forceinline__ void stream_tiles(unsigned char* shared, int tiles, const float* x,
                                             int tokens, const float* weight, Ready ready,
                                             ChunkAt chunk, Done done) {
  constexpr int ALL = SLICES * CHUNKS, SETS = (MAX_TOKENS + 3) / 4;
  constexpr int EACH = (ALL + WARPS - 1) / WARPS, AT_ONCE = EACH < 6 ? EACH : 4;
  constexpr bool HOLD = EACH == 1;  // a warp has one slice: its activations stay in registers
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if BULK
  constexpr int CHUNK_BYTES = SLICES * RECORD_BYTES;
  unsigned char* ring = shared;
  u64* full = reinterpret_cast<u64*>(ring + STAGES * CHUNK_BYTES);
  u64* empty = full + STAGES;
  shared = reinterpret_cast<unsigned char*>(empty + STAGES);
  int fetched = min(STAGES, tiles * CHUNKS);
  auto fetch = [&](int until) {  // chunks before `until`; each goes where one was STAGES before
#pragma unroll 1
    for (; fetched < min(until, tiles * CHUNKS); fetched++) {
      int place = fetched % STAGES;
      barrier_wait(empty + place, (fetched / STAGES - 1) & 1);
      bulk_copy(ring + place * CHUNK_BYTES, chunk(fetched / CHUNKS, fetched % CHUNKS), CHUNK_BYTES,
                full + place);
    }
  };
#endif
  uint4* staged = reinterpret_cast<uint4*>(shared);
  float* unscale = reinterpret_cast<float*>(staged + ALL * 2 * MAX_TOKENS * 16);
  float* squares = unscale + ALL * MAX_TOKENS;
  float* partial = squares + WARPS * MAX_TOKENS;  // [BATCH][WARPS][MAX_TOKENS][TILE]

  float4 q[AT_ONCE], factor[AT_ONCE];
  auto load = [&](int token, int n) {  // activations of the n-th and following of a warp's slices
#pragma unroll
    for (int s = 0; s < AT_ONCE; s++) {
      int slice = warp + (n + s) * WARPS;
      if (slice < ALL) {
        size_t at = static_cast<size_t>(token) * ALL + slice;
        q[s] = __ldcg(reinterpret_cast<const float4*>(x + at * SLICE) + lane);
        if (weight) factor[s] = __ldg(reinterpret_cast<const float4*>(weight + slice * SLICE) + lane);
      }
    }
  };
  if (!EARLY) load(0, 0);  // ahead of the weights, behind which they would queue
  if (warp == 0) {
#if BULK
    for (int i = lane; i < STAGES; i += 32) barrier_init(full + i, 1), barrier_init(empty + i, SLICES);
    barrier_init_done();
#endif
    ready();
    __syncwarp();
#if BULK
    for (int c = lane; c < fetched; c += 32)
      bulk_copy(ring + c * CHUNK_BYTES, chunk(c / CHUNKS, c % CHUNKS), CHUNK_BYTES, full + c);
#endif
  }
  if (EARLY) {
#pragma unroll
    for (int s = 0; s < EACH; s++)
      if (weight && warp + s * WARPS < ALL) prefetch(weight + (warp + s * WARPS) * SLICE + lane * 4);
    grid_wait();
    launch_next();
    load(0, 0);
  }
#pragma unroll 1
  for (int token = 0; token < tokens; token++) {
    float square = 0.f;
#pragma unroll 1
    for (int n = 0; n < EACH; n += AT_ONCE) {
      if (token || n) load(token, n);
#pragma unroll
      for (int s = 0; s < AT_ONCE; s++) {
        int slice = warp + (n + s) * WARPS;
        if (slice < ALL) {
          square += q[s].x * q[s].x + q[s].y * q[s].y + q[s].z * q[s].z + q[s].w * q[s].w;
          if (weight) {
            float4 f = factor[s];
            q[s].x *= f.x, q[s].y *= f.y, q[s].z *= f.z, q[s].w *= f.w;
          }
          float undo = stage_slice<MAX_TOKENS>(staged, slice, token, q[s]);
          if (lane == 0) unscale[slice * MAX_TOKENS + token] = undo;
        }
      }
    }
    square = warp_sum(square);
    if (lane == 0) squares[warp * MAX_TOKENS + token] = square;
  }
  __syncthreads();  // the barriers of the ring are there; a warp reads only what it staged itself
  int column = lane >> 2, t = lane & 3;  // of B; results are those of token t
  uint4 b[SETS][4] = {};
  float undo[SETS];
  auto take = [&](int slice) {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      if (set * 8 + column < 2 * tokens)
#pragma unroll
        for (int g = 0; g < 4; g++)
          b[set][g] = staged[staged_at<MAX_TOKENS>(slice, set * 8 + column, t, g)];
      undo[set] = set * 4 + t < tokens ? unscale[slice * MAX_TOKENS + set * 4 + t] : 0.f;
    }
  };
  if (HOLD && warp < ALL) take(warp);
#pragma unroll 1
  for (int j = 0; j < tiles; j++) {
    Sums sums[SETS] = {};
#pragma unroll 1
    for (int u = warp; u < ALL; u += WARPS) {
      if (!HOLD) take(u);
#if BULK
      int c = j * CHUNKS + u / SLICES, stage = RESIDENT ? c : c % STAGES;
      if (!RESIDENT && threadIdx.x == 0) fetch(c + 1);
      barrier_wait(full + stage, RESIDENT ? 0 : c / STAGES & 1);
      multiply<SETS>(
          sums, ring + stage * CHUNK_BYTES + u % SLICES * RECORD_BYTES,
          [](const u8* p) { return *reinterpret_cast<const uint4*>(p); }, b, undo);
      if (!RESIDENT) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage);
        if (threadIdx.x == 0) fetch(c + STAGES);  // where the chunks before this one were
      }
#else
      multiply<SETS>(
          sums, chunk(j, u / SLICES) + u % SLICES * RECORD_BYTES,
          [](const u8* p) { return load_stream(p); }, b, undo);
#endif
    }
#if BULK
    if (!RESIDENT && threadIdx.x == 0) fetch((j + 1) * CHUNKS);  // what other warps still need of this tile
#endif
    int batch = j % BATCH;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      int token = set * 4 + t;
      if (token < MAX_TOKENS) {
        float* at = partial + ((batch * WARPS + warp) * MAX_TOKENS + token) * TILE + column;
        at[0] = sums[set].low.x + sums[set].low.y;
        at[8] = sums[set].high.x + sums[set].high.y;
      }
    }
    if (batch == BATCH - 1 || j == tiles - 1) {
      __syncthreads();
      int first = j - batch;
#pragma unroll 1
      for (int i = threadIdx.x; i < (batch + 1) * MAX_TOKENS * TILE; i += WARPS * 32) {
        int which = i / (MAX_TOKENS * TILE), at = i % (MAX_TOKENS * TILE), token = at / TILE;
        if (token < tokens) {
          float total = 0.f, square = 0.f;
#pragma unroll
          for (int w = 0; w < WARPS; w++) {
            total += partial[(which * WARPS + w) * MAX_TOKENS * TILE + at];
            square += squares[w * MAX_TOKENS + token];
          }
          done(first + which, at % TILE, token, total, square);
        }
      }
      if (j < tiles - 1) __syncthreads();  // `partial` is written again
    }
  }
}

// How many of `all` row tiles a block has that takes blockIdx.x, blockIdx.x + gridDim.x, ...
__device__ __forceinline__ int own_tiles(int all) {
  int first = blockIdx.x, stride = gridDim.x;
  return all > first ? (all - first - 1) / stride + 1 : 0;
}

// With one token: the value of `column` (float32 [16 x row_tiles]) at the row for which this thread
// will be asked to finish a tile of the first batch.
__device__ __forceinline__ float row_ahead(const float* column, int row_tiles) {
  static_assert(BATCH * TILE <= BLOCK_THREADS, "a thread finishes one row of a batch");
  int tile = blockIdx.x + threadIdx.x / TILE * gridDim.x;
  bool mine = threadIdx.x < BATCH * TILE && tile < row_tiles;
  return mine ? __ldcg(column + tile * TILE + threadIdx.x % TILE) : 0.f;
}
