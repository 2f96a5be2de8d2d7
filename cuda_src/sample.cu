// Chooses the next token of each sequence from its logits, as npmoe/ops/sample.py defines it:
//   score = logit + bias; repetition, presence and frequency penalties; -inf for what is forbidden
//   kept  = the best tokens by (score, lower id) that top_k, then top_p, then min_p leave
//   token = argmax over kept of (score - max) / temperature + gumbel(seed, position, stream, id)
// The argmax is taken first, over more tokens than are kept. If it lies among the kept, it is theirs;
// else it and whatever is worse is cut, and again: nothing is sorted.
//
//   best     u64 [seqs]               in and out: ordered(score) << 32 | ~token, which embed reads; before:
//                                     lm_head's greedy choice, which stays where a row does not CHOOSE
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
// Numerics: scores float32, each operation rounded as in NumPy; noise and (score - max) / temperature
// float32; probabilities float32, added as 24.40 fixed point, so that no sum depends on an order.
#include "common.cuh"

#if CLUSTER < 1 || CLUSTER > 8 || (IN_SHARED != 0 && IN_SHARED != 1)
#error "sample needs CLUSTER 1 to 8 and IN_SHARED 0 or 1"
#endif
#if CLUSTER > 1 && !defined(CUDA_CPU)
#define CLUSTER_BOUNDS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_BOUNDS
#endif

constexpr int THREADS = 512, WARPS = THREADS / 32;
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

// What a block's threads exchange with each other and with the cluster.
struct Exchange {
  u64 of_warp[WARPS], of_block[2];
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
__device__ __forceinline__ u64 plus(u64 a, u64 b) { return a + b; }

// A number from 0 to 1 in 24.40 fixed point.
constexpr float FIXED_ONE = 1099511627776.f;
__device__ __forceinline__ u64 fixed(float v) { return static_cast<u64>(v * FIXED_ONE); }

// combine over all threads of the cluster, in every thread. Ends with a barrier of the cluster.
// turn alternates, so that a block may begin the next exchange while others still read this one.
template <class Combine>
__device__ __forceinline__ u64 over_cluster(Exchange& e, int& turn, u64 mine, Combine combine) {
  for (int offset = 16; offset; offset >>= 1)
    mine = combine(mine, __shfl_xor_sync(ALL_LANES, mine, offset));
  if ((threadIdx.x & 31) == 0) e.of_warp[threadIdx.x >> 5] = mine;
  __syncthreads();
  u64 all = e.of_warp[0];
#pragma unroll 1
  for (int w = 1; w < WARPS; w++) all = combine(all, e.of_warp[w]);
  turn ^= 1;
  if (threadIdx.x == 0) e.of_block[turn] = all;
  cluster_sync();
  all = peer_u64(&e.of_block[turn], 0);
#pragma unroll
  for (int r = 1; r < CLUSTER; r++) all = combine(all, peer_u64(&e.of_block[turn], r));
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
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u64 first = static_cast<u64>(c[0]) * 0xD2511F53u, second = static_cast<u64>(c[2]) * 0xCD9E8D57u;
    c[0] = static_cast<u32>(second >> 32) ^ c[1] ^ key_low;
    c[2] = static_cast<u32>(first >> 32) ^ c[3] ^ key_high;
    c[1] = static_cast<u32>(second), c[3] = static_cast<u32>(first);
    key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
  }
}

// -log(-log(u)) of u = (random + 0.5) / 2^32; where u is near 1, by 1 - u, which float32 can hold.
__device__ __forceinline__ float gumbel(u32 random) {
  constexpr float STEP = 1.f / 4294967296.f;
  float low = (static_cast<float>(random) + 0.5f) * STEP;
  float high = (static_cast<float>(~random) + 0.5f) * STEP;
  float exponential = random >> 31 ? -log1pf(-high) : -logf(low);
  return -logf(exponential);
}

__device__ __forceinline__ float adjusted(const Row& p, float logit, float bias, u32 state, int length) {
  float score = logit + bias;
  if (state & ~ENDS) score = score > 0.f ? __fdiv_rn(score, p.repetition) : __fmul_rn(score, p.repetition);
  u32 count = state / ONE_MORE;
  if (count)
    score -= __fadd_rn(p.presence, __fmul_rn(p.frequency, static_cast<float>(count)));
  return state & ENDS && length < p.free_from ? -INFINITE : score;
}

// A cluster's tokens: this block's scores and where the others are.
struct Scores {
  float* own;
  const float* row;  // all scores, if they lie in global memory
  int start, count, share;

  __device__ __forceinline__ u64 key(int i) const { return rank_key(own[i], start + i); }
  // Of any token; after a barrier of the cluster.
  __device__ __forceinline__ float of(int id) const {
    return IN_SHARED ? peer_float(own + id % share, id / share) : __ldcg(row + id);
  }
};

// The rank_key of the token that is drawn; first: of the best one.
__device__ __forceinline__ u64 draw(Exchange& e, int& turn, const Scores& scores, const Row& p,
                                    u64 first, int position, int vocab) {
  float top = score_of(first);
  float inverse = 1.f / p.temperature;
  auto scaled = [&](float score) { return (score - top) * inverse; };
  auto mass = [&](u64 floor) {  // of the tokens that reach it
    u64 sum = 0;
    for (int i = threadIdx.x; i < scores.count; i += THREADS)
      if (scores.key(i) >= floor) sum += fixed(expf(scaled(scores.own[i])));
    return over_cluster(e, turn, sum, plus);
  };
  bool limited = p.top_k > 0 && p.top_k < vocab;
  u64 floor = limited ? kth_best(e, scores.count, p.top_k, [&](int i) { return scores.key(i); }) : 0;
  double limit = 0.;
  float least = p.min_p;
  if (p.top_p < 1.f) {
    u64 total = mass(floor);
    limit = static_cast<double>(p.top_p) * static_cast<double>(total);
    // Tokens this light have less than 1 - top_p together. The factor covers rounding.
    float mean = static_cast<float>(total) / FIXED_ONE / static_cast<float>(limited ? p.top_k : vocab);
    least = fmaxf(least, 0.999f * (1.f - p.top_p) * mean);
  }
  float cut = top + p.temperature * (logf(least) - 0.001f);  // spares most tokens the exact test
#pragma unroll 1
  for (;;) {
    u64 mine = 0;
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < scores.count; i += THREADS * 4) {
      u32 in = 0;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (i + j < scores.count && scores.own[i + j] >= cut && scores.key(i + j) >= floor &&
            expf(scaled(scores.own[i + j])) >= least)
          in |= 1u << j;
      if (!in) continue;
      int id = scores.start + i;
      u32 random[4] = {static_cast<u32>(id) / 4, static_cast<u32>(position), p.stream, 0};
      philox(random, p.seed_low, p.seed_high);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (in >> j & 1)
          mine = larger(mine, rank_key(scaled(scores.own[i + j]) + gumbel(random[j]), id + j));
    }
    u64 winner = over_cluster(e, turn, mine, larger);
    if (!winner) return first;  // logits that are NaN
    int id = id_of(winner);
    u64 found = rank_key(scores.of(id), id);
    if (!(p.top_p < 1.f)) return found;
    u64 before = mass(found + 1);
    if (before == 0 || static_cast<double>(before) < limit) return found;
    floor = found + 1;
  }
}

// Log probabilities by the model's own logits: of the token, and the best alternatives in order.
__device__ __forceinline__ void write_report(Exchange& e, int& turn, int* report, const float* logits,
                                             int start, int count, int token, int wanted) {
  auto key = [&](int i) { return rank_key(__ldcg(logits + start + i), start + i); };
  u64 mine = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) mine = larger(mine, key(i));
  float top = score_of(over_cluster(e, turn, mine, larger));
  u64 sum = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) sum += fixed(expf(__ldcg(logits + start + i) - top));
  float log_total = logf(static_cast<float>(over_cluster(e, turn, sum, plus)) / FIXED_ONE);
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

extern "C" __global__ void CLUSTER_BOUNDS __launch_bounds__(THREADS, 2)
sample(u64* best, int* report, u32* states, float* scratch, const float* logits,
       const float* __restrict__ biases, const Row* __restrict__ rows, const int* seq_lens, int vocab,
       int share) {
  SHARED_MEMORY(shared);
  __shared__ Exchange e;
  int turn = 0, seq = blockIdx.y, start = blockIdx.x * share;
  int count = max(0, min(share, vocab - start));
  const Row& p = rows[seq];
  grid_wait();
  launch_next();
  if (!(p.flags & (CHOOSES | REPORTS))) return;
  size_t line = static_cast<size_t>(seq) * vocab;
  float* row = scratch + static_cast<size_t>(seq) * CLUSTER * share;
  int token = id_of(__ldcg(best + seq)), length = __ldcg(seq_lens + seq);
  if (p.flags & CHOOSES) {
    Scores scores{IN_SHARED ? reinterpret_cast<float*>(shared) : row + start, row, start, count, share};
    u64 mine = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += THREADS) {
      size_t at = line + start + i;
      float bias = p.flags & BIASED ? biases[at] : 0.f;
      u32 state = p.flags & COUNTS ? __ldcg(states + at) : 0;
      float score = adjusted(p, __ldcg(logits + at), bias, state, length);
      scores.own[i] = score;
      mine = larger(mine, rank_key(score, start + i));
    }
    u64 chosen = over_cluster(e, turn, mine, larger);
    if (p.temperature > 0.f) chosen = draw(e, turn, scores, p, chosen, length, vocab);
    token = id_of(chosen);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      best[seq] = chosen;
      if (p.flags & COUNTS) states[line + token] += ONE_MORE;
    }
  }
  if (p.flags & REPORTS)
    write_report(e, turn, report + static_cast<size_t>(seq) * (1 + 2 * MAX_LOGPROBS), logits + line, start,
                 count, token, min(p.alternatives, vocab));
  cluster_sync();  // nobody leaves while others read its memory
}
CPU_CLUSTER_KERNEL(sample)
