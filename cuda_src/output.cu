// residual[token][row] += sum_k W[row][k] x[token][k] + bias[row]
//
//   residual float32 [tokens][rows]    in and out
//   handed_over u32 [words]            out: EMPTY, as cuda_src/experts.cu wants it before its launches
//   w        u8 records [rows / 16][K / 128]   in: "fragments", see weight_formats.cuh
//   bias     float32 [rows] or null    in
//   x        float32 [tokens][K]       in: attention output, heads one after another, rotated if so told
//   rows, words, tokens int32
// Grid: any number of blocks of BLOCK_THREADS threads; its tiles: own_tile in gemv.cuh. Of more than 4 tokens one
// block has a multiprocessor: its activations fill more than half of the shared memory.
// Macros: W_FORMAT, K (multiple of 128), TOKENS (1..8), ROTATED (0, or the size of heads that are to be
// multiplied by a Hadamard matrix: 64 or 128), those of gemv.cuh.
// Alignment: 16 bytes everywhere.
// Numerics: see gemv.cuh; the sum is added to the residual in float32.
#include "gemv.cuh"

#if K % 128 != 0 || TOKENS < 1 || TOKENS > 8
#error "output needs K in multiples of 128 and TOKENS 1 to 8"
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, PRODUCERS || TOKENS > 4 ? 1 : 2)
output(float* residual, u32* __restrict__ handed_over, const u8* __restrict__ w,
       const float* __restrict__ bias, const float* x, int rows, int words, int tokens) {
  SHARED_MEMORY(shared);
  constexpr int SLICES = K / SLICE / PARTS;
  int tiles = own_tiles(rows / TILE);
  auto nothing = [] {};
  auto one_tile = [](int) {};
  using Rows = Pass<SLICES, PARTS, TOKENS, false>;
  auto chunk = [&](int j, int part) {
    return w + (static_cast<size_t>(own_tile(j)) * PARTS + part) * SLICES * RECORD_BYTES;
  };
  float before = 0.f;
  auto waited = [&] {
    for (int i = blockIdx.x * BLOCK_THREADS + threadIdx.x; i < words; i += gridDim.x * BLOCK_THREADS)
      handed_over[i] = EMPTY;
    if (TOKENS == 1) before = row_ahead<Rows>([&](int row) { return __ldcg(residual + row); }, rows / TILE);
  };
  stream_tiles<Rows, true, true>(
      shared, tiles, x, tokens, nullptr, waited, nothing, one_tile, nothing, chunk,
      [&](int j, int r, int token, float sum, float, bool mine) {
        int row = own_tile(j) * TILE + r;
        if (!mine) return;
        float* at = residual + static_cast<size_t>(token) * rows + row;
        *at = (TOKENS == 1 && j < BATCH ? before : *at) + (bias ? sum + bias[row] : sum);
      });
}
CPU_KERNEL(output)
