// Chunks of 16 tokens of one KV head. A warp brings its chunk into a place of its own and scores it; then
// the TEAM warps of a team mix the values of all their chunks, each 32 of every head's elements.
//
// A place: CHUNK rows of K and of V, then the scales of K, of V. The pieces of 16 bytes of a row are turned,
// so that the same piece of 8 rows in a line lies on different banks.
// Macros, numerics: attention.cu.
#pragma once
#include "new_token.cuh"

constexpr int CHUNK = 16, TEAM = D / 32, SCALE_ROW = 2 * GROUPS;  // bytes
constexpr int RATIO = HEADS / KV_HEADS;
constexpr int V_AT = CHUNK * K_ROW, K_SCALES_AT = V_AT + CHUNK * V_ROW;
constexpr int V_SCALES_AT = K_SCALES_AT + K_SCALED * CHUNK * SCALE_ROW;
constexpr int PLACE_BYTES = (V_SCALES_AT + V_SCALED * CHUNK * SCALE_ROW + 127) / 128 * 128;
// Where piece `piece` of row `row` is, of rows of ROW bytes: the same piece of eight rows in a line, or of every
// second of all, lies on different banks. And, from such a place, where the piece is that is `pieces` further in
// the row, if they have no bit in common, and, from an even row, the same piece of the next.
template <int ROW>
__device__ __forceinline__ int piece_at(int row, int piece) {
  if (ROW >= 128) return row * ROW + (piece ^ row / 2 ^ row % 2 * 4) * 16;
  constexpr int ROWS = 128 / ROW;  // of a line
  return row / ROWS * 128 + ((row % ROWS * (ROW / 16) + piece) ^ row / ROWS % 8) * 16;
}
__device__ __forceinline__ int further(int at, int pieces) {
  return (at ^ pieces % 8 * 16) + pieces / 8 * 128;
}
template <int ROW>
__device__ __forceinline__ int next_row(int at) {
  return ROW < 128 ? at ^ ROW : (at ^ 64) + ROW;
}
constexpr int Q_STRIDE = D + (K_SCALED ? 1 : 8);  // floats between heads: on different banks
constexpr float K_UNDO = K_SCALED ? 16384.f : 1.f, V_UNDO = V_SCALED ? 16384.f : 1.f;  // 2^14 of the codes
// Weights are relative to 2^(level - LIFT): times a scale they are fp16. A level is the highest score, exactly,
// whose weight is then exact, and may be exceeded by SLACK before it is raised; over bf16 values it is a
// whole number, so that heads and rests are scaled exactly.
constexpr float LIFT = V_SCALED ? 2.f : 0.f, SLACK = V_SCALED ? 1.f : 0.f;

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

// What a lane copies of a chunk on one page: pieces of 16 bytes, 512 bytes apart, and one row's scales. Where they
// are on page 0, and in a warp's first place; those of values are V_AT further on.
struct LaneShare {
  const u8 *k, *v, *scales;
  SharedAt k_to, v_to, scales_to;
  __device__ __forceinline__ LaneShare(const Pages& pages, SharedAt places) {
    int lane = threadIdx.x & 31, row = lane % CHUNK;
    bool values = lane >= CHUNK;
    size_t first = pages.row(0, 0);
    k = kept(pages.k_codes + first * K_ROW + lane * 16), v = kept(pages.v_codes + first * V_ROW + lane * 16);
    scales = reinterpret_cast<const u8*>(values ? pages.v_scales : pages.k_scales);
    scales = kept(scales + (first + row) * SCALE_ROW);
    k_to = kept(places + piece_at<K_ROW>(lane / (K_ROW / 16), lane % (K_ROW / 16)));
    v_to = K_ROW == V_ROW ? k_to : kept(places + piece_at<V_ROW>(lane / (V_ROW / 16), lane % (V_ROW / 16)));
    scales_to = kept(places + ((values ? V_SCALES_AT : K_SCALES_AT) + row * SCALE_ROW));
  }
};
// Starts copying CHUNK rows of ROW bytes, the first the row-th of all pages, to `beyond` bytes behind `to`; rows
// behind the last token as well.
template <int ROW>
__device__ __forceinline__ void fetch_whole(SharedAt to, int beyond, const u8* from, u32 row) {
  from += static_cast<size_t>(row) * ROW;
#pragma unroll
  for (int i = 0; i < CHUNK * ROW / 512; i++)
    async_copy<16>(to.turned(i * (256 / ROW) % 8 * 16) + (beyond + i * 512), from + i * 512);
}
// Starts copying `limit` rows of ROW bytes that may be on several pages. page: of token first + lane % CHUNK.
template <int ROW>
__device__ __forceinline__ void fetch_rows(SharedAt to, const u8* from, const Pages& pages, int first, int limit,
                                           int page) {
  constexpr int PIECES_A_ROW = ROW / 16;
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < CHUNK * PIECES_A_ROW / 32; i++) {
    int at = i * 32 + lane, token = at / PIECES_A_ROW, c = at % PIECES_A_ROW;
    size_t row = pages.row(__shfl_sync(ALL_LANES, page, token), first + token);
    if (token < limit) async_copy<16>(to + piece_at<ROW>(token, c), from + row * ROW + c * 16);
  }
}

// Starts copying the tokens [first, first + CHUNK) below `end` to the place that is `at` bytes on. page: theirs, or
// that of token first + lane % CHUNK. Only rows of tokens below `end` mean anything there.
__device__ __forceinline__ void fetch_chunk(const LaneShare& mine, const Pages& pages, SharedAt places, int at,
                                            int first, int end, int page) {
  bool scaled = (threadIdx.x & 31) >= CHUNK ? V_SCALED : K_SCALED;
  if constexpr (PAGE % CHUNK == 0) {
    u32 row = static_cast<u32>(page) * (KV_HEADS * PAGE) + static_cast<u32>(first) % PAGE;
    fetch_whole<K_ROW>(mine.k_to + at, 0, mine.k, row);
    fetch_whole<V_ROW>(mine.v_to + at, V_AT, mine.v, row);
    if (scaled) async_copy<SCALE_ROW>(mine.scales_to + at, mine.scales + static_cast<size_t>(row) * SCALE_ROW);
  } else {
    int limit = end - first, r = (threadIdx.x & 31) % CHUNK;
    fetch_rows<K_ROW>(places + at, pages.k_codes, pages, first, limit, page);
    fetch_rows<V_ROW>(places + (at + V_AT), pages.v_codes, pages, first, limit, page);
    const __half* scales = (threadIdx.x & 31) >= CHUNK ? pages.v_scales : pages.k_scales;
    if (r < limit && scaled)
      async_copy<SCALE_ROW>(mine.scales_to + at, scales + pages.row(page, first + r) * GROUPS);
  }
}

// The i-th word of row r, of rows of ROW bytes.
template <int ROW>
__device__ __forceinline__ u32* word_of(u8* rows, int r, int i) {
  return reinterpret_cast<u32*>(rows + piece_at<ROW>(r, i / 4)) + i % 4;
}

// Puts the new token into row r of a place.
__device__ __forceinline__ void take_new_token(u8* place, int r, const NewToken& token) {
  int lane = threadIdx.x & 31;
  for (int i = lane; i < K_ROW / 4; i += 32)
    *word_of<K_ROW>(place, r, i) = reinterpret_cast<const u32*>(token.k)[i];
  for (int i = lane; i < V_ROW / 4; i += 32)
    *word_of<V_ROW>(place + V_AT, r, i) = reinterpret_cast<const u32*>(token.v)[i];
  if (lane < GROUPS) {
    if (K_SCALED)
      reinterpret_cast<__half*>(place + K_SCALES_AT + r * SCALE_ROW)[lane] = token.k_scales[lane];
    if (V_SCALED)
      reinterpret_cast<__half*>(place + V_SCALES_AT + r * SCALE_ROW)[lane] = token.v_scales[lane];
  }
}

// Clears what could be NaN of the values from row r on: behind the end is whatever lay there.
__device__ __forceinline__ void clear_values(u8* place, int r) {
  int lane = threadIdx.x & 31;
#pragma unroll 1
  for (; r < CHUNK; r++) {
    if (V_SCALED && lane < GROUPS)
      reinterpret_cast<__half*>(place + V_SCALES_AT + r * SCALE_ROW)[lane] = __float2half_rn(0.f);
    for (int i = lane; !V_SCALED && i < V_ROW / 4; i += 32) *word_of<V_ROW>(place + V_AT, r, i) = 0;
  }
}

// Scores come from products of 16 tokens with 8 columns: up to four heads and what a 16-bit number leaves of each,
// or up to eight heads. Over bf16 keys what is left of those is a second product; over fp4 keys fp16 is enough.
// A lane has the scores of EACH_HEADS heads, t and t + 4.
constexpr int EACH_HEADS = RATIO <= 4 ? 1 : 2, TERMS = RATIO <= 4 || K_SCALED ? 1 : 2;

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

// What the warps of a team tell each other of their chunks.
struct Weighed {
  // B operands of `mix`: times scales of each group; or 16-bit numbers, then what they leave.
  static constexpr int PARTS = V_SCALED ? GROUPS : 2;
  uint2 weights[TEAM][PARTS][32];
  float level[TEAM][8];  // of each head, if it was raised, and with the last chunk: weights are relative to 2^level
  float total[TEAM][8];  // of all weights of a warp, with its last chunk
  struct alignas(TEAM * 4) Raised {
    u32 of[TEAM];  // not 0: some level is not what the team has reached
  } raised;
};

// Tells a chunk's weights w, of heads t and t + 4 for tokens 2 g and 2 g + 1. to: the word of the first part that has
// head t's. at: of the place.
__device__ __forceinline__ void tell_weights(SharedAt to, const LaneRows& rows, int at,
                                             const float (&w)[EACH_HEADS][2]) {
  constexpr int PART = 32 * sizeof(uint2), FOUR_HEADS = PART / 2;
  if constexpr (V_SCALED) {
    Scales scales = rows.scales_at(at + V_SCALES_AT);
    u32 both[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) both[i] = scales.both(i);
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++) {
      __half2 weights = __floats2half2_rn(w[k][0], w[k][1]);
#pragma unroll
      for (int i = 0; i < GROUPS; i++)
        *in_shared<u32>(to + (i * PART + k * FOUR_HEADS)) =
            bits(__hmul2(weights, *reinterpret_cast<__half2*>(&both[i])));
    }
  } else {
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++) {
      uint2 both = head_and_rest<V_FORMAT>(w[k][0], w[k][1]);
      *in_shared<u32>(to + k * FOUR_HEADS) = both.x;
      *in_shared<u32>(to + (PART + k * FOUR_HEADS)) = both.y;
    }
  }
}

// One chunk's weights for `mix`. told: this lane's operand of the first part that it mixes with.
struct Weights {
  static constexpr int PARTS = V_SCALED ? 1 : Weighed::PARTS;
  uint2 of[PARTS];
  __device__ __forceinline__ void take(SharedAt told) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) of[i] = in_shared<uint2>(told)[i * 32];
  }
  // By a power of two where values are bf16.
  __device__ __forceinline__ void multiply(float factor) {
    __half2 half = __float2half2_rn(factor);
    __nv_bfloat162 bfloat = __float2bfloat162_rn(factor);
    for (uint2& operand : of)
      for (u32* word : {&operand.x, &operand.y})
        *word = V_SCALED ? bits(__hmul2(*reinterpret_cast<__half2*>(word), half))
                         : bits(__hmul2(*reinterpret_cast<__nv_bfloat162*>(word), bfloat));
  }
};

// Where a lane finds its rows of values in the first places of its team, of 32 elements.
struct LaneValues {
  static constexpr int TURNS = V_SCALED ? 1 : 2;  // 16 elements on
  SharedAt rows[TURNS];
  __device__ __forceinline__ LaneValues(SharedAt places, int part) {
    int lane = threadIdx.x & 31;
    int piece = V_SCALED ? lane / 16 * PLACE_BYTES + piece_at<V_ROW>(lane % 16, part)
                         : piece_at<V_ROW>(lane % 16, part * 4 + lane / 16);
#pragma unroll
    for (int i = 0; i < TURNS; i++) rows[i] = places + (V_AT + further(piece, i * 2));
  }
};
// Values as they lie in the places of a team's chunks, `at` bytes on. Those of 4 bits come in one go; of bf16 there
// are too many for registers, and they come as they are used.
struct Values {
  const LaneValues& of;
  int at;
  u32 words[TEAM / 2][4];
  __device__ __forceinline__ Values(const LaneValues& of, int at) : of(of), at(at) {
    if constexpr (V_SCALED) {  // of two chunks each their tokens 0-7, 8-15
#pragma unroll
      for (int c = 0; c < TEAM; c += 2) load_matrices_transposed(words[c / 2], of.rows[0] + (at + c * PLACE_BYTES));
    }
  }
};

// mixed[i]: heads 2 t and 2 t + 1 of the i-th product's row g, then of its row g + 8. Adds the values times their
// weights.
__device__ __forceinline__ void mix(float (&mixed)[2][4], const Values& values,
                                    const Weights (&weights)[TEAM]) {
#pragma unroll
  for (int c = 0; c < TEAM; c++) {
    if constexpr (V_SCALED) {
      u32 near[4], far[4];
      fp4_pairs(values.words[c / 2][c % 2 * 2], near);
      fp4_pairs(values.words[c / 2][c % 2 * 2 + 1], far);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint4 a = make_uint4(near[2 * i], near[2 * i + 1], far[2 * i], far[2 * i + 1]);
        mma<V_FORMAT>(mixed[i], a, weights[c].of[0].x, weights[c].of[0].y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 w[4];  // elements 0-7 of 16, of tokens 0-7, 8-15; elements 8-15
        load_matrices_transposed(w, values.of.rows[i % LaneValues::TURNS] + (values.at + c * PLACE_BYTES));
        uint4 a = make_uint4(w[0], w[2], w[1], w[3]);
#pragma unroll
        for (int part = 0; part < Weights::PARTS; part++)
          mma<V_FORMAT>(mixed[i], a, weights[c].of[part].x, weights[c].of[part].y);
      }
    }
  }
}
// A lane's results come in fours: of head 2 t + k the components k and k + 2 of both products. Which element of
// the head the c-th of the quad-th four is; lane 4 g + t has those of quad 8 part + g.
__device__ __forceinline__ int element_of(int quad, int c) {
  int part = quad / 8, g = quad % 8;
  return part * 32 + (V_SCALED ? g * 4 + c : c * 8 + g);
}
