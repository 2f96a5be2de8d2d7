// projected[token][row] = rsqrt(mean(x^2) + eps) * sum_k W[row][k] (x[token][k] norm[k]) + bias[row]
//
//   projected float32 [tokens][rows]   out
//   w         u8 records [rows / 16][K / 128]   in: "fragments", see weight_formats.cuh
//   bias      float32 [rows] or null   in
//   x         float32 [tokens][K]      in: residual stream
//   norm      float32 [K]              in
//   rows, tokens int32; eps float32
// Grid: any number of blocks of BLOCK_THREADS threads; its tiles: own_tile in gemv.cuh. Of more than 4 tokens one
// block has a multiprocessor: its activations fill more than half of the shared memory.
// Macros: W_FORMAT, K (multiple of 128), TOKENS (1..8), NORM_SIZE (columns of which the mean is; K by
// default, others hold zeros), those of gemv.cuh.
// Alignment: 16 bytes everywhere.
// Numerics: see gemv.cuh; norm factor and bias are applied in float32 to the finished sum.
#include "gemv.cuh"

#if K % 128 != 0 || TOKENS < 1 || TOKENS > 8
#error "qkv needs K in multiples of 128 and TOKENS 1 to 8"
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS || TOKENS > 4 ? 1 : 2)
qkv(float* __restrict__ projected, const u8* __restrict__ w, const float* __restrict__ bias,
    const float* x, const float* __restrict__ norm, int rows, int tokens, float eps) {
  SHARED_MEMORY(shared);
  constexpr int SLICES = K / SLICE / PARTS;
  int tiles = own_tiles(rows / TILE);
  auto nothing = [] {};
  auto one_tile = [](int) {};
  auto chunk = [&](int j, int part) {
    return w + (static_cast<size_t>(own_tile(j)) * PARTS + part) * SLICES * RECORD_BYTES;
  };
  stream_tiles<Pass<SLICES, PARTS, TOKENS, true>, true, false>(
      shared, tiles, x, tokens, norm, nothing, nothing, one_tile, nothing, chunk,
      [&](int j, int r, int token, float sum, float square, bool mine) {
        int row = own_tile(j) * TILE + r;
        float y = sum * rsqrtf(square / NORM_SIZE + eps);
        if (mine)
          projected[static_cast<size_t>(token) * rows + row] = bias ? y + bias[row] : y;
      });
}
CPU_KERNEL(qkv)
