// Small things that several kernels share.
#pragma once
#include "ptx.cuh"

#ifndef CPU_KERNEL  // functions for tests, see tests/cuda/cuda_cpu.h
#define CPU_KERNEL(name)
#define CPU_CLUSTER_KERNEL(name)
#define CPU_GRID_KERNEL(name)
#define CPU_KERNEL_OF(name, blocks_in_turns, blocks_a_cluster)
#endif

#ifndef NORM_SIZE  // columns of which the mean of a norm is
#define NORM_SIZE K
#endif

constexpr u32 ALL_LANES = 0xffffffffu;
#define INFINITE __uint_as_float(0x7f800000u)

__device__ __forceinline__ u32 bits(__half2 h) { return *reinterpret_cast<u32*>(&h); }
__device__ __forceinline__ u32 bits(__nv_bfloat162 h) { return *reinterpret_cast<u32*>(&h); }
__device__ __forceinline__ float2 floats(u32 pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
__device__ __forceinline__ float warp_sum(float v) {
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(ALL_LANES, v, offset);
  return v;
}
__device__ __forceinline__ u64 warp_max(u64 v) {
  for (int offset = 16; offset; offset >>= 1) {
    u64 other = __shfl_xor_sync(ALL_LANES, v, offset);
    v = other > v ? other : v;
  }
  return v;
}
// A float's bits as an unsigned integer of the same order (no NaN; both zeros are +0).
__device__ __forceinline__ u32 ordered(float v) {
  u32 b = __float_as_uint(v + 0.f);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 b) {
  return __uint_as_float(b & 0x80000000u ? b & 0x7fffffffu : ~b);
}
