// Chooses the next token of each sequence from its logits, as npmoe/ops/sample.py defines it:
//   score = logit + bias; repetition, presence and frequency penalties; -inf for what is forbidden
//   kept  = the best tokens by (score, lower id) that top_k, then top_p, then min_p leave
//   token = argmax over kept of (score - max) / temperature + gumbel(seed, position, stream, id)
// Gumbel noise is -log of an exponential one, so that is the argmax of weight / exponential noise.
// It is taken first, over more tokens than are kept. If it lies among the kept, it is theirs;
// else it and whatever is worse is cut, and again: nothing is sorted.
//
//   best     u64 [seqs]               in and out: ordered(score) << 32 | ~token, which embed reads; before:
//                                     the best by the logits, from lm_head, which stays where a row does not CHOOSE
//   report   int32 [seqs][1 + 2 MAX_LOGPROBS]   out: log probability of the token (float32 bits), ids of the
//                                     most probable tokens, their log probabilities; where a row REPORTS
//   states   u32 [seqs][vocab]        in and out: times in the completion << 2 | ends it << 1 | in the prompt
//   scores   float32 [seqs][CLUSTER * share]    scratch, where IN_SHARED is 0
//   logits   float32 [seqs][vocab]    in
//   biases   float32 [seqs][vocab]    in
//   rows     Row [seqs]               in: see below
//   seq_lens int32 [seqs]             in: tokens so far, which is the position of the next one
//   vocab, share (tokens of a block: a multiple of 4, CLUSTER * share >= vocab) int32
// Grid: (CLUSTER, seqs) blocks of THREADS threads; a cluster shares a row, block r has tokens from r * share.
// Dynamic shared memory: 4 share bytes where IN_SHARED is 1.
// Macros: CLUSTER (1 to 8), IN_SHARED (0 or 1), MAX_LOGPROBS (1 to THREADS).
// Alignment: rows 4 bytes, all others that of their type.
// Numerics: scores float32, each operation rounded as in NumPy; noise and weights, which are
// exp((score - max) / temperature), float32; weights are added as 24.40 fixed point, so that no sum depends on
// an order.
#include "common.cuh"

#if CLUSTER < 1 || CLUSTER > 8 || (IN_SHARED != 0 && IN_SHARED != 1)
#error "sample needs CLUSTER 1 to 8 and IN_SHARED 0 or 1"
#endif
#if CLUSTER > 1 && !defined(CUDA_CPU)
#define CLUSTER_BOUNDS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_BOUNDS
#endif

constexpr int THREADS = 1024, WARPS = THREADS / 32;
static_assert(WARPS == 32, "a lane for each warp");
constexpr int DIGIT = 11, BINS = 1 << DIGIT, BINS_EACH = BINS / THREADS;
static_assert(MAX_LOGPROBS >= 1 && MAX_LOGPROBS <= THREADS, "a thread sorts one alternative");

enum Flags : u32 { CHOOSES = 1, COUNTS = 2, BIASED = 4, REPORTS = 8 };
enum State : u32 { IN_PROMPT = 1, ENDS = 2, ONE_MORE = 4 };

// How a sequence chooses; 64 bytes.
struct Row {
  u32 flags;          // COUNTS: read and update states. BIASED: read biases
  float temperature;  // 0: the best score, without filters
  int top_k;          // 0: all
  float top_p, min_p, repetition, presence, frequency;
  u32 seed_low, seed_high, stream;
  int free_from;      // tokens that end it are forbidden while seq_lens is less
  int alternatives;   // of REPORTS, at most MAX_LOGPROBS
  u32 unused[3];
};

// What threads find out together: the weight of some tokens, and the best by a key, whose score is known too once
// the cluster has it.
struct Tally {
  u64 weight = 0, best = 0;
  float score = 0.f;
};

__device__ __forceinline__ float no_score(u64) { return 0.f; }

// What a block's threads exchange with each other and with the cluster.
struct Exchange {
  ulonglong2 of_warp[WARPS];
  Inbox inboxes[2];
  float4 tallies[2][CLUSTER];
  float2 scores[2][CLUSTER];
  u32 leader;  // the largest weight / noise so far, as bits
  u32 bins[BINS], bins_of_warp[WARPS];
  u32 bin, above, inside;  // what find_bin has found
  u64 listed[MAX_LOGPROBS], sorted[MAX_LOGPROBS];
  u32 num_listed;
};

// The order of tokens: the larger score, then the lower id. No two are equal, and none is 0.
__device__ __forceinline__ u64 rank_key(float score, int id) {
  return static_cast<u64>(ordered(score)) << 32 | static_cast<u32>(~id);
}
__device__ __forceinline__ float score_of(u64 key) { return unordered(static_cast<u32>(key >> 32)); }
__device__ __forceinline__ int id_of(u64 key) { return static_cast<int>(~static_cast<u32>(key)); }

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ float4 as_floats(u64 a, u64 b) {
  auto low = [](u64 v) { return __uint_as_float(static_cast<u32>(v)); };
  return make_float4(low(a), low(a >> 32), low(b), low(b >> 32));
}
__device__ __forceinline__ u64 as_word(float low, float high) {
  return static_cast<u64>(__float_as_uint(high)) << 32 | __float_as_uint(low);
}

// A number from 0 to 1 in 24.40 fixed point.
constexpr float FIXED_ONE = 1099511627776.f;
__device__ __forceinline__ u64 fixed(float v) { return static_cast<u64>(v * FIXED_ONE); }

// The added weights and the best of all threads of the cluster, in every thread; score_at(key) by one thread of each
// block. turns counts: a block may begin the next exchange while others still read this one.
template <class ScoreAt>
__device__ __forceinline__ Tally over_cluster(Exchange& e, u32& turns, Tally mine, ScoreAt score_at) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, turn = turns & 1, phase = turns >> 1 & 1;
  auto over_warp = [&] {
    for (int offset = 16; offset; offset >>= 1) {
      mine.weight += __shfl_xor_sync(ALL_LANES, mine.weight, offset);
      mine.best = larger(mine.best, __shfl_xor_sync(ALL_LANES, mine.best, offset));
    }
  };
  over_warp();
  if (lane == 0) e.of_warp[warp] = make_ulonglong2(mine.weight, mine.best);
  __syncthreads();
  if (warp == 0) {
    mine.weight = e.of_warp[lane].x, mine.best = e.of_warp[lane].y;
    over_warp();
    if (lane == 0) e.inboxes[turn].expect(CLUSTER * (sizeof(float4) + sizeof(float2)));
    int own = cluster_rank();
    if (lane < CLUSTER) {
      e.inboxes[turn].give(&e.tallies[turn][own], lane, as_floats(mine.weight, mine.best));
      e.inboxes[turn].give(&e.scores[turn][own], lane, make_float2(mine.best ? score_at(mine.best) : 0.f, 0.f));
    }
  }
  e.inboxes[turn].wait(phase);
  turns++;
  Tally all;
#pragma unroll
  for (int r = 0; r < CLUSTER; r++) {
    float4 its = e.tallies[turn][r];
    u64 best = as_word(its.z, its.w);
    all.weight += as_word(its.x, its.y);
    if (best > all.best) all.best = best, all.score = e.scores[turn][r].x;
  }
  return all;
}

// Adds the cluster's bins up and finds, from the highest down, the one where the count reaches k:
// its index, the count above it and the count inside, into e. Between two barriers of the cluster.
__device__ __forceinline__ void find_bin(Exchange& e, u32 k) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int highest = BINS - 1 - static_cast<int>(threadIdx.x) * BINS_EACH;
  u32 counts[BINS_EACH] = {}, mine = 0;
#pragma unroll 2
  for (int r = 0; r < CLUSTER; r++)
#pragma unroll
    for (int j = 0; j < BINS_EACH; j++) counts[j] += peer_u32(&e.bins[highest - j], r);
#pragma unroll
  for (int j = 0; j < BINS_EACH; j++) mine += counts[j];
  u32 before = mine;  // becomes the count of all bins above this thread's
  for (int offset = 1; offset < 32; offset <<= 1) {
    u32 other = __shfl_sync(ALL_LANES, before, lane - offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) e.bins_of_warp[warp] = before;
  __syncthreads();
  before -= mine;
  for (int w = 0; w < warp; w++) before += e.bins_of_warp[w];
#pragma unroll
  for (int j = 0; j < BINS_EACH; j++) {
    if (before < k && before + counts[j] >= k)
      e.bin = highest - j, e.above = before, e.inside = counts[j];
    before += counts[j];
  }
}

// A bound that exactly k of the cluster's keys reach, 1 <= k <= their number. key(i): of this
// block's token i < count. Digit by digit, until a bin holds just what is still wanted.
template <class Key>
__device__ __forceinline__ u64 kth_best(Exchange& e, int count, u32 k, Key key) {
  u64 prefix = 0;
#pragma unroll 1
  for (int shift = 64 - DIGIT, width = DIGIT;;) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) e.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
      u64 digits = key(i) >> shift;
      if (shift + width == 64 || digits >> width == prefix)
        atomicAdd(&e.bins[digits & ((1u << width) - 1)], 1u);
    }
    cluster_sync();
    find_bin(e, k);
    cluster_sync();
    prefix = prefix << width | e.bin;
    k -= e.above;
    if (e.inside == k) return prefix << shift;
    width = min(DIGIT, shift);
    shift -= width;
  }
}

// Philox 4x32-10 (Salmon et al., SC 2011).
__device__ __forceinline__ void philox(u32 (&c)[4], u32 key_low, u32 key_high) {
#pragma unroll 5
  for (int round = 0; round < 10; round++) {
    u64 first = static_cast<u64>(c[0]) * 0xD2511F53u, second = static_cast<u64>(c[2]) * 0xCD9E8D57u;
    c[0] = static_cast<u32>(second >> 32) ^ c[1] ^ key_low;
    c[2] = static_cast<u32>(first >> 32) ^ c[3] ^ key_high;
    c[1] = static_cast<u32>(second), c[3] = static_cast<u32>(first);
    key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
  }
}

// Exponential noise: -log(u) of u = (random + 0.5) / 2^32; where u is near 1, by 1 - u, which float32 can hold.
constexpr float NOISE_STEP = 1.f / 4294967296.f;
__device__ __forceinline__ float exponential(u32 random) {
  float low = (static_cast<float>(random) + 0.5f) * NOISE_STEP;
  float high = (static_cast<float>(~random) + 0.5f) * NOISE_STEP;
  return random >> 31 ? -log1pf(-high) : -logf(low);
}

__device__ __forceinline__ float adjusted(const Row& p, float logit, float bias, u32 state, int length) {
  float score = logit + bias;
  if (state & ~ENDS) score = score > 0.f ? __fdiv_rn(score, p.repetition) : __fmul_rn(score, p.repetition);
  u32 count = state / ONE_MORE;
  if (count)
    score -= __fadd_rn(p.presence, __fmul_rn(p.frequency, static_cast<float>(count)));
  return state & ENDS && length < p.free_from ? -INFINITE : score;
}

// A block's tokens.
struct Scores {
  float* own;  // [count], and up to a multiple of 4
  int start, count;

  __device__ __forceinline__ u64 key(int i) const { return rank_key(own[i], start + i); }
};

// The weight of a score.
struct Weigh {
  float top, scale;  // the best score; log2(e) / temperature

  __device__ __forceinline__ float operator()(float score) const { return power_of_two((score - top) * scale); }
};

// What the noise of a sequence's next token depends on.
struct Noise {
  u32 seed_low, seed_high, stream;
  int position;

  __device__ __forceinline__ void of_four(u32 (&random)[4], int id) const {
    random[0] = static_cast<u32>(id) / 4, random[1] = static_cast<u32>(position), random[2] = stream, random[3] = 0;
    philox(random, kept(seed_low), kept(seed_high));
  }
};

// Of the tokens whose keys reach floor: their weight; of those among them that weigh `least` or more, the one with the
// largest weight / noise, as ordered(that) << 32 | ~token.
__device__ __forceinline__ Tally race(Exchange& e, const Scores& scores, const Weigh& weigh, const Noise& noise,
                                      u64 floor, float least) {
  Tally mine;
  if (threadIdx.x == 0) e.leader = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < scores.count; i += THREADS * 4) {
    float4 four = *reinterpret_cast<const float4*>(scores.own + i);
    float score[4] = {four.x, four.y, four.z, four.w}, weight[4];
    bool any = false;
    int id = scores.start + i;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      weight[j] = weigh(score[j]);
      if (rank_key(score[j], id + j) < floor) weight[j] = 0.f;
      mine.weight += fixed(weight[j]);
      if (!(weight[j] >= least)) weight[j] = 0.f;
      any |= weight[j] > 0.f;
    }
    if (!any) continue;
    u32 random[4];
    noise.of_four(random, id);
    float leader = __uint_as_float(*static_cast<volatile u32*>(&e.leader));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      // Noise is 1 - u at least; the factor covers rounding.
      if (!(weight[j] > 0.999f * NOISE_STEP * leader * static_cast<float>(~random[j]))) continue;
      float ratio = weight[j] / exponential(random[j]);
      mine.best = larger(mine.best, rank_key(ratio, id + j));
      if (ratio > leader) leader = ratio, atomicMax(&e.leader, __float_as_uint(ratio));
    }
  }
  return mine;
}

// The rank_key of the token that is drawn; first: of the best one.
__device__ __forceinline__ u64 draw(Exchange& e, u32& turns, const Scores& scores, const Row& p, u64 first,
                                    int position, int vocab) {
  Weigh weigh{score_of(first), 1.44269504f / p.temperature};
  Noise noise{p.seed_low, p.seed_high, p.stream, position};
  bool limited = p.top_k > 0 && p.top_k < vocab;
  u64 floor = limited ? kth_best(e, scores.count, p.top_k, [&](int i) { return scores.key(i); }) : 0;
  double limit = 0.;
  float least = p.min_p;
#pragma unroll 1
  for (bool again = false;; again = true) {
    Tally all = over_cluster(e, turns, race(e, scores, weigh, noise, floor, least),
                             [&](u64 best) { return scores.own[id_of(best) - scores.start]; });
    if (!all.best) return first;  // logits that are NaN
    u64 found = rank_key(all.score, id_of(all.best));
    if (!(p.top_p < 1.f)) return found;
    if (!again) {
      limit = static_cast<double>(p.top_p) * static_cast<double>(all.weight);
      // Tokens this light have less than 1 - top_p together. The factor covers rounding.
      float mean = static_cast<float>(all.weight) / FIXED_ONE / static_cast<float>(limited ? p.top_k : vocab);
      least = fmaxf(least, 0.999f * (1.f - p.top_p) * mean);
    }
    floor = found + 1;
    Tally before;
#pragma unroll 2
    for (int i = threadIdx.x; i < scores.count; i += THREADS)
      if (scores.key(i) >= floor) before.weight += fixed(weigh(scores.own[i]));
    u64 weight = over_cluster(e, turns, before, no_score).weight;
    if (weight == 0 || static_cast<double>(weight) < limit) return found;
  }
}

// Log probabilities by the model's own logits: of the token, and the best alternatives in order.
__device__ __forceinline__ void write_report(Exchange& e, u32& turns, int* report, const float* logits,
                                             int start, int count, int token, int wanted) {
  auto key = [&](int i) { return rank_key(__ldcg(logits + start + i), start + i); };
  Tally best, all;
  for (int i = threadIdx.x; i < count; i += THREADS) best.best = larger(best.best, key(i));
  float top = score_of(over_cluster(e, turns, best, no_score).best);
  for (int i = threadIdx.x; i < count; i += THREADS) all.weight += fixed(expf(__ldcg(logits + start + i) - top));
  float log_total = logf(static_cast<float>(over_cluster(e, turns, all, no_score).weight) / FIXED_ONE);
  auto logprob = [&](float logit) { return __float_as_int(logit - top - log_total); };
  bool writes = blockIdx.x == 0;
  if (writes && threadIdx.x == 0) report[0] = logprob(__ldcg(logits + token));
  if (wanted == 0) return;
  u64 floor = kth_best(e, count, wanted, key);
  if (threadIdx.x == 0) e.num_listed = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += THREADS)
    if (key(i) >= floor) e.listed[atomicAdd(&e.num_listed, 1u)] = key(i);
  cluster_sync();
  if (!writes) return;
  int filled = 0;
  for (int r = 0; r < CLUSTER; r++) {
    int theirs = static_cast<int>(peer_u32(&e.num_listed, r)), i = threadIdx.x;
    if (i < theirs) e.sorted[filled + i] = peer_u64(&e.listed[i], r);
    filled += theirs;
  }
  __syncthreads();
  if (threadIdx.x < wanted) {
    u64 one = e.sorted[threadIdx.x];
    int place = 0;
    for (int i = 0; i < wanted; i++) place += e.sorted[i] > one;
    report[1 + place] = id_of(one);
    report[1 + MAX_LOGPROBS + place] = logprob(score_of(one));
  }
}

extern "C" __global__ void CLUSTER_BOUNDS __launch_bounds__(THREADS, 1)
sample(u64* best, int* report, u32* states, float* scratch, const float* logits,
       const float* __restrict__ biases, const Row* __restrict__ rows, const int* seq_lens, int vocab,
       int share) {
  SHARED_MEMORY(shared);
  __shared__ Exchange e;
  u32 turns = 0;
  int seq = blockIdx.y, start = blockIdx.x * share;
  int count = max(0, min(share, vocab - start));
  const Row& p = rows[seq];
  if (threadIdx.x == 0) e.inboxes[0].open(), e.inboxes[1].open();
  cluster_announce();
  grid_wait();
  launch_next();
  cluster_wait();
  if (!(p.flags & (CHOOSES | REPORTS))) return;
  size_t line = static_cast<size_t>(seq) * vocab;
  u64 chosen = __ldcg(best + seq);
  int length = __ldcg(seq_lens + seq);
  if (p.flags & CHOOSES) {
    float* own = IN_SHARED ? reinterpret_cast<float*>(shared)
                           : scratch + (static_cast<size_t>(seq) * CLUSTER + blockIdx.x) * share;
    bool changed = p.flags & (COUNTS | BIASED);
    if (!changed && vocab % 4 == 0) {
#pragma unroll 5
      for (int i = threadIdx.x * 4; i < count; i += THREADS * 4)
        *reinterpret_cast<float4*>(own + i) = __ldcg(reinterpret_cast<const float4*>(logits + line + start + i));
    } else {
      Tally mine;
#pragma unroll 2
      for (int i = threadIdx.x; i < (count + 3 & ~3); i += THREADS) {
        if (i >= count) {
          own[i] = -INFINITE;
          continue;
        }
        size_t at = line + start + i;
        float bias = p.flags & BIASED ? biases[at] : 0.f;
        u32 state = p.flags & COUNTS ? __ldcg(states + at) : 0;
        own[i] = adjusted(p, __ldcg(logits + at), bias, state, length);
        mine.best = larger(mine.best, rank_key(own[i], start + i));
      }
      if (changed) chosen = over_cluster(e, turns, mine, no_score).best;
    }
    if (p.temperature > 0.f) chosen = draw(e, turns, Scores{own, start, count}, p, chosen, length, vocab);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      best[seq] = chosen;
      if (p.flags & COUNTS) states[line + id_of(chosen)] += ONE_MORE;
    }
  }
  if (p.flags & REPORTS)
    write_report(e, turns, report + static_cast<size_t>(seq) * (1 + 2 * MAX_LOGPROBS), logits + line, start,
                 count, id_of(chosen), min(p.alternatives, vocab));
  if (p.flags & REPORTS || p.top_k > 0) cluster_sync();  // nobody leaves while others read its memory
}
CPU_CLUSTER_KERNEL(sample)
