// Rotation of heads by a Hadamard matrix, as npmoe/formats/hadamard.py defines it.
#pragma once
#include "common.cuh"

// Multiplies N elements in each of LANES neighbouring lanes, both powers of two, by Sylvester's matrix over the square
// root of its size. Which place of a head each element has does not matter: the matrix is a product of one factor for
// each bit of the place.
template <int LANES, int N>
__device__ __forceinline__ void hadamard(float (&v)[N]) {
  constexpr int SIZE = N * LANES;
  static_assert(SIZE == 64 || SIZE == 128, "heads of 64 or 128 elements");
#pragma unroll
  for (int m = 1; m < N; m *= 2)
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!(i & m)) {
        float a = v[i], b = v[i + m];
        v[i] = a + b, v[i + m] = a - b;
      }
#pragma unroll
  for (int o = 1; o < LANES; o *= 2)
#pragma unroll
    for (int i = 0; i < N; i++) {
      float other = __shfl_xor_sync(ALL_LANES, v[i], o);
      v[i] = threadIdx.x & o ? other - v[i] : v[i] + other;
    }
#pragma unroll
  for (int i = 0; i < N; i++) v[i] *= SIZE == 64 ? 0.125f : 0.0883883476f;
}
