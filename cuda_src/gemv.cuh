// The matrix-vector core of qkv, output, experts and lm_head: up to 8 tokens, any weight format.
//
//   y[token][row] = sum_k W[row][k] x[token][k]
//
// Tensor cores do the products: weights are the B operand (8 rows at a time), activations the A
// operand. Each float32 activation is split into a 16-bit head and a 16-bit rest, which are two rows
// of A: with up to 4 tokens heads are rows 0-3 and rests rows 4-7, with more rows 0-7 and 8-15. So
// precision is kept at no further cost.
//
// With BULK, one thread keeps a ring of STAGES chunks in shared memory full. A chunk is a run of
// records that follow one another in memory: a row tile, or for the experts' down projection one
// expert's part of it.
//
// Layout of W ("fragments"): records of 8 rows x 128 columns, [row tiles][K / 128][RECORD_BYTES]. In
// a record, lane = 4 g + t holds row g, and of every group of 32 columns the 8 from 8 t on.
//   W_BF16: 4 x [32 lanes][16 bytes], one group each: 8 bf16 in column order
//   W_FP4:  [32 lanes][16 bytes]: one word a group; then 64 bytes of fp16 scales [t][group][2 rows],
//           of rows 2t and 2t + 1. In a word the even column of pair p (columns 2p, 2p + 1) lies in
//           the low half: sign and magnitude bits at 15, 11-9 (p = 0), 12, 8-6 (1), 14, 5-3 (2),
//           13, 2-0 (3), so that p = 0 needs one operation to become fp16 and p = 1 two. E2M1 bits
//           under fp16's sign are the value times 2^-14; FORMAT_SCALE undoes that at the end.
// Numerics: fp16 or bf16 products, float32 sums: tensor core within a record's group, then lanes,
// then the warps of a block in order.
#pragma once
#include "common.cuh"

#define W_BF16 0
#define W_FP4 1
#ifndef W_FORMAT
#error "define W_FORMAT as W_BF16 (0) or W_FP4 (1)"
#endif

#if !defined(BATCH) || !defined(STAGES)
#error "define BATCH and STAGES"
#endif
#ifndef WARPS
#define WARPS 8
#endif
constexpr int SLICE = 128, TILE = 8, BLOCK_THREADS = 32 * WARPS;

#if W_FORMAT == W_FP4
constexpr int RECORD_BYTES = 576;
constexpr float FORMAT_SCALE = 16384.f;
struct Record {
  uint4 codes, scales;
};
template <class Load>
__device__ __forceinline__ Record load_record(const u8* p, int lane, Load load) {
  return {load(p + lane * 16), load(p + 512 + (lane & 3) * 16)};
}
#else
constexpr int RECORD_BYTES = 2048;
constexpr float FORMAT_SCALE = 1.f;
struct Record {
  uint4 codes[4];
};
template <class Load>
__device__ __forceinline__ Record load_record(const u8* p, int lane, Load load) {
  Record r;
#pragma unroll
  for (int g = 0; g < 4; g++) r.codes[g] = load(p + g * 512 + lane * 16);
  return r;
}
#endif

// The A operand of one slice of 128 columns for a lane = 4 g + t: [group][step], `rests` only where
// there are more than 4 tokens (else rests are rows 4 to 7 of the heads).
template <int MAX_TOKENS>
struct Slice {
  static constexpr bool WIDE = MAX_TOKENS > 4;
  uint2 heads[4][2], rests[WIDE ? 4 : 1][2];
  __device__ __forceinline__ uint4 operand(int g, int step) const {
    uint2 head = heads[g][step];
    if constexpr (WIDE) {
      uint2 rest = rests[g][step];
      return make_uint4(head.x, rest.x, head.y, rest.y);
    } else {
      return make_uint4(head.x, 0u, head.y, 0u);
    }
  }
};

// One record times one slice: rows 2t and 2t + 1 for the token of A's row lane / 4 (and that of row
// lane / 4 + 8 added).
template <class A>
__device__ __forceinline__ float2 multiply(const Record& r, const A& a) {
  float2 sum = make_float2(0.f, 0.f);
#if W_FORMAT == W_FP4
  constexpr u32 BOTH = 0x8E008E00u, SIGN = 0x80008000u;
  const u32 words[4] = {r.codes.x, r.codes.y, r.codes.z, r.codes.w};
  const u32 scales[4] = {r.scales.x, r.scales.y, r.scales.z, r.scales.w};
#pragma unroll
  for (int g = 0; g < 4; g++) {
    u32 v = words[g];
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    mma_f16(c, a.operand(g, 0), v & BOTH, (v << 3) & BOTH);
    u32 third = ((v << 1) & SIGN) | ((v << 6) & ~SIGN);
    u32 fourth = ((v << 2) & SIGN) | ((v << 9) & ~SIGN);
    mma_f16(c, a.operand(g, 1), third & BOTH, fourth & BOTH);
    float2 scale = floats(scales[g]);
    sum.x += scale.x * (A::WIDE ? c[0] + c[2] : c[0]);
    sum.y += scale.y * (A::WIDE ? c[1] + c[3] : c[1]);
  }
#else
  float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int g = 0; g < 4; g++) {
    mma_bf16(even, a.operand(g, 0), r.codes[g].x, r.codes[g].y);
    mma_bf16(odd, a.operand(g, 1), r.codes[g].z, r.codes[g].w);
  }
  sum = make_float2(even[0] + odd[0], even[1] + odd[1]);
  if (A::WIDE) sum.x += even[2] + odd[2], sum.y += even[3] + odd[3];
#endif
  return sum;
}

// Where 16 bytes (two steps of a group) of a staged slice lie: part 0 heads, 1 rests. The exclusive
// or keeps lanes that read together on different banks.
template <int MAX_TOKENS>
__device__ __forceinline__ int staged_at(int slice, int part, int token, int t, int group) {
  return (((slice * 2 + part) * MAX_TOKENS + token) * 4 + t) * 4 + (group ^ (t >> 1) ^ (part << 1));
}

// Stages one slice of one token in A-operand order. Lane l brings columns 4 l to 4 l + 3, which are
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
      staged + staged_at<MAX_TOKENS>(slice, 0, token, t, group));
  uint2* rests = reinterpret_cast<uint2*>(
      staged + staged_at<MAX_TOKENS>(slice, 1, token, t, group));
  heads[step] = make_uint2(bits(first), bits(second));
  rests[step] = make_uint2(bits(rest), bits(rest2));
  return unscale;
}

// Reads a staged slice; zeros where there is no token.
template <int MAX_TOKENS>
__device__ __forceinline__ void load_slice(Slice<MAX_TOKENS>& a, const uint4* staged, int slice,
                                           int tokens) {
  int lane = threadIdx.x & 31, t = lane & 3, row = lane >> 2;
  int token = Slice<MAX_TOKENS>::WIDE ? row : row & 3, part = Slice<MAX_TOKENS>::WIDE ? 0 : row >> 2;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    uint4 q = make_uint4(0, 0, 0, 0), r = q;
    if (token < tokens) {
      q = staged[staged_at<MAX_TOKENS>(slice, part, token, t, g)];
      if (Slice<MAX_TOKENS>::WIDE) r = staged[staged_at<MAX_TOKENS>(slice, 1, token, t, g)];
    }
    a.heads[g][0] = make_uint2(q.x, q.y), a.heads[g][1] = make_uint2(q.z, q.w);
    if constexpr (Slice<MAX_TOKENS>::WIDE)
      a.rests[g][0] = make_uint2(r.x, r.y), a.rests[g][1] = make_uint2(r.z, r.w);
  }
}

// Streams a block's row tiles through its warps, which share the slices of K between them.
//   SLICES: K / 128 of a chunk. CHUNKS: chunks a tile; x has 128 SLICES CHUNKS columns a token.
//   MAX_TOKENS: 1..8. Macros BATCH: tiles between two reductions; STAGES: chunks in the ring.
//   EARLY: fetch before grid_wait (the addresses depend on no kernel that may still run).
//   shared: dynamic shared memory; npmoe/models/decode.py computes its size.
//   tiles: this block's number. chunk(j, k): chunk k of its j-th tile.
//   weight: [columns], multiplies x, or null.
//   done(j, row, token, sum, sum_squares): called once for each output by some thread; rows of a
//   tile by neighbouring lanes.
template <int SLICES, int CHUNKS, int MAX_TOKENS, bool EARLY, class ChunkAt, class Done>
__device__ __forceinline__ void stream_tiles(unsigned char* shared, int tiles, const float* x,
                                             int tokens, const float* weight, ChunkAt chunk,
                                             Done done) {
  constexpr int PER_WARP = (SLICES + WARPS - 1) / WARPS, ALL = SLICES * CHUNKS;
  constexpr bool HOLD = CHUNKS == 1 && PER_WARP <= 2;  // activations fit the registers
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if BULK
  constexpr int CHUNK_BYTES = SLICES * RECORD_BYTES;
  unsigned char* ring = shared;
  u64* full = reinterpret_cast<u64*>(ring + STAGES * CHUNK_BYTES);
  u64* empty = full + STAGES;
  shared = reinterpret_cast<unsigned char*>(empty + STAGES);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + i, 1), barrier_init(empty + i, WARPS);
    barrier_init_done();
    for (int c = 0; c < min(STAGES, tiles * CHUNKS); c++)
      bulk_copy(ring + c * CHUNK_BYTES, chunk(c / CHUNKS, c % CHUNKS), CHUNK_BYTES, full + c);
  }
  __syncthreads();
#endif
  uint4* staged = reinterpret_cast<uint4*>(shared);
  float* partial = reinterpret_cast<float*>(staged + ALL * 2 * MAX_TOKENS * 16);
  float* squares = partial + BATCH * WARPS * MAX_TOKENS * TILE;  // partial: [BATCH][WARPS][MAX_TOKENS][8]
  float* unscale = squares + WARPS * MAX_TOKENS;
  constexpr int STAGED_A_WARP = (ALL + WARPS - 1) / WARPS;
  constexpr int FACTORS = CHUNKS == 1 ? PER_WARP : 1;
  float4 factor[FACTORS];
#pragma unroll
  for (int s = 0; s < FACTORS; s++)
    if (weight && warp + s * WARPS < SLICES)
      factor[s] = __ldg(reinterpret_cast<const float4*>(weight + (warp + s * WARPS) * SLICE) + lane);
  if (EARLY) {
    grid_wait();
    launch_next();
  }
  for (int g = 0; g < tokens; g++) {
    float square = 0.f;
    float4 q[STAGED_A_WARP];
#pragma unroll
    for (int s = 0; s < STAGED_A_WARP; s++)
      if (warp + s * WARPS < ALL)
        q[s] = __ldcg(reinterpret_cast<const float4*>(
                          x + (static_cast<size_t>(g) * ALL + warp + s * WARPS) * SLICE) + lane);
#pragma unroll
    for (int s = 0; s < STAGED_A_WARP; s++) {
      int slice = warp + s * WARPS;
      if (slice < ALL) {
        square += q[s].x * q[s].x + q[s].y * q[s].y + q[s].z * q[s].z + q[s].w * q[s].w;
        if (CHUNKS == 1 && weight) {
          float4 f = factor[CHUNKS == 1 ? s : 0];
          q[s].x *= f.x, q[s].y *= f.y, q[s].z *= f.z, q[s].w *= f.w;
        }
        float undo = stage_slice<MAX_TOKENS>(staged, slice, g, q[s]);
        if (lane == 0) unscale[slice * MAX_TOKENS + g] = undo;
      }
    }
    square = warp_sum(square);
    if (lane == 0) squares[warp * MAX_TOKENS + g] = square;
  }
  if (HOLD)
    __syncwarp();  // a warp reads what it staged itself
  else
    __syncthreads();
  int token = Slice<MAX_TOKENS>::WIDE ? lane >> 2 : lane >> 2 & 3;
  Slice<MAX_TOKENS> held[HOLD ? PER_WARP : 1];
  float undo[HOLD ? PER_WARP : 1];
  if constexpr (HOLD)
#pragma unroll
    for (int s = 0; s < PER_WARP; s++) {
      int slice = warp + s * WARPS;
      if (slice < SLICES) {
        load_slice<MAX_TOKENS>(held[s], staged, slice, tokens);
        undo[s] = token < tokens ? unscale[slice * MAX_TOKENS + token] : 0.f;
      }
    }
#if BULK
  int stage = 0, before = STAGES - 1;  // this chunk's place in the ring, and the last one's
  u32 phase = 0, before_phase = 1;
#endif
  for (int j = 0; j < tiles; j++) {
    float2 sum = make_float2(0.f, 0.f);
    for (int k = 0; k < CHUNKS; k++) {
#if BULK
      barrier_wait(full + stage, phase);
      const u8* records = ring + stage * CHUNK_BYTES;
      auto load = [](const u8* p) { return *reinterpret_cast<const uint4*>(p); };
#else
      const u8* records = chunk(j, k);
      auto load = [](const u8* p) { return load_stream(p); };
#endif
#pragma unroll
      for (int s = 0; s < PER_WARP; s++) {
        int slice = warp + s * WARPS;
        if (slice < SLICES) {
          Record record = load_record(records + slice * RECORD_BYTES, lane, load);
          if constexpr (HOLD) {
            float2 part = multiply(record, held[s]);
            sum.x += undo[s] * part.x, sum.y += undo[s] * part.y;
          } else {
            Slice<MAX_TOKENS> a;
            int at = k * SLICES + slice;
            load_slice<MAX_TOKENS>(a, staged, at, tokens);
            float back = token < tokens ? unscale[at * MAX_TOKENS + token] : 0.f;
            float2 part = multiply(record, a);
            sum.x += back * part.x, sum.y += back * part.y;
          }
        }
      }
#if BULK
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage);
      int next = j * CHUNKS + k - 1 + STAGES;  // goes where the last chunk was
      if (threadIdx.x == 0 && next >= STAGES && next < tiles * CHUNKS) {
        barrier_wait(empty + before, before_phase);
        bulk_copy(ring + before * CHUNK_BYTES, chunk(next / CHUNKS, next % CHUNKS), CHUNK_BYTES,
                  full + before);
      }
      before = stage, before_phase = phase;
      if (++stage == STAGES) stage = 0, phase ^= 1;
#endif
    }
    if (!Slice<MAX_TOKENS>::WIDE) {  // heads are in lanes 0 to 15, rests 16 lanes on
      sum.x += __shfl_xor_sync(ALL_LANES, sum.x, 16);
      sum.y += __shfl_xor_sync(ALL_LANES, sum.y, 16);
    }
    int batch = j % BATCH;
    if (token < MAX_TOKENS && (Slice<MAX_TOKENS>::WIDE || lane < 16))
      *reinterpret_cast<float2*>(
          &partial[((batch * WARPS + warp) * MAX_TOKENS + token) * TILE + (lane & 3) * 2]) = sum;
    if (batch == BATCH - 1 || j == tiles - 1) {
      __syncthreads();
      int first = j - batch;
      for (int i = threadIdx.x; i < (batch + 1) * MAX_TOKENS * TILE; i += WARPS * 32) {
        int b = i / (MAX_TOKENS * TILE), at = i % (MAX_TOKENS * TILE), g = at / TILE;
        if (g < tokens) {
          float total = 0.f, square = 0.f;
#pragma unroll
          for (int w = 0; w < WARPS; w++) {
            total += partial[(b * WARPS + w) * MAX_TOKENS * TILE + at];
            square += squares[w * MAX_TOKENS + g];
          }
          done(first + b, at % TILE, g, total, square);
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
