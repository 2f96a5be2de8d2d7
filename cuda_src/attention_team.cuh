// What the TEAM warps of a team tell each other, and make of it: each scores its own chunks, and tells the weights;
// then each mixes the values of all their chunks, 32 of every head's elements.
//
// Weights are relative to 2^(level - LIFT): times a scale they are fp16, and those of formats with small scales are
// lifted further, so that a weight far below the level keeps its bits. A level is the highest score, exactly,
// whose weight is then exact, and may be exceeded by SLACK before it is raised; over bf16 values it is a
// whole number, so that heads and rests are scaled exactly.
// Macros, numerics: attention.cu.
#pragma once
#include "attention_scores.cuh"

constexpr bool V_SMALL_SCALES = V_FORMAT == KV_NVFP4 || V_FORMAT == KV_FP8;  // amax / 2688 and amax / 448
constexpr float LIFT = !V_SCALED ? 0.f : V_BEFORE ? 2.f : V_SMALL_SCALES ? 10.f : V_FORMAT == KV_INT8 ? 8.f : 2.f;
constexpr float SLACK = V_SCALED ? 1.f : 0.f;

// What the warps of a team tell each other of their chunks. Where a lane has one head, of heads 4 to 7 nothing is told;
// what is read of them goes nowhere.
struct Weighed {
  // B operands of `mix`: times scales of each group, or without; or 16-bit numbers, then what they leave.
  static constexpr int PARTS = V_BEFORE ? 1 : V_SCALED ? GROUPS : 2;
  uint2 weights[TEAM][PARTS][32];
  float level[TEAM][8];  // of each head, if it was raised, and with the last chunk
  float total[TEAM][8];  // of all weights of a warp, relative to its level, with its last chunk
  struct alignas(TEAM * 4) Raised {
    u32 of[TEAM];  // not 0: some level is not what the team has reached
  } raised;
};

// Tells a chunk's weights w, of heads t and t + 4 for tokens 2 g and 2 g + 1. to: the word of the first part that has
// head t's. at: of the place.
__device__ __forceinline__ void tell_weights(SharedAt to, const LaneRows& rows, int at,
                                             const float (&w)[EACH_HEADS][2]) {
  constexpr int PART = 32 * sizeof(uint2), FOUR_HEADS = PART / 2;
  if constexpr (V_BEFORE) {
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++)
      *in_shared<u32>(to + k * FOUR_HEADS) = bits(__floats2half2_rn(w[k][0], w[k][1]));
  } else if constexpr (V_SCALED) {
    auto scales = rows.value_scales(at);
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++)
#pragma unroll
      for (int i = 0; i < GROUPS; i++)
        *in_shared<u32>(to + (i * PART + k * FOUR_HEADS)) = scales.times(w[k], i);
  } else {
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++) {
      uint2 both = head_and_rest<V_FORMAT>(w[k][0], w[k][1]);
      *in_shared<u32>(to + k * FOUR_HEADS) = both.x;
      *in_shared<u32>(to + (PART + k * FOUR_HEADS)) = both.y;
    }
  }
}

// A warp's part in weighing the chunks of its team. Chunks are named by where they lie: `at` bytes behind this warp's
// first place. turn: by how many bytes what is told with a chunk lies behind the team's first Weighed.
struct Weigher {
  const LaneRows rows;
  const Query query;
  const SharedAt told, words;  // the team's, and in it the word of the first part that has head t's weights
  int t, g, member, lowest, end;
  // Of heads t and t + 4: this warp's level, and this lane's share of the weights relative to it.
  float level[EACH_HEADS], weight[EACH_HEADS];
  // Of the chunk whose weights are told: scores, divided by K_UNDO, and weights.
  float p[EACH_HEADS][2], w[EACH_HEADS][2];
  // places: this warp's. lowest, end: of the tokens that count.
  __device__ __forceinline__ Weigher(SharedAt places, const uint4 (*operands)[32], Weighed& first, int member,
                                     int lowest, int end)
      : rows(places), query(operands), told(&first), words(word_of_lane(first, member)), t(threadIdx.x & 3),
        g((threadIdx.x & 31) >> 2), member(member), lowest(lowest), end(end) {
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++) level[k] = -INFINITE, weight[k] = 0.f;
  }
  static __device__ __forceinline__ u32* word_of_lane(Weighed& first, int member) {
    int t = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;
    return reinterpret_cast<u32*>(&first.weights[member][0][t * 4 + g % 4]) + g / 4;
  }
  __device__ __forceinline__ Weighed& to(int turn) const { return *in_shared<Weighed>(told + turn); }

  // Tells the weights of the chunk that begins at token `first`, as far as levels are now; to be settled. Whether a
  // level must be raised.
  __device__ __forceinline__ bool weigh(int first, int at, int turn) {
    scores(p, rows, at, query);
    if (first + CHUNK > end || (WINDOWED && first < lowest))
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (first + 2 * g + i >= end || (WINDOWED && first + 2 * g + i < lowest))
#pragma unroll
          for (int k = 0; k < EACH_HEADS; k++) p[k][i] = -INFINITE;
    return tell(at, turn);
  }
  // Raises levels, if one must be, and tells the weights again.
  __device__ __forceinline__ void settle(bool higher, int at, int turn) {
    bool raised = __any_sync(ALL_LANES, higher);
    if (raised) {
#pragma unroll
      for (int k = 0; k < EACH_HEADS; k++) {
        float best = fmaxf(p[k][0], p[k][1]);
#pragma unroll
        for (int o = 4; o < 32; o *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, o));
        best = V_SCALED ? best * K_UNDO : ceilf(best * K_UNDO);
        raise(k, best > level[k] + SLACK ? best : level[k]);
        if (g == 0) to(turn).level[member][t + 4 * k] = level[k];
      }
      tell(at, turn);
    }
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++) weight[k] += w[k][0] + w[k][1];
    if ((threadIdx.x & 31) == 0) to(turn).raised.of[member] = raised;
  }
  // Of a warp that has no chunk where others of its team have one.
  __device__ __forceinline__ void weigh_nothing(int turn) {
#pragma unroll
    for (int i = 0; i < Weighed::PARTS; i++) to(turn).weights[member][i][threadIdx.x & 31] = make_uint2(0, 0);
    if ((threadIdx.x & 31) == 0) to(turn).raised.of[member] = 0;
  }
  // With the last chunk: all weights.
  __device__ __forceinline__ void tell_total(int turn) {
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++) {
      float all = weight[k];
#pragma unroll
      for (int o = 4; o < 32; o *= 2) all += __shfl_xor_sync(ALL_LANES, all, o);
      if (g == 0) to(turn).total[member][t + 4 * k] = all, to(turn).level[member][t + 4 * k] = level[k];
    }
  }
  // Raises levels to those that others of the team have told.
  __device__ __forceinline__ void follow(const Weighed& others, const Weighed::Raised& raised) {
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++) {
      float top = level[k];
#pragma unroll
      for (int c = 0; c < TEAM; c++)
        if (raised.of[c]) top = fmaxf(top, others.level[c][t + 4 * k]);
      raise(k, top);
    }
  }

 private:
  __device__ __forceinline__ void raise(int k, float to) { weight[k] *= power_of_two(level[k] - to), level[k] = to; }
  __device__ __forceinline__ bool tell(int at, int turn) {
    float highest = -INFINITE;
#pragma unroll
    for (int k = 0; k < EACH_HEADS; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float exponent = p[k][i] * K_UNDO + (LIFT - level[k]);
        highest = fmaxf(highest, exponent), w[k][i] = power_of_two(exponent);
      }
    tell_weights(words + turn, rows, at, w);
    return highest > LIFT + SLACK;
  }
};

// One chunk's weights for `mix`. told: this lane's operand of the first part that it mixes with.
struct Weights {
  static constexpr int PARTS = !V_SCALED ? Weighed::PARTS : KV_GROUP == 16 && !V_BEFORE ? 2 : 1;
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
  SharedAt rows[TURNS], scales, zeros;            // of token 2 t, and of this lane's elements
  __device__ __forceinline__ LaneValues(SharedAt places, int part) {
    int token = (threadIdx.x & 3) * 2, group = V_BEFORE ? part * 2 + (threadIdx.x >> 4 & 1) : part * 32 / KV_GROUP;
    scales = places + (V_SCALES_AT + token * V_SCALE_ROW + group * VFormat::SCALE_BYTES);
    zeros = places + (V_ZEROS_AT + token * V_ZERO_ROW + group);
    int lane = threadIdx.x & 31;
    int piece = VFormat::BITS == 4 ? lane / 16 * PLACE_BYTES + piece_at<V_ROW>(lane % 16, part)
                                   : piece_at<V_ROW>(lane % 16, part * (VFormat::BITS / 4) + lane / 16);
#pragma unroll
    for (int i = 0; i < TURNS; i++) rows[i] = places + (V_AT + further(piece, i * 2));
  }
  // The scales of two tokens, as fp16, `at` bytes on.
  __device__ __forceinline__ u32 two_scales(int at) const {
    auto one = [&](int bytes) {
      const u8* from = in_shared<u8>(scales + (at + bytes));
      if constexpr (V_FORMAT == KV_MXFP4) return __uint_as_float(static_cast<u32>(*from) << 23);
      else if constexpr (V_FORMAT == KV_NVFP4) return floats(e4m3_half(*from)).x * VFormat::SCALE_UNDO;
      else return floats(*reinterpret_cast<const u16*>(from)).x;
    };
    return bits(__floats2half2_rn(one(0), one(V_SCALE_ROW)));
  }
  // 1024 + the zero points of two tokens, as fp16, `at` bytes on.
  __device__ __forceinline__ u32 two_zeros(int at) const {
    const u8* first = in_shared<u8>(zeros + at);
    return VFormat::ZEROED ? 0x64006400u | first[0] | static_cast<u32>(first[V_ZERO_ROW]) << 16 : 0u;
  }
};
// Values as they lie in the places of a team's chunks, `at` bytes on. Those of 4 bits come in one go; of others there
// are too many for registers, and they come as they are used.
struct Values {
  const LaneValues& of;
  int at;
  u32 words[TEAM / 2][4];
  __device__ __forceinline__ Values(const LaneValues& of, int at) : of(of), at(at) {
    if constexpr (VFormat::BITS == 4) {  // of two chunks each their tokens 0-7, 8-15
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
      if constexpr (VFormat::BITS == 4) {
        int zeros = values.at + c * PLACE_BYTES;
        unpack<V_FORMAT>(values.words[c / 2][c % 2 * 2], near, values.of.two_zeros(zeros));
        unpack<V_FORMAT>(values.words[c / 2][c % 2 * 2 + 1], far, values.of.two_zeros(zeros + 8 * V_ZERO_ROW));
        if constexpr (V_BEFORE) {
          scale_pairs<VFormat>(near, values.of.two_scales(zeros));
          scale_pairs<VFormat>(far, values.of.two_scales(zeros + 8 * V_SCALE_ROW));
        }
      } else {
        u32 w[4];  // elements 0-15 of tokens 0-7, 8-15; elements 16-31
        load_matrices_transposed(w, values.of.rows[0] + (values.at + c * PLACE_BYTES));
#pragma unroll
        for (int i = 0; i < 2; i++) unpack<V_FORMAT>(w[2 * i], near + 2 * i), unpack<V_FORMAT>(w[2 * i + 1], far + 2 * i);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint4 a = make_uint4(near[2 * i], near[2 * i + 1], far[2 * i], far[2 * i + 1]);
        const uint2& w = weights[c].of[Weights::PARTS == 2 ? i : 0];
        mma<V_FORMAT>(mixed[i], a, w.x, w.y);
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

// A warp's part in mixing: 32 elements of every head, of all chunks of its team.
struct Mixer {
  const LaneValues values;
  const SharedAt told;  // this lane's operand of the first part that it mixes with, of the team's first Weighed
  float sums[2][4] = {};      // relative to 2^reached, of its heads
  float reached = -INFINITE;  // of head g
  // places: the team's.
  __device__ __forceinline__ Mixer(SharedAt places, Weighed& first, int member)
      : values(places, member), told(&first.weights[0][V_SCALED && !V_BEFORE ? member * 32 / KV_GROUP : 0][threadIdx.x & 31]) {}
  __device__ __forceinline__ void take(Weights (&weights)[TEAM], int turn) const {
    constexpr int MEMBER = sizeof(Weighed::weights) / TEAM;
#pragma unroll
    for (int c = 0; c < TEAM; c++) weights[c].take(told + (turn + c * MEMBER));
  }
  // Raises what is reached to the highest level that is told, and makes the weights relative to it.
  __device__ __forceinline__ void follow(const Weighed& all, const Weighed::Raised& raised, Weights (&weights)[TEAM]) {
    int t = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;
    float levels[TEAM], top = reached;
#pragma unroll
    for (int c = 0; c < TEAM; c++) levels[c] = raised.of[c] ? all.level[c][g] : reached, top = fmaxf(top, levels[c]);
    float shrink = power_of_two(reached - top);
    float even = __shfl_sync(ALL_LANES, shrink, t * 8), odd = __shfl_sync(ALL_LANES, shrink, t * 8 + 4);
#pragma unroll
    for (int i = 0; i < 2; i++) sums[i][0] *= even, sums[i][1] *= odd, sums[i][2] *= even, sums[i][3] *= odd;
#pragma unroll
    for (int c = 0; c < TEAM; c++) weights[c].multiply(power_of_two(levels[c] - top));
    reached = top;
  }
  // All weights of the team for head g, relative to 2^reached. last: what was told with the last chunks.
  __device__ __forceinline__ float total(const Weighed& last) const {
    int g = (threadIdx.x & 31) >> 2;
    float all = 0.f;
#pragma unroll
    for (int c = 0; c < TEAM; c++) all += power_of_two(last.level[c][g] - reached) * last.total[c][g];
    return all;
  }
};

// A lane's results come in fours: of head 2 t + k the components k and k + 2 of both products. Which element of
// the head the c-th of the quad-th four is; lane 4 g + t has those of quad 8 part + g.
__device__ __forceinline__ int element_of(int quad, int c) {
  int part = quad / 8, g = quad % 8;
  constexpr int BITS = VFormat::BITS;
  return part * 32 + (BITS == 4 ? g * 4 + c : BITS == 8 ? c / 2 * 16 + g * 2 + c % 2 : c * 8 + g);
}
