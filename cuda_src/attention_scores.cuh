// Scores of a chunk of 16 tokens, by one warp.
//
// They come from products of 16 tokens with 8 columns: up to four heads and what a 16-bit number leaves of each,
// or up to eight heads. Over bf16 keys what is left of those is a second product; over fp4 keys fp16 is enough.
// Macros, numerics: attention.cu.
#pragma once
#include "attention_chunk.cuh"

// A lane has the scores of EACH_HEADS heads, t and t + 4.
constexpr int RATIO = HEADS / KV_HEADS, EACH_HEADS = RATIO <= 4 ? 1 : 2;
constexpr int TERMS = RATIO <= 4 || K_SCALED ? 1 : 2;  // products
constexpr int Q_STRIDE = D + (K_SCALED ? 1 : 8);  // floats between heads: on different banks
constexpr float K_UNDO = K_SCALED ? 16384.f : 1.f, V_UNDO = V_SCALED ? 16384.f : 1.f;  // 2^14 of the codes

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

// The B operands of scores with 32 elements. heads: q in shared memory, elements in the order in which the keys'
// operand has them.
__device__ __forceinline__ uint4 query_operand(int term, int part, const float (*heads)[Q_STRIDE]) {
  int lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
  const float* x = heads[g / 2 + (RATIO <= 4 ? 0 : g % 2 * 4)] + part * 32;
  bool rest = RATIO <= 4 ? g % 2 : term;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // A word of codes gives out elements 0 and 4, 1 and 5, 2 and 6, 3 and 7.
    int at = K_SCALED ? t * 8 + i : i * 8 + t * 2;
    uint2 both = head_and_rest<K_FORMAT>(x[at], x[at + (K_SCALED ? 4 : 1)]);
    words[i] = rest ? both.y : both.x;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A lane's operands: in registers where these are 16 at most, or else read as they are used.
struct Query {
  static constexpr int OPERANDS = TERMS * D / 32;
  static constexpr bool HELD = OPERANDS <= 4;
  uint4 held[HELD ? OPERANDS : 1];
  SharedAt at;
  __device__ __forceinline__ explicit Query(const uint4 (*operands)[32]) : at(operands[0] + (threadIdx.x & 31)) {
#pragma unroll
    for (int i = 0; HELD && i < OPERANDS; i++) held[i] = in_shared<uint4>(at)[i * 32];
  }
  __device__ __forceinline__ uint4 operator[](int i) const {
    return HELD ? held[i] : in_shared<uint4>(at)[i * 32];
  }
};

// The scales of tokens 2 g and 2 g + 1, two fp16 a word.
struct Scales {
  u32 of[2][GROUPS / 2];
  __device__ __forceinline__ explicit Scales(const u8* rows) {
    if constexpr (GROUPS == 4) {
      uint4 v = *reinterpret_cast<const uint4*>(rows);
      of[0][0] = v.x, of[0][1] = v.y, of[1][0] = v.z, of[1][1] = v.w;
    } else {
      uint2 v = *reinterpret_cast<const uint2*>(rows);
      of[0][0] = v.x, of[1][0] = v.y;
    }
  }
  __device__ __forceinline__ float one(int token, int group) const {
    float2 two = floats(of[token][group / 2]);
    return group % 2 ? two.y : two.x;
  }
  __device__ __forceinline__ u32 both(int group) const {
    return __byte_perm(of[0][group / 2], of[1][group / 2], group % 2 ? 0x7632 : 0x5410);
  }
};

// Where a lane finds what it reads of a warp's first place; its other places are so many bytes further on.
struct LaneRows {
  static constexpr int TURNS = K_SCALED ? 1 : 2;  // pieces 4 further on lie elsewhere in a line
  SharedAt k[2][TURNS], scales;                   // rows of ldmatrix, even and odd ones
  __device__ __forceinline__ LaneRows(SharedAt place)
      : scales(place + static_cast<int>((threadIdx.x & 31) / 4) * 2 * SCALE_ROW) {
    int lane = threadIdx.x & 31, even = piece_at<K_ROW>(lane % 8 * 2, K_SCALED ? lane / 8 % GROUPS : lane / 8);
#pragma unroll
    for (int i = 0; i < TURNS; i++)
      k[0][i] = place + further(even, i * 4), k[1][i] = place + next_row<K_ROW>(further(even, i * 4));
  }
  // at: K_SCALES_AT or V_SCALES_AT, and the place.
  __device__ __forceinline__ Scales scales_at(int at) const { return Scales(in_shared<u8>(scales + at)); }
};

// p: scores, divided by K_UNDO, of heads t and t + 4 with tokens 2 g and 2 g + 1 of the place that is `at`
// bytes on.
__device__ __forceinline__ void scores(float (&p)[EACH_HEADS][2], const LaneRows& rows, int at,
                                       const Query& q) {
  float sums[4] = {};  // of columns 2 t and 2 t + 1 with token 2 g, then with the next
  if constexpr (K_SCALED) {
    u32 words[2][4];
#pragma unroll
    for (int k = 0; k < 2; k++) load_matrices(words[k], rows.k[k][0] + at);  // word t of each group
    Scales scales = rows.scales_at(at + K_SCALES_AT);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      u32 even[4], odd[4];
      fp4_pairs(words[0][i], even), fp4_pairs(words[1][i], odd);
      uint4 b = q[i];
      float d[4] = {};
      mma<K_FORMAT>(d, make_uint4(even[0], odd[0], even[1], odd[1]), b.x, b.y);
      mma<K_FORMAT>(d, make_uint4(even[2], odd[2], even[3], odd[3]), b.z, b.w);
#pragma unroll
      for (int c = 0; c < 4; c++) sums[c] += scales.one(c / 2, i) * d[c];
    }
  } else {
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      u32 even[4], odd[4];
      load_matrices(even, rows.k[0][i % LaneRows::TURNS] + (at + i / 2 * 128));
      load_matrices(odd, rows.k[1][i % LaneRows::TURNS] + (at + i / 2 * 128));
#pragma unroll
      for (int term = 0; term < TERMS; term++) {
        uint4 b = q[term * (D / 32) + i];
        mma<K_FORMAT>(sums, make_uint4(even[0], odd[0], even[1], odd[1]), b.x, b.y);
        mma<K_FORMAT>(sums, make_uint4(even[2], odd[2], even[3], odd[3]), b.z, b.w);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 2; k++) {
    if constexpr (EACH_HEADS == 1)
      p[0][k] = sums[2 * k] + sums[2 * k + 1];  // a head's, and what was left of it
    else
      p[0][k] = sums[2 * k], p[1][k] = sums[2 * k + 1];
  }
}
