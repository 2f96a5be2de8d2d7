// Scores of a chunk of 16 tokens, by one warp.
//
// They come from products of 16 tokens with 8 columns: up to four heads and what a 16-bit number leaves of each,
// or up to eight heads. Over bf16 keys what is left of those is a second product; over quantised keys fp16 is enough.
// Macros, numerics: attention.cu.
#pragma once
#include "attention_chunk.cuh"

// A lane has the scores of EACH_HEADS heads, t and t + 4.
constexpr int RATIO = HEADS / HEAD_GROUPS, EACH_HEADS = RATIO <= 4 ? 1 : 2;
constexpr int TERMS = RATIO <= 4 || K_SCALED ? 1 : 2;  // products
constexpr int Q_STRIDE = D + (K_SCALED ? 1 : 8);  // floats between heads: on different banks
constexpr float LOG2_E = 1.44269504f;  // of scores, which are powers of 2
// A lane's codes of 4 bits may be of another group of 16 than those that a product adds to them. Then they are
// multiplied by their scales before: rounded to fp16, and slower.
template <class Format>
__device__ constexpr bool scaled_before() { return KV_GROUP == 16 && Format::BITS == 4; }
constexpr bool K_BEFORE = scaled_before<KFormat>(), V_BEFORE = scaled_before<VFormat>();
template <class Format>
__device__ constexpr float undo() {
  if (!scaled_before<Format>()) return Format::UNDO * Format::SCALE_UNDO;
  return Format::ZEROED ? 1.f : Format::UNDO * 0x1p-14f;
}
constexpr float K_UNDO = undo<KFormat>(), V_UNDO = undo<VFormat>();
// Two unpacked codes times their scales, two fp16; 2^14 times that unless they have zero points.
template <class Format>
__device__ __forceinline__ void scale_pairs(u32 (&pairs)[4], u32 scales) {
#pragma unroll
  for (u32& pair : pairs) {
    __half2 v = *reinterpret_cast<__half2*>(&pair);
    if (!Format::ZEROED) v = __hmul2(v, __float2half2_rn(0x1p14f));
    pair = bits(__hmul2(v, *reinterpret_cast<__half2*>(&scales)));
  }
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

// The B operands of scores with 32 elements. heads: q in shared memory, elements in the order in which the keys'
// operand has them.
__device__ __forceinline__ uint4 query_operand(int term, int part, const float (*heads)[Q_STRIDE]) {
  int lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
  const float* x = heads[g / 2 + (RATIO <= 4 ? 0 : g % 2 * 4)] + part * 32;
  bool rest = RATIO <= 4 ? g % 2 : term;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // Of the keys' operand: a word of four codes gives out elements 0 and 2, 1 and 3; one of eight 0 and 4 to 3 and 7.
    constexpr int BITS = KFormat::BITS;
    int at = BITS == 4 ? t * 8 + i : BITS == 8 ? i / 2 * 16 + t * 4 + i % 2 : i * 8 + t * 2;
    uint2 both = head_and_rest<K_FORMAT>(x[at], x[at + 16 / BITS]);
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

// So many bytes in words, at an address that is a multiple of their number, or of 16.
template <int BYTES>
struct Words {
  u32 of[BYTES ? (BYTES + 3) / 4 : 1];
  __device__ __forceinline__ explicit Words(const u8* from) {
    if constexpr (BYTES % 16 == 0 && BYTES > 0)
#pragma unroll
      for (int i = 0; i < BYTES / 16; i++) {
        uint4 v = reinterpret_cast<const uint4*>(from)[i];
        of[4 * i] = v.x, of[4 * i + 1] = v.y, of[4 * i + 2] = v.z, of[4 * i + 3] = v.w;
      }
    else if constexpr (BYTES == 8)
      *reinterpret_cast<uint2*>(of) = *reinterpret_cast<const uint2*>(from);
    else if constexpr (BYTES == 4)
      of[0] = *reinterpret_cast<const u32*>(from);
    else if constexpr (BYTES == 2)
      of[0] = *reinterpret_cast<const u16*>(from);
  }
  __device__ __forceinline__ u32 byte(int i) const { return of[i / 4] >> i % 4 * 8 & 0xffu; }
  // Bytes i and j, each the upper half of 16 bits; what is in the lower halves means nothing.
  __device__ __forceinline__ u32 upper_halves(int i, int j) const {
    return __byte_perm(of[i / 4], of[j / 4], i % 4 << 4 | (j % 4 | 4) << 12);
  }
};

// The scales of tokens 2 g and 2 g + 1, divided by SCALE_UNDO.
template <int FORMAT>
struct Scales {
  Words<2 * GROUPS * KV<FORMAT>::SCALE_BYTES> words;
  __device__ __forceinline__ explicit Scales(const u8* rows) : words(rows) {}
  __device__ __forceinline__ float one(int token, int group) const {
    if constexpr (FORMAT == KV_MXFP4) {  // the exponent of a float32
      int i = token * GROUPS + group;
      return __uint_as_float(__byte_perm(words.of[i / 4], 0, i % 4 << 12 | 0x0444) >> 1);
    }
    float2 two = floats(both(group));
    return token ? two.y : two.x;
  }
  // Of one token and group twice, not divided: two fp16.
  __device__ __forceinline__ u32 twice(int token, int group) const {
    return bits(__float2half2_rn(one(token, group) * KV<FORMAT>::SCALE_UNDO));
  }
  // Of both tokens, times their weights: two fp16.
  __device__ __forceinline__ u32 times(const float (&w)[2], int group) const {
    if constexpr (FORMAT == KV_MXFP4) return bits(__floats2half2_rn(w[0] * one(0, group), w[1] * one(1, group)));
    u32 scales = both(group);
    return bits(__hmul2(__floats2half2_rn(w[0], w[1]), *reinterpret_cast<__half2*>(&scales)));
  }

 private:
  __device__ __forceinline__ u32 both(int group) const {  // as fp16
    int i = group, j = GROUPS + group;
    if constexpr (FORMAT == KV_NVFP4) return words.upper_halves(i, j) >> 1 & 0x3F803F80u;
    return __byte_perm(words.of[i / 2], words.of[j / 2], (i % 2 ? 0x32 : 0x10) | (j % 2 ? 0x7600 : 0x5400));
  }
};
// 1024 + the zero points of tokens 2 g and 2 g + 1, as pairs of fp16 that are the same.
struct KeyZeros {
  Words<2 * GROUPS> words;
  __device__ __forceinline__ explicit KeyZeros(const u8* rows) : words(rows) {}
  __device__ __forceinline__ u32 one(int token, int group) const {
    return 0x64006400u | words.byte(token * GROUPS + group) * 0x00010001u;
  }
};

// Where a lane finds what it reads of a warp's first place; its other places are so many bytes further on.
struct LaneRows {
  static constexpr int TURNS = K_ROW > 64 ? 2 : 1;  // pieces 4 further on lie elsewhere in a line
  SharedAt k[2][TURNS];                             // rows of ldmatrix, even and odd ones
  SharedAt k_scales, v_scales, k_zeros;             // of the first of two tokens
  __device__ __forceinline__ LaneRows(SharedAt place)
      : k_scales(place + first_token() * K_SCALE_ROW), v_scales(place + first_token() * V_SCALE_ROW),
        k_zeros(place + first_token() * K_ZERO_ROW) {
    int lane = threadIdx.x & 31, even = piece_at<K_ROW>(lane % 8 * 2, lane / 8 % (K_ROW / 16));
#pragma unroll
    for (int i = 0; i < TURNS; i++)
      k[0][i] = place + further(even, i * 4), k[1][i] = place + next_row<K_ROW>(further(even, i * 4));
  }
  static __device__ __forceinline__ int first_token() { return static_cast<int>(threadIdx.x & 31) / 4 * 2; }
  __device__ __forceinline__ Scales<K_FORMAT> key_scales(int at) const {
    return Scales<K_FORMAT>(in_shared<u8>(k_scales + (at + K_SCALES_AT)));
  }
  __device__ __forceinline__ Scales<V_FORMAT> value_scales(int at) const {
    return Scales<V_FORMAT>(in_shared<u8>(v_scales + (at + V_SCALES_AT)));
  }
  __device__ __forceinline__ KeyZeros key_zeros(int at) const {
    return KeyZeros(in_shared<u8>(k_zeros + (at + K_ZEROS_AT)));
  }
};

// p: scores, divided by K_UNDO, of heads t and t + 4 with tokens 2 g and 2 g + 1 of the place that is `at`
// bytes on.
__device__ __forceinline__ void scores(float (&p)[EACH_HEADS][2], const LaneRows& rows, int at,
                                       const Query& q) {
  float sums[4] = {};  // of columns 2 t and 2 t + 1 with token 2 g, then with the next
  if constexpr (K_SCALED) {
    constexpr int LOADS = K_ROW > 64 ? K_ROW / 64 : 1, PARTS = D / 32 / LOADS;  // parts of 32 elements in a load
    auto scales = rows.key_scales(at);
    float d[4] = {};
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
      u32 words[2][4];
#pragma unroll
      for (int k = 0; k < 2; k++)
        load_matrices(words[k], rows.k[k][load % LaneRows::TURNS] + (at + load / 2 * 128));
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        int part = load * PARTS + j, group = part * 32 / KV_GROUP;
        bool later = K_BEFORE && (threadIdx.x & 2);  // this lane's codes are of the next group
        u32 even[4], odd[4], zeros[2] = {};
        if constexpr (KFormat::ZEROED) {
          KeyZeros both = rows.key_zeros(at);
#pragma unroll
          for (int k = 0; k < 2; k++) zeros[k] = later ? both.one(k, group + K_BEFORE) : both.one(k, group);
        }
        if constexpr (KFormat::BITS == 4) {  // word t of each part
          unpack<K_FORMAT>(words[0][j], even, zeros[0]), unpack<K_FORMAT>(words[1][j], odd, zeros[1]);
        } else {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            unpack<K_FORMAT>(words[0][2 * j + half], even + 2 * half);
            unpack<K_FORMAT>(words[1][2 * j + half], odd + 2 * half);
          }
        }
        uint4 b = q[part];
        if constexpr (K_BEFORE) {
          scale_pairs<KFormat>(even, later ? scales.twice(0, group + 1) : scales.twice(0, group));
          scale_pairs<KFormat>(odd, later ? scales.twice(1, group + 1) : scales.twice(1, group));
        }
        auto end_group = [&](int i) {
#pragma unroll
          for (int c = 0; c < 4; c++) sums[c] += (K_BEFORE ? 1.f : scales.one(c / 2, i)) * d[c], d[c] = 0.f;
        };
        mma<K_FORMAT>(d, make_uint4(even[0], odd[0], even[1], odd[1]), b.x, b.y);
        if (KV_GROUP == 16 && !K_BEFORE) end_group(group);
        mma<K_FORMAT>(d, make_uint4(even[2], odd[2], even[3], odd[3]), b.z, b.w);
        if (KV_GROUP == 16) end_group(group + 1);
        else if ((part + 1) * 32 % KV_GROUP == 0) end_group(group);
      }
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
