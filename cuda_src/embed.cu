// Ends one greedy step and begins the next: takes each sequence's best token, notes it, moves the
// sequence on, and looks up its embedding.
//
//   x        float32 [seqs][K]        out: residual stream
//   best     u64 [seqs]               in and out: see lm_head.cu; 0 afterwards. 0 = take tokens[s]
//   tokens   int32 [seqs]             in and out: the token that is embedded
//   history  int32 [seqs][capacity]   out: history[s][steps[s] % capacity] = token
//   steps    u32 [seqs]               in and out
//   seq_lens int32 [seqs]             in and out: the embedded token is counted
//   table    bf16 [vocab][K]          in
//   capacity int32
// Grid: seqs blocks of 256 threads.
// Macros: K (even).
// Alignment: table 4 bytes, x 8 bytes.
// Numerics: exact.
#include "common.cuh"

#if K % 2 != 0
#error "embed needs an even K"
#endif

extern "C" __global__ void __launch_bounds__(256)
embed(float* __restrict__ x, u64* best, int* tokens, int* history, u32* steps, int* seq_lens,
      const __nv_bfloat16* __restrict__ table, int capacity) {
  int seq = blockIdx.x;
  grid_wait();
  launch_next();
  u64 key = __ldcg(best + seq);
  int token = key ? static_cast<int>(~static_cast<u32>(key)) : __ldcg(tokens + seq);
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 step = steps[seq];
    history[static_cast<size_t>(seq) * capacity + step % capacity] = token;
    tokens[seq] = token, steps[seq] = step + 1, seq_lens[seq] += 1, best[seq] = 0;
  }
  const u32* row = reinterpret_cast<const u32*>(table + static_cast<size_t>(token) * K);
  for (int i = threadIdx.x; i < K / 2; i += 256) {
    u32 pair = row[i];
    reinterpret_cast<float2*>(x + static_cast<size_t>(seq) * K)[i] =
        make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}
CPU_KERNEL(embed)
