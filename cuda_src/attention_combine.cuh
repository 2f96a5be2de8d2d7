// The end of attention: what teams of warps have summed is combined by the blocks of a cluster, each a part of the
// outputs, and then over clusters.
//
// Outputs of a KV head go in fours: quad q of a block of rank r is the (r QUADS + q)-th; see element_of.
// Macros, numerics: attention.cu.
#pragma once
#include "attention_team.cuh"

constexpr int THREADS = 32 * WARPS, TEAMS = WARPS / TEAM;

// A block of a cluster combines QUADS fours of outputs, of HEADS_HERE heads or fewer, from all its teams.
constexpr int WRITERS = CLUSTER * TEAMS, QUADS = RATIO * D / 4 / CLUSTER, OUTPUTS = 4 * QUADS;
constexpr int HEADS_HERE = (OUTPUTS + D - 1) / D + (OUTPUTS % D && D % OUTPUTS ? 1 : 0);
// Threads that bring four outputs together: as many as there are for each, of one warp, with equal shares.
__device__ constexpr int helpers_of(int threads) {
  int count = 1;
  while (2 * count <= threads && 2 * count <= 32 && WRITERS % (2 * count) == 0) count *= 2;
  return count;
}
constexpr int HELPERS = helpers_of(THREADS / QUADS);
// One more four: what neighbouring threads read of several writers is on different banks.
struct Received {
  float4 sums[WRITERS][QUADS + 1];
  float2 weights[WRITERS][HEADS_HERE];  // a head's level, and the sum of its weights
};
union Gathered {
  Received received;
  float q[8][Q_STRIDE];  // before
};

// A share of four outputs: sums relative to 2^level, and the weight in them.
struct Share {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  float level = -INFINITE, weight = 0.f;
  // Raises the level, of which nothing has been added yet, to the highest of `width` neighbouring lanes, a power
  // of two.
  __device__ __forceinline__ void raise(int width) {
#pragma unroll
    for (int o = 1; o < 32; o *= 2)
      if (o < width) level = fmaxf(level, __shfl_xor_sync(ALL_LANES, level, o));
  }
  // Adds one of no higher level.
  __device__ __forceinline__ void add(const float4& its, float its_level, float its_weight) {
    if (its_weight == 0.f) return;  // no tokens
    float factor = power_of_two(its_level - level);
    sum.x += its.x * factor, sum.y += its.y * factor, sum.z += its.z * factor, sum.w += its.w * factor;
    weight += its_weight * factor;
  }
  // Adds up those of `width` neighbouring lanes, of the same level, in each of them.
  __device__ __forceinline__ void meet(int width) {
#pragma unroll
    for (int o = 1; o < 32; o *= 2)
      if (o < width) {
        sum.x += __shfl_xor_sync(ALL_LANES, sum.x, o), sum.y += __shfl_xor_sync(ALL_LANES, sum.y, o);
        sum.z += __shfl_xor_sync(ALL_LANES, sum.z, o), sum.w += __shfl_xor_sync(ALL_LANES, sum.w, o);
        weight += __shfl_xor_sync(ALL_LANES, weight, o);
      }
  }
  // The same share relative to a higher level.
  __device__ __forceinline__ void lift(float to) {
    float factor = weight == 0.f ? 0.f : power_of_two(level - to);
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor, weight *= factor, level = to;
  }
};

// What lane 4 g + t has of 32 elements of every head: heads 2 t and 2 t + 1 of two products' rows g and g + 8.
__device__ __forceinline__ void give_sums(Received& received, Inbox& inbox, int writer, int part,
                                          const float (&mixed)[2][4]) {
  int lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int head = 2 * t + k, at = (head * TEAM + part) * 8 + g;
    float4 four = make_float4(mixed[0][k], mixed[0][k + 2], mixed[1][k], mixed[1][k + 2]);
    if (head < RATIO) inbox.give(&received.sums[writer][at % QUADS], at / QUADS, four);
  }
}
// The level and weight of head g, to every block that combines some of it.
__device__ __forceinline__ void give_weight(Received& received, Inbox& inbox, int writer, float level,
                                            float weight) {
  int lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
#pragma unroll
  for (int r = t; r < CLUSTER; r += 4) {
    int h = g - r * OUTPUTS / D;
    if (h >= 0 && h < HEADS_HERE) inbox.give(&received.weights[writer][h], r, make_float2(level, weight));
  }
}
// How much comes to the block of this rank.
__device__ __forceinline__ u32 received_bytes(int rank) {
  int heads = min(HEADS_HERE, 8 - rank * OUTPUTS / D);
  return WRITERS * (QUADS * sizeof(float4) + heads * sizeof(float2));
}

// Adds up what the teams of the cluster gave; done(quad, share) by one thread for every four outputs.
template <class Done>
__device__ __forceinline__ void combine_teams(const Received& received, int rank, Done done) {
  constexpr int EACH = WRITERS / HELPERS;
  int tid = threadIdx.x, lane = tid & 31;
#pragma unroll 1
  for (int base = tid - lane; base < QUADS * HELPERS; base += THREADS) {  // whole warps: they shuffle
    int quad = min((base + lane) / HELPERS, QUADS - 1), helper = lane % HELPERS;
    int h = (rank * OUTPUTS + quad * 4) / D - rank * OUTPUTS / D;
    float2 given[EACH];
    float4 parts[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) given[i] = received.weights[helper + i * HELPERS][h];
#pragma unroll
    for (int i = 0; i < EACH; i++) parts[i] = received.sums[helper + i * HELPERS][quad];
    Share share;
#pragma unroll
    for (int i = 0; i < EACH; i++) share.level = fmaxf(share.level, given[i].x);
    share.raise(HELPERS);
#pragma unroll
    for (int i = 0; i < EACH; i++) share.add(parts[i], given[i].x, given[i].y);
    share.meet(HELPERS);
    if (helper == 0 && base + lane < QUADS * HELPERS) done(quad, share);
  }
}

// A cluster's share of four outputs, as it is handed over.
struct Record {
  float4 sum, rest;  // rest: level, weight
  __device__ __forceinline__ void hand_over_share(const Share& share) {
    hand_over(&sum, share.sum), hand_over(&rest, make_float4(share.level, share.weight, 0.f, 0.f));
  }
};

// Adds up what clusters hand over, for fours `begin` to `end` of this block, and leaves their words EMPTY.
// done: as above.
template <class Done>
__device__ __forceinline__ void combine_clusters(Record* records, int clusters, int begin, int end, Done done) {
  // So many neighbouring threads bring four outputs together, each from one cluster, or from several.
  int tid = threadIdx.x, lane = tid & 31, width = 2;
  while (width < clusters && width < 32) width *= 2;
  constexpr int AT_ONCE = SCATTERED ? 1 : 4;  // fours of a thread whose words are on their way together
#pragma unroll 1
  for (int base = begin * width + tid - lane; base < end * width; base += AT_ONCE * THREADS) {
    Share shares[AT_ONCE];
#pragma unroll 1
    for (int from = lane % width; from < clusters; from += width) {
      Record* record[AT_ONCE];
      uint4 sum[AT_ONCE], rest[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        int quad = (base + k * THREADS + lane) / width;
        record[k] = quad < end ? records + from * QUADS + quad : nullptr;
        if (record[k]) sum[k] = look_at_four(&record[k]->sum), rest[k] = look_at_four(&record[k]->rest);
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        if (!record[k]) continue;
        float4 its = take_over_four(sum[k], &record[k]->sum), at = take_over_four(rest[k], &record[k]->rest);
        shares[k].lift(fmaxf(shares[k].level, at.x));
        shares[k].add(its, at.x, at.y);
        empty_four(&record[k]->sum), empty_four(&record[k]->rest);
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      int pair = base + k * THREADS + lane;
      Share highest = shares[k];
      highest.raise(width);
      shares[k].lift(highest.level);
      shares[k].meet(width);
      if (pair % width == 0 && pair / width < end) done(pair / width, shares[k]);
    }
  }
}

// The at-th four outputs of a KV head. results: its first query head's, and so are sinks, which may be null.
__device__ __forceinline__ void write_outputs(float* results, int at, const Share& share, const float* sinks) {
  float weight = share.weight;
  if (sinks) weight += power_of_two(__ldg(sinks + at / (D / 4)) * LOG2_E + (LIFT - share.level));
  float inverse = V_UNDO / weight;
  const float4& sum = share.sum;
  float4 v = make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
  int quad = at % (D / 4);
  float* row = results + at / (D / 4) * D;
  if constexpr (VFormat::BITS == 4) {  // in a line
    *reinterpret_cast<float4*>(row + element_of(quad, 0)) = v;
  } else {
    row[element_of(quad, 0)] = v.x, row[element_of(quad, 1)] = v.y;
    row[element_of(quad, 2)] = v.z, row[element_of(quad, 3)] = v.w;
  }
}
