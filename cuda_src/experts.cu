// gate_up: hidden[token][k][i] = weight_k * silu(g) * u, with g and u = rows 2i and 2i + 1 of
//          rsqrt(mean(x^2) + eps) * W_gate_up[id_k] (x[token] norm)
// down:    residual[token][row] += sum_k sum_i W_down[id_k][row][i] hidden[token][k][i]
// experts: both, of one token
// (id_k, weight_k) is the k-th choice of route.cuh from the token's router logits.
//
//   hidden   float32 [tokens][TOP_K][WIDTH]         out of gate_up, in of down
//   handed_over float32 [TOP_K WIDTH + 1]           scratch of experts: hidden and a counter, all
//            words EMPTY before the launch
//   residual float32 [tokens][HIDDEN]               in of gate_up (x), in and out of down
//   gate_up  u8 records [EXPERTS][2 WIDTH / 16][HIDDEN / 128]   in: "fragments", see weight_formats.cuh;
//            gate and up rows alternate
//   down     u8 records [EXPERTS][HIDDEN / 16][WIDTH / 128]     in
//   chosen_ids int32 [tokens][TOP_K]                out of gate_up, EMPTY before its launch, in of down
//   router_logits float32 [tokens][EXPERTS]         in
//   norm     float32 [HIDDEN]                       in
//   next_weights u8 [next_bytes]                    in: brought into L2 for the kernel after experts
//   next_bytes int32, a multiple of 16; eps float32
// Grid: (any, tokens) blocks of BLOCK_THREADS threads; block (b, token) takes
// of its token the tiles that own_tile in gemv.cuh says. Of experts all blocks must run at once: at most
// one a multiprocessor, for one token.
// Macros: W_FORMAT, HIDDEN and WIDTH (multiples of 128), EXPERTS, TOP_K (1..32, at most EXPERTS),
// RENORMALIZE (0 or 1), those of gemv.cuh; of experts they are gate_up's, and DOWN_PARTS, DOWN_BATCH,
// DOWN_PAIRED, DOWN_ROLLING and DOWN_BUFFERS down's.
// Alignment: 16 bytes everywhere.
// Numerics: see gemv.cuh; the norm factor is applied in float32 to the finished sums, the combine
// weight to hidden, so that `down` sums over experts as over columns.
#include "gemv.cuh"
#include "route.cuh"

#if HIDDEN % 128 != 0 || WIDTH % 128 != 0
#error "experts needs HIDDEN and WIDTH in multiples of 128"
#endif
#if TOP_K < 1 || TOP_K > 32 || TOP_K > EXPERTS
#error "experts needs TOP_K 1 to 32 and at most EXPERTS"
#endif
#ifndef RENORMALIZE
#error "define RENORMALIZE as 0 or 1"
#endif

constexpr int EXPERT_TILES = 2 * WIDTH / TILE, ROW_TILES = HIDDEN / TILE;

// Where in the weights chunk `part` of the tile is that is `at`-th of all chosen experts'.
template <class P>
__device__ __forceinline__ const u8* gate_up_chunk(const u8* w, const Choice<TOP_K>& chosen, int at,
                                                   int part) {
  size_t tile = static_cast<size_t>(chosen.id[at / EXPERT_TILES]) * EXPERT_TILES + at % EXPERT_TILES;
  return w + (tile * P::CHUNKS + part) * P::CHUNK_BYTES;
}
// Chunk k of row tile `at`: the experts one after another.
template <class P>
__device__ __forceinline__ const u8* down_chunk(const u8* w, const Choice<TOP_K>& chosen, int at, int k) {
  constexpr int EACH = P::CHUNKS / TOP_K;
  size_t tile = static_cast<size_t>(chosen.id[k / EACH]) * ROW_TILES + at;
  return w + (tile * EACH + k % EACH) * P::CHUNK_BYTES;
}
// Of a gate's sum, and of its up's FINISHERS lanes on: what hidden is there.
__device__ __forceinline__ float gated(float sum, float square, float eps, float weight) {
  float y = sum * rsqrtf(square / HIDDEN + eps);
  float up = __shfl_down_sync(ALL_LANES, y, FINISHERS);  // of the next row
  return weight * y / (1.f + expf(-y)) * up;
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS ? 1 : 2)
gate_up(float* __restrict__ hidden, u32* chosen_ids, const u8* __restrict__ w, const float* router_logits,
        const float* x, const float* __restrict__ norm, float eps) {
  using Rows = Pass<HIDDEN / SLICE / PARTS, PARTS, 1, true>;
  SHARED_MEMORY(shared);
  __shared__ Choice<TOP_K> chosen;
  int token = blockIdx.y;
  int tiles = own_tiles(TOP_K * EXPERT_TILES);
  if (threadIdx.x < 32) chosen.clear();
  auto choose = [&] {
    choose_experts<EXPERTS, TOP_K, RENORMALIZE>(chosen, router_logits + token * EXPERTS);
    int k = threadIdx.x & 31;
    if (blockIdx.x == 0 && k < TOP_K) hand_over(chosen_ids + token * TOP_K + k, chosen.id[k]);
  };
  stream_tiles<Rows, false, false>(
      shared, tiles, x + static_cast<size_t>(token) * HIDDEN, 1, norm, [] {}, choose,
      [&](int j) { chosen.await_id(own_tile(j) / EXPERT_TILES); }, [&] { chosen.await_weights(); },
      [&](int j, int part) { return gate_up_chunk<Rows>(w, chosen, own_tile(j), part); },
      [&](int j, int row, int, float sum, float square, bool mine) {
        int at = own_tile(j), slot = at / EXPERT_TILES;
        float v = gated(sum, square, eps, chosen.weight[slot]);
        if (mine && row % 2 == 0)
          hidden[(static_cast<size_t>(token) * TOP_K + slot) * WIDTH +
                 at % EXPERT_TILES * (TILE / 2) + row / 2] = v;
      });
}
CPU_KERNEL(gate_up)

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS ? 1 : 2)
down(float* residual, const u8* __restrict__ w, const u32* chosen_ids, const float* hidden) {
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
  float before = 0.f;
  stream_tiles<Rows, true, true>(
      shared, tiles, hidden + static_cast<size_t>(token) * TOP_K * WIDTH, 1, nullptr,
      [&] { before = row_ahead<Rows>(rows, ROW_TILES); }, take_ids, [](int) {}, [] {},
      [&](int j, int k) { return down_chunk<Rows>(w, chosen, own_tile(j), k); },
      [&](int j, int row, int, float sum, float, bool mine) {
        int at = own_tile(j) * TILE + row;
        if (mine) rows[at] = (j < BATCH ? before : rows[at]) + sum;
      });
}
CPU_KERNEL(down)

#ifdef DOWN_PARTS
constexpr int PREFETCH = 4096;  // bytes at a time
#if !BULK || RESIDENT
#error "experts needs BULK and a ring that goes round"
#endif
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
experts(float* residual, float* handed_over, const u8* __restrict__ w_gate_up, const u8* __restrict__ w_down,
        const float* router_logits, const float* __restrict__ norm, const u8* next_weights, int next_bytes,
        float eps) {
  using Up = Pass<HIDDEN / SLICE / PARTS, PARTS, 1, true>;
  using Down = Pass<WIDTH / SLICE / DOWN_PARTS, TOP_K * DOWN_PARTS, 1, false, DOWN_BATCH,
                    DOWN_PAIRED ? 2 : 1, DOWN_ROLLING, DOWN_BUFFERS>;
  constexpr int PLACE = Up::CHUNK_BYTES > Down::CHUNK_BYTES ? Up::CHUNK_BYTES : Down::CHUNK_BYTES;
  SHARED_MEMORY(shared);
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
  int up_tiles = own_tiles(TOP_K * EXPERT_TILES), down_tiles = own_tiles<Down::SIDE_BY_SIDE>(ROW_TILES);
  int up_chunks = up_tiles * Up::CHUNKS, chunks = up_chunks + down_tiles * Down::CHUNKS;
  int wanted = min(STAGES, up_chunks);  // at first, by the warps that multiply
  auto up_chunk = [&](int j, int part) { return gate_up_chunk<Up>(w_gate_up, chosen, own_tile(j), part); };
  if (warp == WARPS) {
    choose_experts<EXPERTS, TOP_K, RENORMALIZE>(chosen, router_logits);
    auto down_chunk_at = [&](int j, int k) {
      return down_chunk<Down>(w_down, chosen, own_tile<Down::SIDE_BY_SIDE>(j), k);
    };
    if (lane == 0)
#pragma unroll 1
      for (int c = wanted; c < chunks; c++) {
        if (c >= STAGES) barrier_wait(ring.empty + c % STAGES, (c / STAGES - 1) & 1);
        if (c < up_chunks)
          fetch_chunk<Up, PLACE>(ring, c % STAGES, c, up_chunk);
        else
          fetch_chunk<Down, PLACE>(ring, c % STAGES, c - up_chunks, down_chunk_at);
      }
    __syncwarp();
    launch_next();  // the next kernel asks for its weights only now
    // It may find no room beside this one, which leaves the memory idle while it multiplies its last chunks.
    int share = (next_bytes / 16 + gridDim.x - 1) / gridDim.x * 16, first = blockIdx.x * share;
    for (int at = first + lane * PREFETCH; at < min(first + share, next_bytes); at += 32 * PREFETCH)
      bulk_prefetch(next_weights + at, min(PREFETCH, min(first + share, next_bytes) - at));
    return;
  }
  auto ask = [&] {
    for (int c = warp; c < wanted; c += WARPS) {
      chosen.await_id(own_tile(Up::tile_of(c)) / EXPERT_TILES);
      if (lane == 0) fetch_chunk<Up, PLACE>(ring, c, c, up_chunk);
    }
    chosen.await_weights();
  };
  auto nothing = [] {};
  auto no_chunk = [](int, int) -> const u8* { return nullptr; };  // they come through the ring
  multiply_tiles<Up, PLACE>(
      work, ring, up_tiles, 1, Plain{residual, Up::ALL}, norm, nothing, ask, no_chunk,
      [&](int j, int row, int, float sum, float square, bool mine) {
        int at = own_tile(j), slot = at / EXPERT_TILES;
        float v = gated(sum, square, eps, chosen.weight[slot]);
        if (mine && row % 2 == 0)
          hand_over(handed_over + slot * WIDTH + at % EXPERT_TILES * (TILE / 2) + row / 2, v);
      });
  STAMP(4);
  sync_threads(THREADS);  // `work` is free again
  u32* counter = reinterpret_cast<u32*>(handed_over + TOP_K * WIDTH);
  if (threadIdx.x == 0) count_block(counter);
  float before = row_ahead<Down>(residual, ROW_TILES);
  multiply_tiles<Down, PLACE>(
      work, ring, down_tiles, 1, HandedOver{handed_over, counter}, nullptr, nothing, nothing, no_chunk,
      [&](int j, int row, int, float sum, float, bool mine) {
        int at = own_tile<Down::SIDE_BY_SIDE>(j) * TILE + row;
        if (mine) residual[at] = (j < Down::TOGETHER ? before : residual[at]) + sum;
      });
  STAMP(7);
}
CPU_GRID_KERNEL(experts)
#endif
