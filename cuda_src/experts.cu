// gate_up: hidden[token][k][i] = weight_k * silu(g) * u, with g and u = rows 2i and 2i + 1 of
//          rsqrt(mean(x^2) + eps) * W_gate_up[id_k] (x[token] norm)
// down:    residual[token][row] += sum_k sum_i W_down[id_k][row][i] hidden[token][k][i]
// (id_k, weight_k) is the k-th choice of route.cuh from the token's router logits.
//
//   hidden   float32 [tokens][TOP_K][WIDTH]         out of gate_up, in of down
//   residual float32 [tokens][HIDDEN]               in of gate_up (x), in and out of down
//   gate_up  u8 records [EXPERTS][2 WIDTH / 16][HIDDEN / 128]   in: "fragments", see weight_formats.cuh; gate
//            and up rows alternate
//   down     u8 records [EXPERTS][HIDDEN / 16][WIDTH / 128]     in
//   router_logits float32 [tokens][EXPERTS]         in
//   norm     float32 [HIDDEN]                       in
// Grid: (any, tokens) blocks of BLOCK_THREADS threads; block (b, token) takes
// of its token the tiles that own_tile in gemv.cuh says.
// Macros: W_FORMAT, HIDDEN and WIDTH (multiples of 128), EXPERTS, TOP_K (1..32, at most EXPERTS),
// RENORMALIZE (0 or 1), PAUSE (nanoseconds by which down lets gate_up have its weights first; 0), those of
// gemv.cuh.
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
#ifndef PAUSE
#define PAUSE 0
#endif
#ifndef RENORMALIZE
#error "define RENORMALIZE as 0 or 1"
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS ? 1 : 2)
gate_up(float* __restrict__ hidden, const u8* __restrict__ w, const float* router_logits,
        const float* x, const float* __restrict__ norm, float eps) {
  constexpr int EXPERT_TILES = 2 * WIDTH / TILE, SLICES = HIDDEN / SLICE / PARTS;
  SHARED_MEMORY(shared);
  __shared__ Choice<TOP_K> chosen;
  int token = blockIdx.y;
  Chosen picked;
  auto choose = [&] {
    picked = choose_experts<EXPERTS, TOP_K, RENORMALIZE>(chosen, router_logits + token * EXPERTS);
  };
  auto weigh = [&] { weigh_experts<TOP_K, RENORMALIZE>(chosen, picked); };
  stream_tiles<SLICES, PARTS, 1, false, false, true>(
      shared, own_tiles(TOP_K * EXPERT_TILES), x + static_cast<size_t>(token) * HIDDEN, 1, norm,
      choose, weigh, [] {},
      [&](int j, int part) {
        int at = own_tile(j);
        size_t tile = static_cast<size_t>(chosen.id[at / EXPERT_TILES]) * EXPERT_TILES;
        return w + ((tile + at % EXPERT_TILES) * PARTS + part) * SLICES * RECORD_BYTES;
      },
      [&](int j, int row, int, float sum, float square, bool mine) {
        int at = own_tile(j), slot = at / EXPERT_TILES;
        float y = sum * rsqrtf(square / HIDDEN + eps);
        float up = __shfl_down_sync(ALL_LANES, y, FINISHERS);  // of the next row
        if (mine && row % 2 == 0)
          hidden[(static_cast<size_t>(token) * TOP_K + slot) * WIDTH +
                 at % EXPERT_TILES * (TILE / 2) + row / 2] =
              chosen.weight[slot] * y / (1.f + expf(-y)) * up;
      });
}
CPU_KERNEL(gate_up)

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS ? 1 : 2)
down(float* residual, const u8* __restrict__ w, const float* router_logits, const float* hidden) {
  constexpr int ROW_TILES = HIDDEN / TILE, SLICES = WIDTH / SLICE / PARTS;
  SHARED_MEMORY(shared);
  __shared__ Choice<TOP_K> chosen;
  int token = blockIdx.y;
  // The router's kernel ended before gate_up let this one begin: its logits may be read early.
  auto choose = [&] {
    choose_experts<EXPERTS, TOP_K, true>(chosen, router_logits + token * EXPERTS);  // no weights
    if (PAUSE) pause(PAUSE);
  };
  float* rows = residual + static_cast<size_t>(token) * HIDDEN;
  float before = 0.f;
  stream_tiles<SLICES, TOP_K * PARTS, 1, true, true, false>(
      shared, own_tiles(ROW_TILES), hidden + static_cast<size_t>(token) * TOP_K * WIDTH, 1, nullptr,
      choose, [] {}, [&] { before = row_ahead(rows, ROW_TILES); },
      [&](int j, int k) {
        size_t tile = static_cast<size_t>(chosen.id[k / PARTS]) * ROW_TILES + own_tile(j);
        return w + (tile * PARTS + k % PARTS) * SLICES * RECORD_BYTES;
      },
      [&](int j, int row, int, float sum, float, bool mine) {
        int at = own_tile(j) * TILE + row;
        if (mine) rows[at] = (j < BATCH ? before : rows[at]) + sum;
      });
}
CPU_KERNEL(down)
