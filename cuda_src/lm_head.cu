// logits[token][row] = rsqrt(mean(x^2) + eps) * sum_k W[row][k] (x[token][k] norm[k])
// best[token] = the largest (logit, lowest row) so far, for greedy decoding
//
//   logits float32 [tokens][rows]      out
//   best   u64 [tokens]                in and out: ordered(logit) << 32 | ~row; 0 before the step
//   w      u8 records [rows / 16][K / 128]   in: "fragments", see weight_formats.cuh
//   x      float32 [tokens][K]         in: residual stream
//   norm   float32 [K]                 in
//   rows, vocab (rows that count; the rest is padding), tokens int32; eps float32
// Grid: any number of blocks of BLOCK_THREADS threads; its tiles: own_tile in gemv.cuh. Of more than 4 tokens one
// block has a multiprocessor: its activations fill more than half of the shared memory.
// Macros: W_FORMAT, K (multiple of 128), TOKENS (1..8), NORM_SIZE (columns of which the mean is; K by
// default, others hold zeros), those of gemv.cuh.
// Alignment: 16 bytes everywhere.
// Numerics: see gemv.cuh; the norm factor is applied in float32 to the finished sum; of equal logits
// the lower row wins.
#include "gemv.cuh"

#if K % 128 != 0 || TOKENS < 1 || TOKENS > 8
#error "lm_head needs K in multiples of 128 and TOKENS 1 to 8"
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS || TOKENS > 4 ? 1 : 2)
lm_head(float* __restrict__ logits, u64* best, const u8* __restrict__ w, const float* x,
        const float* __restrict__ norm, int rows, int vocab, int tokens, float eps) {
  SHARED_MEMORY(shared);
  constexpr int SLICES = K / SLICE / PARTS;
  int tiles = own_tiles(rows / TILE);
  auto nothing = [] {};
  auto one_tile = [](int) {};
  auto chunk = [&](int j, int part) {
    return w + (static_cast<size_t>(own_tile(j)) * PARTS + part) * SLICES * RECORD_BYTES;
  };
  // A thread finishes rows of KINDS tokens in turn, if not of one alone.
  constexpr int KINDS = TOKENS * TILE * FINISHERS > THREADS ? TOKENS * TILE * FINISHERS / THREADS : 1;
  u64 highest[KINDS] = {};
  int of_token[KINDS] = {};
  stream_tiles<Pass<SLICES, PARTS, TOKENS, true>, true, false>(
      shared, tiles, x, tokens, norm, nothing, nothing, one_tile, nothing, chunk,
      [&](int j, int r, int token, float sum, float square, bool counts) {
        int row = own_tile(j) * TILE + r;
        if (row >= vocab || !counts) return;
        float y = sum * rsqrtf(square / NORM_SIZE + eps);
        logits[static_cast<size_t>(token) * vocab + row] = y;
        u64 key = static_cast<u64>(ordered(y)) << 32 | static_cast<u32>(~row);
#pragma unroll
        for (int k = 0; k < KINDS; k++) {
          if (token / ((TOKENS + KINDS - 1) / KINDS) != k) continue;
          if (highest[k] && of_token[k] != token) atomicMax(best + of_token[k], highest[k]), highest[k] = 0;
          of_token[k] = token;
          highest[k] = key > highest[k] ? key : highest[k];
        }
      });
  // One atomic a warp where its rows are of one token: thousands at one address take their time.
#pragma unroll
  for (int k = 0; k < KINDS; k++) {
    int token = __shfl_sync(ALL_LANES, of_token[k], 0);
    if (__all_sync(ALL_LANES, !highest[k] || of_token[k] == token)) {
      u64 key = warp_max(highest[k]);
      if (key && threadIdx.x % 32 == 0) atomicMax(best + token, key);
    } else if (highest[k]) {
      atomicMax(best + of_token[k], highest[k]);
    }
  }
}
CPU_KERNEL(lm_head)
