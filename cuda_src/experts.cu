// gate_up: hidden[token][k][i] = weight_k * g * sigmoid(alpha g) * (u + offset), with g and u = rows 2i and
//          2i + 1 of rsqrt(mean(x^2) + eps) * W_gate_up[id_k] (x[token] norm) + bias[id_k], of which g is
//          bounded by limit from above, u by it from both sides
// down:    residual[token][row] += sum_k (sum_i W_down[id_k][row][i] hidden[token][k][i] + weight_k bias[id_k][row])
// experts: both, of one token
// experts_qkv: both, and then what the next layer's attention needs of the residual, as qkv.cu has it:
//          projected[row] = rsqrt(mean(residual^2) + eps) * W_qkv[row] (residual qkv_norm) + bias[row]
// (id_k, weight_k) is the k-th choice of route.cuh from the token's router logits.
//
// Of several tokens, grouped by expert (npmoe/ops/route.py, npmoe/ops/group.py), so that an expert's
// weights are read once, whoever chose it; pair = token * TOP_K + k:
// grouped_gate_up: hidden[pair] as gate_up has it
// grouped_down:    pair_out[pair][row] = sum_i W_down[id_pair][row][i] hidden[pair][i]
// combine:         residual[token][row] += sum_k (pair_out[token * TOP_K + k][row] + weight_k bias[id_k][row])
//
//   hidden   float32 [tokens][TOP_K][WIDTH]         out of gate_up and grouped_gate_up, in of down and
//            grouped_down
//   handed_over float32 [TOP_K WIDTH + HIDDEN]      scratch of experts and experts_qkv: hidden and the new
//            residual; all words EMPTY before the launch
//   residual float32 [tokens][HIDDEN]               in of both gate_ups (x), in and out of down and
//            combine
//   gate_up  u8 records [EXPERTS][2 WIDTH / 16][HIDDEN / 128]   in: "fragments", see weight_formats.cuh;
//            gate and up rows alternate
//   down     u8 records [EXPERTS][HIDDEN / 16][WIDTH / 128]     in
//   up_bias  float32 [EXPERTS][2 WIDTH]             in, where BIASED: gate and up in turn
//   down_bias float32 [EXPERTS][HIDDEN]             in, where BIASED
//   alpha, limit, offset float32                    in, where CLAMPED; or else 1, infinity and 0 are meant
//   chosen_ids int32 [tokens][TOP_K]                out of gate_up, EMPTY before its launch, in of down
//   chosen_weights float32 [tokens][TOP_K]          the same where BIASED, whatever it holds before
//   router_logits float32 [tokens][EXPERTS]         in
//   norm     float32 [HIDDEN]                       in
//   projected float32 [qkv_rows]                    out of experts_qkv; w_qkv u8 records [qkv_rows / 16]
//            [HIDDEN / 128] of W_FORMAT, qkv_bias float32 [qkv_rows] or null, qkv_norm float32 [HIDDEN]: in
//   pair_out float32 [TOKENS][TOP_K][HIDDEN]        out of grouped_down, in of combine
//   topk_weights float32, topk_ids int32 [TOKENS][TOP_K]   in of grouped_gate_up (weights) and combine
//   expert_counts int32 [EXPERTS], expert_offsets int32 [EXPERTS + 1], sorted_pair_ids int32
//            [TOKENS TOP_K]                         in: see npmoe/ops/group.py
// Grid: (any, tokens) blocks of BLOCK_THREADS threads; block (b, token) takes
// of its token the tiles that own_tile in gemv.cuh says. Of experts and experts_qkv all blocks must
// run at once: at most one a multiprocessor, for one token. Of grouped_gate_up and grouped_down any, of
// which BLOCKS_EACH fit a multiprocessor: a block of grouped_gate_up takes tiles as one of gate_up, of all
// chosen experts; one of grouped_down takes neighbours, so that it meets few experts. Of combine
// (any, TOKENS) blocks of COMBINE_THREADS threads, each of 4 rows.
// Macros: W_FORMAT, HIDDEN and WIDTH (multiples of 128), EXPERTS, TOP_K (1..32, at most EXPERTS),
// RENORMALIZE (0 or 1), NORM_SIZE (columns of which the mean is; HIDDEN by default, others hold zeros), BIASED and
// CLAMPED (1, or 0 by default), those of gemv.cuh; of experts they are gate_up's, and DOWN_PARTS, DOWN_BATCH,
// DOWN_PAIRED, DOWN_ROLLING and DOWN_BUFFERS down's; with QKV_PARTS and so on the file has experts_qkv in
// place of experts. With TOKENS (2..8) it has the grouped kernels instead, without RENORMALIZE and with
// COLUMNS (1..4, at most TOKENS), the pairs that one reading of an expert's weights serves, and BLOCKS_EACH (1 by
// default).
// Alignment: 16 bytes everywhere.
// Numerics: see gemv.cuh; the norm factor is applied in float32 to the finished sums, the combine
// weight to hidden, so that `down` sums over experts as over columns. In the grouped kernels a token's
// sums do not depend on its column, nor on other tokens; combine adds in the order of k, then to residual.
#ifndef NORM_SIZE
#define NORM_SIZE HIDDEN
#endif
#include "gemv.cuh"
#include "route.cuh"

#ifndef BIASED
#define BIASED 0
#endif
#ifndef CLAMPED
#define CLAMPED 0
#endif
#if HIDDEN % 128 != 0 || WIDTH % 128 != 0
#error "experts needs HIDDEN and WIDTH in multiples of 128"
#endif
#if TOP_K < 1 || TOP_K > 32 || TOP_K > EXPERTS
#error "experts needs TOP_K 1 to 32 and at most EXPERTS"
#endif
#ifdef TOKENS
#ifndef BLOCKS_EACH
#define BLOCKS_EACH 1
#endif
#if TOKENS < 2 || TOKENS > 8 || !defined(COLUMNS) || COLUMNS < 1 || COLUMNS > TOKENS || COLUMNS > 4
#error "grouped experts need TOKENS 2 to 8 and COLUMNS 1 to 4, at most TOKENS"
#endif
#if RESIDENT
#error "grouped experts need a ring that goes round"
#endif
#elif !defined(RENORMALIZE)
#error "define RENORMALIZE as 0 or 1"
#endif

constexpr int EXPERT_TILES = 2 * WIDTH / TILE, ROW_TILES = HIDDEN / TILE;

// Where in the weights chunk `part` of a tile is: the `at`-th of experts of TILES tiles each, in the
// order of `ids`.
template <class P, int TILES>
__device__ __forceinline__ const u8* expert_chunk(const u8* w, const int* ids, int at, int part) {
  size_t tile = static_cast<size_t>(ids[at / TILES]) * TILES + at % TILES;
  return w + (tile * P::CHUNKS + part) * P::CHUNK_BYTES;
}
// How gate and up become hidden.
struct Activation {
  const float* bias;
  float eps, alpha, limit, offset;

  // Where the bias of this row tile, the `at`-th of an expert's, begins.
  __device__ __forceinline__ const float* bias_of(int expert, int at) const {
    return bias + static_cast<size_t>(expert) * 2 * WIDTH + at * TILE;
  }
  // Brings the biases nearer that this block will add to its tiles; by the warps that multiply.
  template <class ExpertOf>
  __device__ __forceinline__ void prefetch_bias(int tiles, ExpertOf expert_of) const {
    if (!BIASED || threadIdx.x % 32) return;
    for (int j = threadIdx.x / 32; j < tiles; j += WARPS)
      prefetch(bias_of(expert_of(own_tile(j) / EXPERT_TILES), own_tile(j) % EXPERT_TILES));
  }
  // Of the sum of a gate row in tile `at`, and of its up's FINISHERS lanes on: what hidden is there. NaN stays NaN.
  __device__ __forceinline__ float operator()(float sum, float square, float weight, int expert, int at,
                                              int row) const {
    float gate = sum * rsqrtf(square / NORM_SIZE + eps);
    if (BIASED) gate += __ldg(bias_of(expert, at % EXPERT_TILES) + row);
    float up = __shfl_down_sync(ALL_LANES, gate, FINISHERS);  // of the next row
    if (!CLAMPED) return weight * gate / (1.f + expf(-gate)) * up;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return weight * gate / (1.f + expf(-alpha * gate)) * (up + offset);
  }
};
// What the biases of the chosen experts add to a row, where they are BIASED.
struct DownBias {
  const float* bias;
  const int* ids;
  const float* weights;
  __device__ __forceinline__ float operator()(int row) const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) sum += weights[k] * __ldg(bias + static_cast<size_t>(ids[k]) * HIDDEN + row);
    return sum;
  }
};

#ifndef TOKENS
// Chunk k of row tile `at`: the experts one after another.
template <class P>
__device__ __forceinline__ const u8* down_chunk(const u8* w, const Choice<TOP_K>& chosen, int at, int k) {
  constexpr int EACH = P::CHUNKS / TOP_K;
  size_t tile = static_cast<size_t>(chosen.id[k / EACH]) * ROW_TILES + at;
  return w + (tile * EACH + k % EACH) * P::CHUNK_BYTES;
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS ? 1 : 2)
gate_up(float* __restrict__ hidden, u32* chosen_ids, float* __restrict__ chosen_weights, const u8* __restrict__ w,
        const float* __restrict__ up_bias, const float* router_logits, const float* x,
        const float* __restrict__ norm, float eps, float alpha, float limit, float offset) {
  using Rows = Pass<HIDDEN / SLICE / PARTS, PARTS, 1, true>;
  SHARED_MEMORY(shared);
  __shared__ Choice<TOP_K> chosen;
  int token = blockIdx.y;
  int tiles = own_tiles(TOP_K * EXPERT_TILES);
  if (threadIdx.x < 32) chosen.clear();
  auto choose = [&] {
    choose_experts<EXPERTS, TOP_K, RENORMALIZE>(chosen, router_logits + token * EXPERTS);
    int k = threadIdx.x & 31;
    if (blockIdx.x == 0 && k < TOP_K) {
      hand_over(chosen_ids + token * TOP_K + k, chosen.id[k]);
      if (BIASED) chosen_weights[token * TOP_K + k] = chosen.weight[k];
    }
  };
  const Activation activation = {up_bias, eps, alpha, limit, offset};
  stream_tiles<Rows, false, false>(
      shared, tiles, x + static_cast<size_t>(token) * HIDDEN, 1, norm, [] {}, choose,
      [&](int j) { chosen.await_id(own_tile(j) / EXPERT_TILES); },
      [&] {
        chosen.await_weights();
        activation.prefetch_bias(tiles, [&](int slot) { return chosen.id[slot]; });
      },
      [&](int j, int part) { return expert_chunk<Rows, EXPERT_TILES>(w, chosen.id, own_tile(j), part); },
      [&](int j, int row, int, float sum, float square, bool mine) {
        int at = own_tile(j), slot = at / EXPERT_TILES;
        float v = activation(sum, square, chosen.weight[slot], chosen.id[slot], at, row);
        if (mine && row % 2 == 0)
          hidden[(static_cast<size_t>(token) * TOP_K + slot) * WIDTH +
                 at % EXPERT_TILES * (TILE / 2) + row / 2] = v;
      });
}
CPU_KERNEL(gate_up)

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS ? 1 : 2)
down(float* residual, const u8* __restrict__ w, const float* __restrict__ down_bias, const u32* chosen_ids,
     const float* chosen_weights, const float* hidden) {
  using Rows = Pass<WIDTH / SLICE / PARTS, TOP_K * PARTS, 1, false>;
  SHARED_MEMORY(shared);
  __shared__ Choice<TOP_K> chosen;
  int token = blockIdx.y;
  int tiles = own_tiles(ROW_TILES);
  // All blocks of gate_up run already when it lets this kernel begin.
  auto take_ids = [&] {
    int k = threadIdx.x & 31;
    if (k < TOP_K) chosen.id[k] = take_over(chosen_ids + token * TOP_K + k);
  };
  float* rows = residual + static_cast<size_t>(token) * HIDDEN;
  const DownBias bias = {down_bias, chosen.id, chosen_weights + token * TOP_K};
  auto before_at = [&](int row) { return BIASED ? __ldcg(rows + row) + bias(row) : __ldcg(rows + row); };
  float before = 0.f;
  stream_tiles<Rows, true, true>(
      shared, tiles, hidden + static_cast<size_t>(token) * TOP_K * WIDTH, 1, nullptr,
      [&] { before = row_ahead<Rows>(before_at, ROW_TILES); }, take_ids, [](int) {}, [] {},
      [&](int j, int k) { return down_chunk<Rows>(w, chosen, own_tile(j), k); },
      [&](int j, int row, int, float sum, float, bool mine) {
        int at = own_tile(j) * TILE + row;
        if (mine) rows[at] = (j < BATCH ? before : before_at(at)) + sum;
      });
}
CPU_KERNEL(down)

#ifdef DOWN_PARTS
#if !BULK || RESIDENT
#error "experts needs BULK and a ring that goes round"
#endif
// What follows the experts in their kernel: of the next layer.
struct Following {
  float* projected;
  const u8* w;
  const float *bias, *norm;
  int rows;
};
// Up, Down, Qkv: each a Pass; Qkv is NoPass where nothing follows.
template <class Up, class Down, class Qkv>
__device__ __forceinline__ void run_experts(unsigned char* shared, float* residual, float* handed_over,
                                            const u8* w_gate_up, const u8* w_down, const float* down_bias,
                                            const float* router_logits, const float* norm,
                                            const Activation& activation, const Following& qkv) {
  constexpr bool FOLLOWED = Qkv::CHUNKS > 0;
  constexpr int UP_OR_DOWN = Up::CHUNK_BYTES > Down::CHUNK_BYTES ? Up::CHUNK_BYTES : Down::CHUNK_BYTES;
  constexpr int PLACE = Qkv::CHUNK_BYTES > UP_OR_DOWN ? Qkv::CHUNK_BYTES : UP_OR_DOWN;
  __shared__ Choice<TOP_K> chosen;
  STAMP(0);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64* barriers = reinterpret_cast<u64*>(shared + STAGES * PLACE);
  Ring ring = {shared, barriers, barriers + STAGES};
  unsigned char* work = reinterpret_cast<unsigned char*>(barriers + 2 * STAGES);
  if (warp == 0) init_ring(ring), chosen.clear();
  __syncthreads();  // the ring's barriers are there
  STAMP(1);
  grid_wait();
  STAMP(3);
  // Computed anew for every pass: there are no registers in which to keep them meanwhile.
  auto down_tiles = [&] { return own_tiles<Down::SIDE_BY_SIDE>(kept(ROW_TILES)); };
  auto qkv_tiles = [&] { return FOLLOWED ? own_tiles<Qkv::SIDE_BY_SIDE>(kept(qkv.rows) / TILE) : 0; };
  int up_tiles = own_tiles(TOP_K * EXPERT_TILES), down_from = up_tiles * Up::CHUNKS;
  int wanted = min(STAGES, down_from);  // at first, by the warps that multiply
  auto up_chunk = [&](int j, int part) {
    return expert_chunk<Up, EXPERT_TILES>(w_gate_up, chosen.id, own_tile(j), part);
  };
  if (warp == WARPS) {
    choose_experts<EXPERTS, TOP_K, RENORMALIZE>(chosen, router_logits);
    auto down_chunk_at = [&](int j, int k) {
      return down_chunk<Down>(w_down, chosen, own_tile<Down::SIDE_BY_SIDE>(j), k);
    };
    auto qkv_chunk = [&](int j, int part) {
      return qkv.w + (static_cast<size_t>(own_tile<Qkv::SIDE_BY_SIDE>(j)) * Qkv::CHUNKS + part) * Qkv::CHUNK_BYTES;
    };
    int qkv_from = down_from + down_tiles() * Down::CHUNKS, chunks = qkv_from + qkv_tiles() * Qkv::CHUNKS;
    if (lane == 0)
#pragma unroll 1
      for (int c = wanted; c < chunks; c++) {
        if (c >= STAGES) barrier_wait(ring.empty + c % STAGES, (c / STAGES - 1) & 1);
        if (c < down_from)
          fetch_chunk<Up, PLACE>(ring, c % STAGES, c, up_chunk);
        else if (!FOLLOWED || c < qkv_from)
          fetch_chunk<Down, PLACE>(ring, c % STAGES, c - down_from, down_chunk_at);
        else if constexpr (FOLLOWED)
          fetch_chunk<Qkv, PLACE>(ring, c % STAGES, c - qkv_from, qkv_chunk);
      }
    __syncwarp();
    launch_next();  // the next kernel asks for its weights only now
    return;
  }
  auto ask = [&] {
    for (int c = warp; c < wanted; c += WARPS) {
      chosen.await_id(own_tile(Up::tile_of(c)) / EXPERT_TILES);
      if (lane == 0) fetch_chunk<Up, PLACE>(ring, c, c, up_chunk);
    }
    chosen.await_weights();
    activation.prefetch_bias(up_tiles, [&](int slot) { return chosen.id[slot]; });
  };
  auto nothing = [] {};
  auto no_chunk = [](int, int) -> const u8* { return nullptr; };  // they come through the ring
  float* new_residual = handed_over + TOP_K * WIDTH;
  multiply_tiles<Up, PLACE>(
      work, ring, up_tiles, 1, Plain{residual, Up::ALL}, norm, nothing, ask, no_chunk,
      [&](int j, int row, int, float sum, float square, bool mine) {
        int at = own_tile(j), slot = at / EXPERT_TILES;
        float v = activation(sum, square, chosen.weight[slot], chosen.id[slot], at, row);
        if (mine && row % 2 == 0)
          hand_over(handed_over + slot * WIDTH + at % EXPERT_TILES * (TILE / 2) + row / 2, v);
      });
  STAMP(4);
  sync_threads(THREADS);  // `work` is free again
  const DownBias bias = {down_bias, chosen.id, chosen.weight};
  auto before_at = [&](int row) { return BIASED ? __ldcg(residual + row) + bias(row) : __ldcg(residual + row); };
  float before = row_ahead<Down>(before_at, ROW_TILES);
  multiply_tiles<Down, PLACE>(
      work, ring, down_tiles(), 1, HandedOver{handed_over}, nullptr, nothing, nothing, no_chunk,
      [&](int j, int row, int, float sum, float, bool mine) {
        int at = own_tile<Down::SIDE_BY_SIDE>(j) * TILE + row;
        if (!mine) return;
        float y = (j < Down::TOGETHER ? before : before_at(at)) + sum;
        residual[at] = y;
        if (FOLLOWED) hand_over(new_residual + at, y);
      });
  if constexpr (FOLLOWED) {
    sync_threads(THREADS);
    if (int own = qkv_tiles())
      multiply_tiles<Qkv, PLACE>(
          work, ring, own, 1, HandedOver{new_residual}, qkv.norm, nothing, nothing, no_chunk,
          [&](int j, int r, int, float sum, float square, bool mine) {
            int row = own_tile<Qkv::SIDE_BY_SIDE>(j) * TILE + r;
            float y = sum * rsqrtf(square / NORM_SIZE + activation.eps);
            if (mine) qkv.projected[row] = qkv.bias ? y + qkv.bias[row] : y;
          });
  }
  STAMP(7);
}

using UpPass = Pass<HIDDEN / SLICE / PARTS, PARTS, 1, true>;
using DownPass = Pass<WIDTH / SLICE / DOWN_PARTS, TOP_K * DOWN_PARTS, 1, false, DOWN_BATCH, DOWN_PAIRED ? 2 : 1,
                      DOWN_ROLLING, DOWN_BUFFERS>;
#ifndef QKV_PARTS
struct NoPass {
  static constexpr int CHUNKS = 0, CHUNK_BYTES = 0, SIDE_BY_SIDE = 1;
};
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
experts(float* residual, float* handed_over, const u8* __restrict__ w_gate_up, const float* __restrict__ up_bias,
        const u8* __restrict__ w_down, const float* __restrict__ down_bias, const float* router_logits,
        const float* __restrict__ norm, float eps, float alpha, float limit, float offset) {
  SHARED_MEMORY(shared);
  run_experts<UpPass, DownPass, NoPass>(shared, residual, handed_over, w_gate_up, w_down, down_bias,
                                        router_logits, norm, {up_bias, eps, alpha, limit, offset}, Following());
}
CPU_GRID_KERNEL(experts)
#else
using QkvPass = Pass<HIDDEN / SLICE / QKV_PARTS, QKV_PARTS, 1, true, QKV_BATCH, QKV_PAIRED ? 2 : 1, QKV_ROLLING,
                     QKV_BUFFERS>;
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
experts_qkv(float* residual, float* handed_over, const u8* __restrict__ w_gate_up,
            const float* __restrict__ up_bias, const u8* __restrict__ w_down, const float* __restrict__ down_bias,
            const float* router_logits, const float* __restrict__ norm, float eps, float alpha, float limit,
            float offset, float* __restrict__ projected, const u8* __restrict__ w_qkv, const float* __restrict__ qkv_bias,
            const float* __restrict__ qkv_norm, int qkv_rows) {
  SHARED_MEMORY(shared);
  run_experts<UpPass, DownPass, QkvPass>(shared, residual, handed_over, w_gate_up, w_down, down_bias,
                                         router_logits, norm, {up_bias, eps, alpha, limit, offset},
                                         Following{projected, w_qkv, qkv_bias, qkv_norm, qkv_rows});
}
CPU_GRID_KERNEL(experts_qkv)
#endif
#endif

#else
constexpr int PAIRS = TOKENS * TOP_K, COMBINE_THREADS = 128;

// The experts that somebody chose, ascending, an expert again for every further CHOSEN of its pairs:
// group i is of pair[first[i]] to pair[first[i + 1] - 1], which chose expert[i].
template <int CHOSEN>
struct Groups {
  static constexpr int EACH = (TOKENS + CHOSEN - 1) / CHOSEN;  // of an expert, at most
  static constexpr int MOST = EXPERTS * EACH < PAIRS ? EXPERTS * EACH : PAIRS;
  int count;
  int expert[MOST], first[MOST + 1], pair[PAIRS];

  // By one warp; the arrays are those of npmoe/ops/group.py.
  __device__ __forceinline__ void fill(const int* expert_counts, const int* expert_offsets,
                                       const int* sorted_pair_ids) {
    constexpr int HELD = (EXPERTS + 31) / 32;
    int lane = threadIdx.x & 31, counts[HELD], offsets[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      bool there = i * 32 + lane < EXPERTS;
      counts[i] = there ? __ldcg(expert_counts + i * 32 + lane) : 0;
      offsets[i] = there ? __ldcg(expert_offsets + i * 32 + lane) : 0;
    }
#pragma unroll
    for (int i = 0; i < (PAIRS + 31) / 32; i++)
      if (i * 32 + lane < PAIRS) pair[i * 32 + lane] = __ldcg(sorted_pair_ids + i * 32 + lane);
    int all = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      int at = all;  // of this lane's first group
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        u32 lanes = __ballot_sync(ALL_LANES, counts[i] > n * CHOSEN);
        at += __popc(lanes & ((1u << lane) - 1)), all += __popc(lanes);
      }
#pragma unroll
      for (int n = 0; n < EACH; n++)
        if (counts[i] > n * CHOSEN) {
          expert[at + n] = i * 32 + lane;
          first[at + n] = offsets[i] + n * CHOSEN;
        }
    }
    if (lane == 0) count = all, first[all] = __ldcg(expert_offsets + EXPERTS);
  }
};

// A block's ring, if it has one, and the shared memory behind it.
template <class P>
__device__ __forceinline__ Ring make_ring(unsigned char* shared, unsigned char*& work) {
#if BULK
  u64* barriers = reinterpret_cast<u64*>(shared + STAGES * P::CHUNK_BYTES);
  Ring ring = {shared, barriers, barriers + STAGES};
  work = reinterpret_cast<unsigned char*>(barriers + 2 * STAGES);
  if (threadIdx.x < 32) init_ring(ring);
  return ring;
#else
  work = shared;
  return {};
#endif
}
// Asks for the chunks of `tiles` tiles that fill the ring at first; by the warps that multiply.
template <class P, class ChunkAt>
__device__ __forceinline__ void fill_ring(const Ring& ring, int tiles, ChunkAt chunk) {
#if BULK
  if ((threadIdx.x & 31) == 0)
    for (int c = threadIdx.x >> 5; c < min(STAGES, tiles * P::CHUNKS); c += WARPS)
      fetch_chunk<P, P::CHUNK_BYTES>(ring, c, c, chunk);
#endif
}
// Asks for all others, each as soon as there is room; by one more warp.
template <class P, class ChunkAt>
__device__ __forceinline__ void keep_ring_full(const Ring& ring, int tiles, ChunkAt chunk) {
#if BULK
  if ((threadIdx.x & 31) == 0)
#pragma unroll 1
    for (int c = STAGES; c < tiles * P::CHUNKS; c++) {
      barrier_wait(ring.empty + c % STAGES, (c / STAGES - 1) & 1);
      fetch_chunk<P, P::CHUNK_BYTES>(ring, c % STAGES, c, chunk);
    }
#endif
}

// The activations of all tokens, of which each tile picks those that chose its expert.
template <class P>
struct OfGroups : Plain {
  const Groups<COLUMNS>& groups;
  __device__ __forceinline__ OfGroups(const float* x, const Groups<COLUMNS>& groups)
      : Plain{x, P::ALL}, groups(groups) {}
  __device__ __forceinline__ int token(int j, int i) const {
    int group = own_tile(j) / EXPERT_TILES;
    return groups.pair[min(groups.first[group] + i, groups.first[group + 1] - 1)] / TOP_K;
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_EACH)
grouped_gate_up(float* __restrict__ hidden, const u8* __restrict__ w, const float* __restrict__ up_bias,
                const float* topk_weights, const int* expert_counts, const int* expert_offsets,
                const int* sorted_pair_ids, const float* x, const float* __restrict__ norm, float eps,
                float alpha, float limit, float offset) {
  using Rows = Pass<HIDDEN / SLICE / PARTS, PARTS, COLUMNS, true, BATCH, ABREAST, ROLLING, BUFFERS, TOKENS>;
  SHARED_MEMORY(shared);
  __shared__ Groups<COLUMNS> groups;
  __shared__ float weights[PAIRS];
  STAMP(0);
  unsigned char* work;
  Ring ring = make_ring<Rows>(shared, work);
  STAMP(1);
  grid_wait();
  launch_next();  // grouped_down reads what is older than this kernel before its own wait
  STAMP(3);
  for (int i = threadIdx.x; i < PAIRS; i += BLOCK_THREADS) weights[i] = __ldcg(topk_weights + i);
  if (threadIdx.x < 32) groups.fill(expert_counts, expert_offsets, sorted_pair_ids);
  __syncthreads();
  int tiles = own_tiles(groups.count * EXPERT_TILES);
  auto chunk = [&](int j, int part) {
    return expert_chunk<Rows, EXPERT_TILES>(w, groups.expert, own_tile(j), part);
  };
  if (PRODUCERS && threadIdx.x >= THREADS) {
    keep_ring_full<Rows>(ring, tiles, chunk);
    return;
  }
  const Activation activation = {up_bias, eps, alpha, limit, offset};
  multiply_tiles<Rows, Rows::CHUNK_BYTES>(
      work, ring, tiles, TOKENS, OfGroups<Rows>(x, groups), norm, [] {},
      [&] {
        fill_ring<Rows>(ring, tiles, chunk);
        activation.prefetch_bias(tiles, [&](int group) { return groups.expert[group]; });
      },
      chunk,
      [&](int j, int row, int column, float sum, float square, bool mine) {
        int at = own_tile(j), group = at / EXPERT_TILES, i = groups.first[group] + column;
        int pair = i < groups.first[group + 1] ? groups.pair[i] : -1;
        float v = activation(sum, square, pair < 0 ? 0.f : weights[pair], groups.expert[group], at, row);
        if (mine && row % 2 == 0 && pair >= 0)
          hidden[static_cast<size_t>(pair) * WIDTH + at % EXPERT_TILES * (TILE / 2) + row / 2] = v;
      });
  STAMP(7);
}
CPU_KERNEL(grouped_gate_up)

// What grouped_gate_up has written of some pairs.
struct OfPairs {
  static constexpr bool LATER_PASS = false;
  typedef float4 Loaded;
  const float* hidden;
  const int* pairs;
  __device__ __forceinline__ float4 load(int column, int slice) const {
    const float* row = hidden + static_cast<size_t>(pairs[column]) * WIDTH;
    return __ldcg(reinterpret_cast<const float4*>(row + slice * SLICE) + (threadIdx.x & 31));
  }
  __device__ __forceinline__ float4 confirmed(float4 v, int, int) const { return v; }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_EACH)
grouped_down(float* __restrict__ pair_out, const u8* __restrict__ w, const int* expert_counts,
             const int* expert_offsets, const int* sorted_pair_ids, const float* hidden) {
  using Rows = Pass<WIDTH / SLICE / PARTS, PARTS, COLUMNS, false>;
  SHARED_MEMORY(shared);
  __shared__ Groups<COLUMNS> groups;
  STAMP(0);
  unsigned char* work;
  Ring ring = make_ring<Rows>(shared, work);
  if (threadIdx.x < 32) groups.fill(expert_counts, expert_offsets, sorted_pair_ids);
  __syncthreads();
  STAMP(1);
  u64 runs = static_cast<u64>(groups.count) * (ROW_TILES / Rows::SIDE_BY_SIDE);
  int begin = static_cast<int>(runs * blockIdx.x / gridDim.x) * Rows::SIDE_BY_SIDE;
  int end = static_cast<int>(runs * (blockIdx.x + 1) / gridDim.x) * Rows::SIDE_BY_SIDE;
  auto chunk = [&](int j, int part) {
    return expert_chunk<Rows, ROW_TILES>(w, groups.expert, begin + j, part);
  };
  bool fetches = PRODUCERS && threadIdx.x >= THREADS;
  if (!fetches) fill_ring<Rows>(ring, end - begin, chunk);
  launch_next();
  grid_wait();
  STAMP(3);
  if (fetches) {
    keep_ring_full<Rows>(ring, end - begin, chunk);
    return;
  }
#pragma unroll 1
  for (int tile = begin, next; tile < end; tile = next) {  // the tiles of one group
    int group = tile / ROW_TILES;
    const int* pairs = groups.pair + groups.first[group];
    next = min(end, (group + 1) * ROW_TILES);
    if (tile > begin) sync_threads(THREADS);  // `work` is free again
    multiply_tiles<Rows, Rows::CHUNK_BYTES>(
        work, ring, next - tile, groups.first[group + 1] - groups.first[group], OfPairs{hidden, pairs},
        nullptr, [] {}, [] {}, [&](int j, int part) { return chunk(tile - begin + j, part); },
        [&](int j, int row, int column, float sum, float, bool mine) {
          int at = (tile + j) % ROW_TILES * TILE + row;
          if (mine) pair_out[static_cast<size_t>(pairs[column]) * HIDDEN + at] = sum;
        });
  }
  STAMP(7);
}
CPU_KERNEL(grouped_down)

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
combine(float* residual, const float* pair_out, const float* __restrict__ down_bias, const float* topk_weights,
        const int* topk_ids) {
  STAMP(0);
  launch_next();
  int at = blockIdx.x * COMBINE_THREADS + threadIdx.x, token = blockIdx.y;
  bool mine = at < HIDDEN / 4;
  float4* rows = reinterpret_cast<float4*>(residual + static_cast<size_t>(token) * HIDDEN) + at;
  const float4* parts =
      reinterpret_cast<const float4*>(pair_out + static_cast<size_t>(token) * TOP_K * HIDDEN);
  float4 before = mine ? __ldcg(rows) : make_float4(0.f, 0.f, 0.f, 0.f);
  grid_wait();
  STAMP(3);
  if (mine) {
    float4 sum = __ldcg(parts + at);
#pragma unroll
    for (int k = 1; k < TOP_K; k++) {
      float4 v = __ldcg(parts + static_cast<size_t>(k) * (HIDDEN / 4) + at);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    if (BIASED)
#pragma unroll
      for (int k = 0; k < TOP_K; k++) {
        float weight = __ldcg(topk_weights + token * TOP_K + k);
        const float* bias = down_bias + static_cast<size_t>(__ldcg(topk_ids + token * TOP_K + k)) * HIDDEN;
        float4 v = __ldg(reinterpret_cast<const float4*>(bias) + at);
        sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
      }
    *rows = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
  }
  STAMP(7);
}
CPU_KERNEL(combine)
#endif
