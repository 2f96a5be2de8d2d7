// Reads a buffer once and writes next to nothing: the ceiling of every memory-bound kernel.
//
//   sink u32 [1]            out: written only if the bits of the buffer cancel out, which keeps the
//                           compiler from dropping the loads
//   data 16-byte words [count]   in
//   count int32
// Grid: any number of blocks of 512 threads.
// Macros: none.
// Alignment: 16 bytes.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(512)
roofline(u32* sink, const uint4* __restrict__ data, int count) {
  constexpr int AHEAD = 8;
  u32 mixed = 0;
  int stride = gridDim.x * 512, at = blockIdx.x * 512 + threadIdx.x;
  for (; at + (AHEAD - 1) * stride < count; at += AHEAD * stride) {
    uint4 v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) v[i] = load_stream(data + at + i * stride);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) mixed ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (mixed == 0x12345678u) *sink = mixed;
}
CPU_KERNEL(roofline)
