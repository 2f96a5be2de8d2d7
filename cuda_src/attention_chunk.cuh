// A chunk of 16 tokens of one KV head: brought into a stage of a warp's ring, scored, and mixed, by one
// warp.
//
// A stage: CHUNK rows of K and of V, each 16 bytes longer than its codes, then the scales of K, of V.
// Macros, numerics: attention.cu.
#pragma once
#include "new_token.cuh"

constexpr int CHUNK = 16;
// Rows in shared memory: 16 bytes longer, so that 8 rows lie on different banks.
constexpr int K_STRIDE = K_ROW + 16, V_STRIDE = V_ROW + 16, SCALE_ROW = 2 * GROUPS;
constexpr int V_AT = CHUNK * K_STRIDE, K_SCALES_AT = V_AT + CHUNK * V_STRIDE;
constexpr int V_SCALES_AT = K_SCALES_AT + K_SCALED * CHUNK * SCALE_ROW;
constexpr int STAGE_BYTES = V_SCALES_AT + V_SCALED * CHUNK * SCALE_ROW;
constexpr int Q_STRIDE = D + (K_SCALED ? 1 : 8);  // floats between heads: on different banks
constexpr float K_UNDO = K_SCALED ? 16384.f : 1.f, V_UNDO = V_SCALED ? 16384.f : 1.f;  // 2^14 of the codes
constexpr float LIFT = V_SCALED ? 3.f : 0.f;  // weights are up to 2^LIFT; times a scale they are fp16

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

// What a lane copies of a chunk, and where in a stage it puts it. A chunk is on one page if PAGE is a
// multiple of CHUNK; then a lane has pieces of 16 bytes, and one row's scales.
struct LaneShare {
  const u8 *k, *v;  // its first piece on page 0
  const __half* scales;
  SharedAt k_to, v_to, scales_to;
  __device__ __forceinline__ LaneShare(const Pages& pages, SharedAt ring)
      : k(pages.k_codes), v(pages.v_codes), k_to(ring), v_to(ring + V_AT), scales_to(ring) {
    int lane = threadIdx.x & 31, row = lane % CHUNK;
    bool values = lane >= CHUNK;
    scales = values ? pages.v_scales : pages.k_scales;
    scales_to = scales_to + ((values ? V_SCALES_AT : K_SCALES_AT) + row * SCALE_ROW);
    if (PAGE % CHUNK == 0) {
      size_t first = pages.row(0, 0);
      k += first * K_ROW + lane * 16, v += first * V_ROW + lane * 16, scales += (first + row) * GROUPS;
      k_to = k_to + (lane / (K_ROW / 16) * K_STRIDE + lane % (K_ROW / 16) * 16);
      v_to = v_to + (lane / (V_ROW / 16) * V_STRIDE + lane % (V_ROW / 16) * 16);
    }
  }
};

// Starts copying the tokens [first, first + CHUNK) below `end` into the stage at `place` bytes of the ring.
// page: of token first + lane % CHUNK.
__device__ __forceinline__ void fetch_chunk(const LaneShare& mine, const Pages& pages, int place, int first,
                                            int end, int page) {
  int lane = threadIdx.x & 31, limit = end - first, r = lane % CHUNK;
  bool scaled = lane >= CHUNK ? V_SCALED : K_SCALED;
  if constexpr (PAGE % CHUNK == 0) {
    size_t row = static_cast<size_t>(page) * (KV_HEADS * PAGE) + (PAGE == CHUNK ? 0 : first % PAGE);
    auto rows = [&](SharedAt to, const u8* from, int bytes, int stride) {
      int pieces = bytes / 16, step = 32 / pieces;
#pragma unroll
      for (int i = 0; i < CHUNK / step; i++)
        if (lane / pieces + i * step < limit)
          async_copy<16>(to + (place + i * step * stride), from + row * bytes + i * 512);
    };
    rows(mine.k_to, mine.k, K_ROW, K_STRIDE);
    rows(mine.v_to, mine.v, V_ROW, V_STRIDE);
    if (r < limit && scaled) async_copy<SCALE_ROW>(mine.scales_to + place, mine.scales + row * GROUPS);
  } else {
    auto rows = [&](SharedAt to, const u8* from, int bytes, int stride) {
      int pieces = bytes / 16;
#pragma unroll
      for (int i = 0; i < CHUNK * pieces / 32; i++) {
        int at = i * 32 + lane, token = at / pieces, c = at % pieces;
        size_t row = pages.row(__shfl_sync(ALL_LANES, page, token), first + token);
        if (token < limit)
          async_copy<16>(to + (place + token * stride + c * 16), from + row * bytes + c * 16);
      }
    };
    rows(mine.k_to, mine.k, K_ROW, K_STRIDE);
    rows(mine.v_to, mine.v, V_ROW, V_STRIDE);
    if (r < limit && scaled)
      async_copy<SCALE_ROW>(mine.scales_to + place, mine.scales + pages.row(page, first + r) * GROUPS);
  }
}

// Puts the new token into row r of a stage.
__device__ __forceinline__ void take_new_token(u8* stage, int r, const NewToken& token) {
  int lane = threadIdx.x & 31;
  for (int i = lane; i < K_ROW / 4; i += 32)
    reinterpret_cast<u32*>(stage + r * K_STRIDE)[i] = reinterpret_cast<const u32*>(token.k)[i];
  for (int i = lane; i < V_ROW / 4; i += 32)
    reinterpret_cast<u32*>(stage + V_AT + r * V_STRIDE)[i] =
        reinterpret_cast<const u32*>(token.v)[i];
  if (lane < GROUPS) {
    if (K_SCALED)
      reinterpret_cast<__half*>(stage + K_SCALES_AT + r * SCALE_ROW)[lane] = token.k_scales[lane];
    if (V_SCALED)
      reinterpret_cast<__half*>(stage + V_SCALES_AT + r * SCALE_ROW)[lane] = token.v_scales[lane];
  }
}

// The A operand of scores, of one of D / 16 steps: rows are the heads' q, then what a 16-bit number
// leaves of it. heads: q in shared memory, elements in the order in which the keys' operand has them.
__device__ __forceinline__ uint4 query_operand(int step, const float (*heads)[Q_STRIDE]) {
  int lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
  const float* x;
  float a, b, c, d;
  if constexpr (K_SCALED) {  // a word of codes gives out elements 0 and 4, 1 and 5, 2 and 6, 3 and 7
    x = &heads[g][step / 2 * 32 + t * 8 + step % 2 * 2];
    a = x[0], b = x[4], c = x[1], d = x[5];
  } else {
    x = &heads[g][step * 16 + t * 2];
    a = x[0], b = x[1], c = x[8], d = x[9];
  }
  uint2 first = head_and_rest<K_FORMAT>(a, b), second = head_and_rest<K_FORMAT>(c, d);
  return make_uint4(first.x, first.y, second.x, second.y);
}

// A row's scales, two fp16 a word.
struct Scales {
  u32 pair[GROUPS / 2];
};
__device__ __forceinline__ Scales load_scales(const u8* row) {
  Scales scales;
  if constexpr (GROUPS == 4) {
    uint2 v = *reinterpret_cast<const uint2*>(row);
    scales.pair[0] = v.x, scales.pair[1] = v.y;
  } else {
    scales.pair[0] = *reinterpret_cast<const u32*>(row);
  }
  return scales;
}

// p: scores of head g with the stage's tokens 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t. q: operands of all lanes.
__device__ __forceinline__ void scores(float (&p)[4], const u8* stage, SharedAt at,
                                       const uint4 (*q)[32]) {
  int lane = threadIdx.x & 31, t = lane & 3;
  SharedAt row = at + (lane % 8 * K_STRIDE + (K_SCALED ? lane / 8 % GROUPS : lane / 8) * 16);
  if constexpr (K_SCALED) {
    u32 words[2][4];
    Scales scales[4];
#pragma unroll
    for (int block = 0; block < 2; block++)
      load_matrices(words[block], row + block * 8 * K_STRIDE);  // word t of each group of token g
#pragma unroll
    for (int k = 0; k < 4; k++) {
      p[k] = 0.f;
      scales[k] = load_scales(stage + K_SCALES_AT + (k / 2 * 8 + 2 * t + k % 2) * SCALE_ROW);
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      uint4 first = q[2 * i][lane], second = q[2 * i + 1][lane];
#pragma unroll
      for (int block = 0; block < 2; block++) {
        float d[4] = {};
        u32 pairs[4];
        fp4_pairs(words[block][i], pairs);
        mma<K_FORMAT>(d, first, pairs[0], pairs[1]);
        mma<K_FORMAT>(d, second, pairs[2], pairs[3]);
        float2 low = floats(scales[2 * block].pair[i / 2]), high = floats(scales[2 * block + 1].pair[i / 2]);
        p[2 * block] += (i % 2 ? low.y : low.x) * (d[0] + d[2]);
        p[2 * block + 1] += (i % 2 ? high.y : high.x) * (d[1] + d[3]);
      }
    }
  } else {
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      uint4 first = q[2 * i][lane], second = q[2 * i + 1][lane];
#pragma unroll
      for (int block = 0; block < 2; block++) {
        u32 words[4];
        load_matrices(words, row + (block * 8 * K_STRIDE + i * 64));
        mma<K_FORMAT>(d[block], first, words[0], words[1]);
        mma<K_FORMAT>(d[block], second, words[2], words[3]);
      }
    }
#pragma unroll
    for (int block = 0; block < 2; block++)
      p[2 * block] = d[block][0] + d[block][2], p[2 * block + 1] = d[block][1] + d[block][3];
  }
#pragma unroll
  for (int k = 0; k < 4; k++) p[k] *= K_UNDO;
}

// Which element of a head row r of the i-th product of `mix` is.
__device__ __forceinline__ int mixed_element(int i, int r) {
  return V_SCALED ? i / 2 * 32 + r % 8 * 4 + i % 2 * 2 + r / 8 : i * 16 + r;
}

// mixed[i]: elements of row g (heads 2 t, 2 t + 1) and of row g + 8. Adds the stage's values times p:
// of head g for tokens 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t.
__device__ __forceinline__ void mix(float (&mixed)[D / 16][4], const u8* stage, SharedAt at,
                                    const float (&p)[4]) {
  int lane = threadIdx.x & 31, t = lane & 3;
  SharedAt row = at + (V_AT + lane % 16 * V_STRIDE + lane / 16 * 16);
  uint2 low, high;  // the B operand: tokens 2 t and on, tokens 8 + 2 t and on
  __half2 weights[2];
  Scales scales[4];
  if constexpr (V_SCALED) {
    weights[0] = __floats2half2_rn(p[0], p[1]), weights[1] = __floats2half2_rn(p[2], p[3]);
#pragma unroll
    for (int k = 0; k < 4; k++)
      scales[k] = load_scales(stage + V_SCALES_AT + (k / 2 * 8 + 2 * t + k % 2) * SCALE_ROW);
  } else {
    low = head_and_rest<V_FORMAT>(p[0], p[1]), high = head_and_rest<V_FORMAT>(p[2], p[3]);
  }
#pragma unroll
  for (int i = 0; i < (V_SCALED ? GROUPS : D / 16); i += V_SCALED ? 2 : 1) {
    u32 words[4];
    if constexpr (V_SCALED) {
      load_matrices_transposed(words, row + i * 16);  // group i: tokens 0-7, 8-15; group i + 1
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 scaled[2];  // weights times the group's scales
#pragma unroll
        for (int k = 0; k < 2; k++) {
          u32 both = __byte_perm(scales[2 * k].pair[i / 2], scales[2 * k + 1].pair[i / 2],
                                 j ? 0x7632 : 0x5410);
          scaled[k] = bits(__hmul2(weights[k], *reinterpret_cast<__half2*>(&both)));
        }
        u32 near[4], far[4];
        fp4_pairs(words[2 * j], near);
        fp4_pairs(words[2 * j + 1], far);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          uint4 a = make_uint4(near[2 * h], near[2 * h + 1], far[2 * h], far[2 * h + 1]);
          mma<V_FORMAT>(mixed[2 * (i + j) + h], a, scaled[0], scaled[1]);
        }
      }
    } else {
      load_matrices_transposed(words, row + i * 32);  // dims 0-7: tokens 0-7, 8-15; dims 8-15
      uint4 a = make_uint4(words[0], words[2], words[1], words[3]);
      mma<V_FORMAT>(mixed[i], a, low.x, high.x);
      mma<V_FORMAT>(mixed[i], a, low.y, high.y);
    }
  }
}
