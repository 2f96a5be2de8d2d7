// The matrix-vector core of qkv, output, experts and lm_head: up to 8 tokens, any weight format.
//
//   y[token][row] = sum_k W[row][k] x[token][k]
//
// Tensor cores do the products: weights are the B operand (8 rows at a time), activations the A
// operand. Each float32 activation is split into a 16-bit head and a 16-bit rest; heads of 8 tokens
// are A's rows 0..7 and rests its rows 8..15, so that precision is kept at no further cost.
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

#ifndef WARPS
#define WARPS 8
#endif
constexpr int SLICE = 128, TILE = 8;

#if W_FORMAT == W_FP4
constexpr int RECORD_BYTES = 576;
constexpr float FORMAT_SCALE = 16384.f;
struct Record {
  uint4 codes, scales;
};
__device__ __forceinline__ Record load_record(const u8* p, int lane) {
  return {load_stream(p + lane * 16), load_stream(p + 512 + (lane & 3) * 16)};
}
#else
constexpr int RECORD_BYTES = 2048;
constexpr float FORMAT_SCALE = 1.f;
struct Record {
  uint4 codes[4];
};
__device__ __forceinline__ Record load_record(const u8* p, int lane) {
  Record r;
#pragma unroll
  for (int g = 0; g < 4; g++) r.codes[g] = load_stream(p + g * 512 + lane * 16);
  return r;
}
#endif

// One record times one slice of activations (`a` as load_slice gives it): rows 2t and 2t + 1 for
// token lane / 4.
__device__ __forceinline__ float2 multiply(const Record& r, const uint4 (&a)[8]) {
  float2 sum = make_float2(0.f, 0.f);
#if W_FORMAT == W_FP4
  constexpr u32 BOTH = 0x8E008E00u, SIGN = 0x80008000u;
  const u32 words[4] = {r.codes.x, r.codes.y, r.codes.z, r.codes.w};
  const u32 scales[4] = {r.scales.x, r.scales.y, r.scales.z, r.scales.w};
#pragma unroll
  for (int g = 0; g < 4; g++) {
    u32 v = words[g];
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    mma_f16(c, a[2 * g], v & BOTH, (v << 3) & BOTH);
    u32 third = ((v << 1) & SIGN) | ((v << 6) & ~SIGN);
    u32 fourth = ((v << 2) & SIGN) | ((v << 9) & ~SIGN);
    mma_f16(c, a[2 * g + 1], third & BOTH, fourth & BOTH);
    float2 scale = floats(scales[g]);
    sum.x += scale.x * (c[0] + c[2]);
    sum.y += scale.y * (c[1] + c[3]);
  }
#else
  float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int g = 0; g < 4; g++) {
    mma_bf16(even, a[2 * g], r.codes[g].x, r.codes[g].y);
    mma_bf16(odd, a[2 * g + 1], r.codes[g].z, r.codes[g].w);
  }
  sum = make_float2(even[0] + even[2] + odd[0] + odd[2], even[1] + even[3] + odd[1] + odd[3]);
#endif
  return sum;
}

// Stages the activations of one slice, 128 columns of one token, in A-operand order. x: float32 [128];
// weight: float32 [128] or null (1). Lane l holds columns 4 l to 4 l + 3, which are one step of one
// group. Returns what undoes the power of two that was multiplied in; adds squares of x to `square`.
__device__ __forceinline__ float stage_slice(uint4* staged, const float* x, const float* weight,
                                             float& square) {
  int lane = threadIdx.x & 31;
  float4 q = __ldcg(reinterpret_cast<const float4*>(x) + lane);
  square += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
  if (weight) {
    float4 w = __ldg(reinterpret_cast<const float4*>(weight) + lane);
    q.x *= w.x, q.y *= w.y, q.z *= w.z, q.w *= w.w;
  }
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
  int t = lane / 2 % 4, step = lane / 8 * 2 + lane % 2;
  staged[t * 8 + (step ^ t)] = make_uint4(bits(first), bits(rest), bits(second), bits(rest2));
  return unscale;
}

// Reads a staged slice: the A operands of its 4 groups x 2 steps, zero where there is no token.
__device__ __forceinline__ void load_slice(uint4 (&a)[8], const uint4* staged, bool mine) {
  int t = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] = mine ? staged[t * 8 + (i ^ t)] : make_uint4(0, 0, 0, 0);
}

// Streams a block's row tiles through its warps, which share the slices of K between them.
//   SLICES: K / 128. MAX_TOKENS: 1..8. TILES: row tiles a pass. AHEAD: records in flight a lane.
//   EARLY: request the first records before grid_wait (weights do not depend on other kernels).
//   tiles: this block's number. record(j, slice): the record of its j-th tile.
//   x: [tokens][128 SLICES] float32; weight: [128 SLICES] or null.
//   shared: dynamic shared memory: 516 SLICES MAX_TOKENS + 4 WARPS MAX_TOKENS (1 + 8 TILES) bytes.
//   done(j, row, token, sum, sum_squares): called once for each output by some thread; rows of a
//   tile by neighbouring lanes.
template <int SLICES, int MAX_TOKENS, int TILES_A_PASS, int AHEAD, bool EARLY, class RecordAt,
          class Done>
__device__ __forceinline__ void stream_tiles(unsigned char* shared, int tiles, const float* x,
                                             int tokens, const float* weight, RecordAt record,
                                             Done done) {
  constexpr int PER_WARP = (SLICES + WARPS - 1) / WARPS, UNITS = PER_WARP * TILES_A_PASS;
  constexpr bool CARRY = UNITS % AHEAD == 0;  // the ring goes on from one pass to the next
  uint4* staged = reinterpret_cast<uint4*>(shared);
  float* unscale = reinterpret_cast<float*>(staged + SLICES * MAX_TOKENS * 32);
  float* squares = unscale + SLICES * MAX_TOKENS;
  float* partial = squares + WARPS * MAX_TOKENS;  // [TILES][WARPS][MAX_TOKENS][8]
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = lane >> 2;
  Record ring[AHEAD];
  auto request = [&](int slot, int first, int unit) {
    int j = first + unit % TILES_A_PASS, slice = warp + unit / TILES_A_PASS * WARPS;
    if (j < tiles && slice < SLICES) ring[slot] = load_record(record(j, slice), lane);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < UNITS) request(i, 0, i);
  if (EARLY) {
    grid_wait();
    launch_next();
  }
  for (int g = 0; g < tokens; g++) {
    float square = 0.f;
#pragma unroll
    for (int s = 0; s < PER_WARP; s++) {
      int slice = warp + s * WARPS, at = slice * MAX_TOKENS + g;
      if (slice < SLICES) {
        const float* row = x + (static_cast<size_t>(g) * SLICES + slice) * SLICE;
        float undo = stage_slice(staged + at * 32, row, weight ? weight + slice * SLICE : nullptr,
                                 square);
        if (lane == 0) unscale[at] = undo;
      }
    }
    square = warp_sum(square);
    if (lane == 0) squares[warp * MAX_TOKENS + g] = square;
  }
  __syncwarp();
  for (int first = 0; first < tiles; first += TILES_A_PASS) {
    float2 sums[TILES_A_PASS];
#pragma unroll
    for (int j = 0; j < TILES_A_PASS; j++) sums[j] = make_float2(0.f, 0.f);
    if (!CARRY && first)
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (i < UNITS) request(i, first, i);
#pragma unroll
    for (int s = 0; s < PER_WARP; s++) {
      int slice = warp + s * WARPS, at = slice * MAX_TOKENS + token;
      if (slice < SLICES) {
        uint4 a[8];
        load_slice(a, staged + at * 32, token < tokens);
        float undo = token < tokens ? unscale[at] : 0.f;
#pragma unroll
        for (int j = 0; j < TILES_A_PASS; j++) {
          constexpr int ring_size = AHEAD;
          int unit = s * TILES_A_PASS + j;
          if (first + j < tiles) {
            float2 part = multiply(ring[unit % ring_size], a);
            sums[j].x += undo * part.x;
            sums[j].y += undo * part.y;
          }
          if (unit + AHEAD < UNITS)
            request(unit % ring_size, first, unit + AHEAD);
          else if (CARRY)
            request(unit % ring_size, first + TILES_A_PASS, unit + AHEAD - UNITS);
        }
      }
    }
    if (first) __syncthreads();  // the sums of the last pass have been read
#pragma unroll
    for (int j = 0; j < TILES_A_PASS; j++)
      if (token < MAX_TOKENS && first + j < tiles)
        *reinterpret_cast<float2*>(
            &partial[((j * WARPS + warp) * MAX_TOKENS + token) * TILE + (lane & 3) * 2]) = sums[j];
    __syncthreads();
    for (int i = threadIdx.x; i < TILES_A_PASS * MAX_TOKENS * TILE; i += WARPS * 32) {
      int j = i / (MAX_TOKENS * TILE), at = i % (MAX_TOKENS * TILE), g = at / TILE;
      if (first + j < tiles && g < tokens) {
        float sum = 0.f, square = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          sum += partial[(j * WARPS + w) * MAX_TOKENS * TILE + at];
          square += squares[w * MAX_TOKENS + g];
        }
        done(first + j, at % TILE, g, sum, square);
      }
    }
  }
}

// How many of `all` row tiles a block has that takes blockIdx.x, blockIdx.x + gridDim.x, ...
__device__ __forceinline__ int own_tiles(int all) {
  int first = blockIdx.x, stride = gridDim.x;
  return all > first ? (all - first - 1) / stride + 1 : 0;
}
