// Chunks of 16 tokens of one KV head. A warp brings its chunk into a place of its own and scores it; then
// the TEAM warps of a team mix the values of all their chunks, each 32 of every head's elements.
//
// A place: CHUNK rows of K and of V, then the scales of K, of V. The pieces of 16 bytes of a row are turned,
// so that the same piece of 8 rows in a line lies on different banks.
// Macros, numerics: attention.cu.
#pragma once
#include "new_token.cuh"

constexpr int CHUNK = 16, TEAM = D / 32, SCALE_ROW = 2 * GROUPS;  // bytes
constexpr int V_AT = CHUNK * K_ROW, K_SCALES_AT = V_AT + CHUNK * V_ROW;
constexpr int V_SCALES_AT = K_SCALES_AT + K_SCALED * CHUNK * SCALE_ROW;
constexpr int PLACE_BYTES = (V_SCALES_AT + V_SCALED * CHUNK * SCALE_ROW + 127) / 128 * 128;
// Where piece `piece` of row `row` is, of rows of ROW bytes; and, from such a place, where the piece is that
// is `pieces` further in the row, if they have no bit in common.
template <int ROW>
__device__ __forceinline__ int piece_at(int row, int piece) {
  constexpr int MANY = ROW < 128 ? ROW / 16 : 8;
  return row * ROW + (piece ^ row / (8 / MANY) % MANY) * 16;
}
__device__ __forceinline__ int further(int at, int pieces) {
  return (at ^ pieces % 8 * 16) + pieces / 8 * 128;
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

// What a lane copies of a chunk, and where in its place it puts it. A chunk is on one page if PAGE is a
// multiple of CHUNK; then a lane has pieces of 16 bytes, and one row's scales.
struct LaneShare {
  const u8 *k, *v;  // its first piece on page 0
  const __half* scales;
  int k_to = 0, v_to = V_AT, scales_to;
  __device__ __forceinline__ LaneShare(const Pages& pages) : k(pages.k_codes), v(pages.v_codes) {
    int lane = threadIdx.x & 31, row = lane % CHUNK;
    bool values = lane >= CHUNK;
    scales = values ? pages.v_scales : pages.k_scales;
    scales_to = (values ? V_SCALES_AT : K_SCALES_AT) + row * SCALE_ROW;
    if (PAGE % CHUNK == 0) {
      size_t first = pages.row(0, 0);
      k = kept(k + first * K_ROW + lane * 16), v = kept(v + first * V_ROW + lane * 16);
      scales += (first + row) * GROUPS;
      k_to += piece_at<K_ROW>(lane / (K_ROW / 16), lane % (K_ROW / 16));
      v_to += piece_at<V_ROW>(lane / (V_ROW / 16), lane % (V_ROW / 16));
    }
  }
};

// Starts copying `limit` rows of ROW bytes that may be on several pages. Others: as of fetch_chunk.
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

// Starts copying the tokens [first, first + CHUNK) below `end` to `place`.
// page: of token first + lane % CHUNK.
__device__ __forceinline__ void fetch_chunk(const LaneShare& mine, const Pages& pages, SharedAt place, int first,
                                            int end, int page) {
  int lane = threadIdx.x & 31, limit = end - first, r = lane % CHUNK;
  bool scaled = lane >= CHUNK ? V_SCALED : K_SCALED;
  if constexpr (PAGE % CHUNK == 0) {
    size_t row = static_cast<size_t>(page) * (KV_HEADS * PAGE) + (PAGE == CHUNK ? 0 : first % PAGE);
    auto rows = [&](int to, const u8* from, int bytes) {
      int pieces = bytes / 16, step = 32 / pieces;
#pragma unroll
      for (int i = 0; i < CHUNK / step; i++)  // the turn of row i * step
        if (lane / pieces + i * step < limit)
          async_copy<16>(place + ((to ^ (bytes < 128 ? 0 : i * step % 8 * 16)) + i * step * bytes),
                         from + row * bytes + i * 512);
    };
    rows(mine.k_to, mine.k, K_ROW);
    rows(mine.v_to, mine.v, V_ROW);
    if (r < limit && scaled) async_copy<SCALE_ROW>(place + mine.scales_to, mine.scales + row * GROUPS);
  } else {
    fetch_rows<K_ROW>(place, mine.k, pages, first, limit, page);
    fetch_rows<V_ROW>(place + V_AT, mine.v, pages, first, limit, page);
    if (r < limit && scaled)
      async_copy<SCALE_ROW>(place + mine.scales_to, mine.scales + pages.row(page, first + r) * GROUPS);
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

// Where a lane finds what it reads of a warp's first place; its other places are so many bytes further on.
struct LaneRows {
  static constexpr int TURNS = K_SCALED ? 1 : 2;  // pieces 4 further on lie elsewhere in a line
  SharedAt k[TURNS], scales;                      // rows of ldmatrix; scales of token 2 t
  __device__ __forceinline__ LaneRows(SharedAt place)
      : scales(place + static_cast<int>(threadIdx.x & 3) * 2 * SCALE_ROW) {
    int lane = threadIdx.x & 31, piece = piece_at<K_ROW>(lane % 8, K_SCALED ? lane / 8 % GROUPS : lane / 8);
#pragma unroll
    for (int i = 0; i < TURNS; i++) k[i] = place + further(piece, i * 4);
  }
  // Of tokens 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t: k = 0 to 3. at: K_SCALES_AT or V_SCALES_AT, and the place.
  __device__ __forceinline__ Scales scales_of(int at, int k) const {
    return load_scales(in_shared<u8>(scales + (at + (k / 2 * 8 + k % 2) * SCALE_ROW)));
  }
};

// p: scores, divided by K_UNDO, of head g with tokens 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of the place that is `at`
// bytes on. q: this lane's operands, every 512 bytes.
__device__ __forceinline__ void scores(float (&p)[4], const LaneRows& rows, int at, SharedAt q) {
  const uint4* operands = in_shared<uint4>(q);
  if constexpr (K_SCALED) {
    u32 words[2][4];
    Scales scales[4];
#pragma unroll
    for (int block = 0; block < 2; block++)
      load_matrices(words[block], rows.k[0] + (at + block * 8 * K_ROW));  // word t of each group of token g
#pragma unroll
    for (int k = 0; k < 4; k++) p[k] = 0.f, scales[k] = rows.scales_of(at + K_SCALES_AT, k);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      uint4 first = operands[2 * i * 32], second = operands[(2 * i + 1) * 32];
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
      uint4 first = operands[2 * i * 32], second = operands[(2 * i + 1) * 32];
#pragma unroll
      for (int block = 0; block < 2; block++) {
        u32 words[4];
        load_matrices(words, rows.k[i % LaneRows::TURNS] + (at + i / 2 * 128 + block * 8 * K_ROW));
        mma<K_FORMAT>(d[block], first, words[0], words[1]);
        mma<K_FORMAT>(d[block], second, words[2], words[3]);
      }
    }
#pragma unroll
    for (int block = 0; block < 2; block++)
      p[2 * block] = d[block][0] + d[block][2], p[2 * block + 1] = d[block][1] + d[block][3];
  }
}

// What the warps of a team tell each other of their chunks.
struct Weighed {
  // B operands of `mix`: times scales of each group, or as 16-bit heads and what is left.
  struct alignas(V_SCALED ? 8 : 16) Operand {
    u32 words[V_SCALED ? 2 : 4];
  };
  Operand weights[TEAM][V_SCALED ? GROUPS : 1][32];
  float level[TEAM][8];  // of each head: weights are relative to 2^level
  float total[TEAM][8];  // of all weights of a warp, with its last chunk
  struct alignas(TEAM * 4) Raised {
    u32 of[TEAM];  // not 0: some level is not what the team has reached
  } raised;
};

// Tells a chunk's weights p, of head g for tokens 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t. to: this lane's operand of
// the first group. at: of the place.
__device__ __forceinline__ void tell_weights(Weighed::Operand* to, const LaneRows& rows, int at, const float (&p)[4]) {
  if constexpr (V_SCALED) {
    __half2 weights[2] = {__floats2half2_rn(p[0], p[1]), __floats2half2_rn(p[2], p[3])};
    Scales scales[4];
#pragma unroll
    for (int k = 0; k < 4; k++) scales[k] = rows.scales_of(at + V_SCALES_AT, k);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      Weighed::Operand operand;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 both = __byte_perm(scales[2 * k].pair[i / 2], scales[2 * k + 1].pair[i / 2], i % 2 ? 0x7632 : 0x5410);
        operand.words[k] = bits(__hmul2(weights[k], *reinterpret_cast<__half2*>(&both)));
      }
      to[i * 32] = operand;
    }
  } else {
    uint2 low = head_and_rest<V_FORMAT>(p[0], p[1]), high = head_and_rest<V_FORMAT>(p[2], p[3]);
    u32* words = to->words;
    words[0] = low.x, words[1] = high.x, words[2] = low.y, words[3] = high.y;
  }
}

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
                                    const Weighed::Operand (&weights)[TEAM]) {
#pragma unroll
  for (int c = 0; c < TEAM; c++) {
    if constexpr (V_SCALED) {
      u32 near[4], far[4];
      fp4_pairs(values.words[c / 2][c % 2 * 2], near);
      fp4_pairs(values.words[c / 2][c % 2 * 2 + 1], far);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint4 a = make_uint4(near[2 * i], near[2 * i + 1], far[2 * i], far[2 * i + 1]);
        mma<V_FORMAT>(mixed[i], a, weights[c].words[0], weights[c].words[1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 w[4];  // elements 0-7 of 16, of tokens 0-7, 8-15; elements 8-15
        load_matrices_transposed(w, values.of.rows[i % LaneValues::TURNS] + (values.at + c * PLACE_BYTES));
        uint4 a = make_uint4(w[0], w[2], w[1], w[3]);
        mma<V_FORMAT>(mixed[i], a, weights[c].words[0], weights[c].words[1]);
        mma<V_FORMAT>(mixed[i], a, weights[c].words[2], weights[c].words[3]);
      }
    }
  }
}
// Multiplies a chunk's weights; over bf16 values by a power of two.
__device__ __forceinline__ void scale_weights(Weighed::Operand& weights, float factor) {
  __half2 half = __float2half2_rn(factor);
  __nv_bfloat162 bfloat = __float2bfloat162_rn(factor);
  for (u32& word : weights.words)
    word = V_SCALED ? bits(__hmul2(*reinterpret_cast<__half2*>(&word), half))
                    : bits(__hmul2(*reinterpret_cast<__nv_bfloat162*>(&word), bfloat));
}

// A lane's results come in fours: of head 2 t + k the components k and k + 2 of both products. Which element of
// the head the c-th of the quad-th four is; lane 4 g + t has those of quad 8 part + g.
__device__ __forceinline__ int element_of(int quad, int c) {
  int part = quad / 8, g = quad % 8;
  return part * 32 + (V_SCALED ? g * 4 + c : c * 8 + g);
}
