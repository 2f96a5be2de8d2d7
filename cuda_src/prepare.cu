// A weight matrix as a checkpoint stores it -> the records that the decode kernels read.
//
//   records[e][tile][slice] = the layout of weight_formats.cuh of Q(w[e]), 16 rows x 128 columns
//   Q: nothing where SOURCE is W_FORMAT; else fp4 from bf16. A group of 32 gets the fp16 scale
//      amax / 6 or amax / 4, whichever has the smaller squared error (the first on a tie), and the
//      nearest codes.
//
//   records  u8    [experts][tiles][slices][RECORD_BYTES]   out
//   flags    int32 [1]                          in and out: |= 1 for NaN or infinity, |= 2 for a
//                                               scale beyond fp16; left alone where Q is nothing
//   codes    bf16  [experts][rows][columns]     in, where SOURCE is W_BF16
//            u8    [experts][rows][columns / 2] in, where it is W_FP4, low nibble first
//   scales   fp16  [experts][rows][columns / 32]   in for W_FP4, null for W_BF16
//   rows     int32; with PAIRED, gate rows and then as many up rows, which alternate in the records
//   columns, slices (of a record's row; the last may hold zeros) int32
// Grid: (ceil(slices / 4), tiles, experts) blocks of 128 threads, a warp a record. Rows past the last
// (with PAIRED: pairs) and columns past the last become zeros.
// Macros: SOURCE W_BF16 (0) or W_FP4 (1); W_FORMAT the same or W_FP4; PAIRED 0 or 1.
// Alignment: records and codes 16 bytes, scales 2; columns a multiple of 8, where fp4 is involved of 32.
// Numerics: float32, every operation rounded; the bits of npmoe.formats.fp4.encode_fp4.
#include "kv_formats.cuh"
#include "weight_formats.cuh"

#if !defined(SOURCE) || (SOURCE != W_FORMAT && SOURCE != W_BF16) || SOURCE > W_FP4 || \
    W_FORMAT > W_FP4
#error "prepare makes W_BF16 or W_FP4 of the same, and W_FP4 of SOURCE W_BF16"
#endif
#if !defined(PAIRED) || (PAIRED != 0 && PAIRED != 1)
#error "define PAIRED as 0 or 1"
#endif

constexpr int PREPARE_WARPS = 4, GROUP = 32;
constexpr float LARGEST_HALF = 65504.f;

// Where row r of the records lies in the source; `rows` if it is padding.
__device__ __forceinline__ int source_row(int r, int rows) {
#if PAIRED
  int pairs = rows / 2, i = r / 2;
  return i < pairs ? r % 2 * pairs + i : rows;
#else
  return min(r, rows);
#endif
}

// Eight E2M1 codes, column i at bit 4 i, as the word that `multiply` unpacks.
__device__ __forceinline__ u32 fragment_word(u32 nibbles) {
  // Of pairs 0 to 3, the even column: sign, exponent, mantissa; the odd one's are 16 bits on.
  constexpr int PLACES[4][4] = {{15, 8, 7, 6}, {21, 14, 13, 12}, {9, 2, 1, 0}, {11, 4, 3, 10}};
  u32 word = 0;
#pragma unroll
  for (int column = 0; column < 8; column++) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      word |= (nibbles >> (4 * column + 3 - i) & 1u) << (PLACES[column / 2][i] + column % 2 * 16) % 32;
  }
  return word;
}

// The sum over a group of 32 in the order of npmoe.formats.fp4._fold; four lanes hold it.
__device__ __forceinline__ float fold(const float (&square)[8]) {
  float pair[4];
#pragma unroll
  for (int p = 0; p < 4; p++) {
    float v = __fadd_rn(square[2 * p], square[2 * p + 1]);
    v = __fadd_rn(v, __shfl_xor_sync(ALL_LANES, v, 2));
    pair[p] = __fadd_rn(v, __shfl_xor_sync(ALL_LANES, v, 1));
  }
  return __fadd_rn(__fadd_rn(pair[0], pair[2]), __fadd_rn(pair[1], pair[3]));
}

// Quantises a group of 32, of which this lane and its three neighbours hold 8 each.
__device__ __forceinline__ void encode_group(const uint4& eight, u32& nibbles, __half& scale,
                                             int& flag) {
  const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
  float x[8], amax = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 b = i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16;
    if ((b & 0x7f800000u) == 0x7f800000u) flag |= 1;
    x[i] = __uint_as_float(b);
    amax = fmaxf(amax, fabsf(x[i]));
  }
  amax = group_max(amax, 4);
  if (__fdiv_rn(amax, 4.f) > LARGEST_HALF) flag |= 2;
  float least = 0.f;
#pragma unroll 1
  for (int top = 6; top >= 4; top -= 2) {
    __half stored = __float2half_rn(__fdiv_rn(amax, static_cast<float>(top)));
    float s = __half2float(stored), square[8];
    u32 packed = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 code = encode_e2m1(s > 0.f ? __fdiv_rn(x[i], s) : 0.f);
      float off = __fsub_rn(__fmul_rn(e2m1_value(code), s), x[i]);
      square[i] = __fmul_rn(off, off);
      packed |= code << 4 * i;
    }
    float loss = fold(square);
    if (top == 6 || loss < least) nibbles = packed, scale = stored, least = loss;
  }
}

extern "C" __global__ void __launch_bounds__(32 * PREPARE_WARPS)
prepare(u8* __restrict__ records, int* flags, const u8* __restrict__ codes,
        const __half* __restrict__ scales, int rows, int columns, int slices) {
  grid_wait();
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int slice = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32;
  if (slice >= slices) return;
  size_t tile = static_cast<size_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  u8* record = records + (tile * slices + slice) * RECORD_BYTES;
  size_t first = static_cast<size_t>(blockIdx.z) * rows;
  int row[2];
#pragma unroll
  for (int half = 0; half < 2; half++) row[half] = source_row(blockIdx.y * TILE + half * 8 + g, rows);
#if W_FORMAT == W_FP4
  u32 words[4][2];
  __half kept[2];
  int flag = 0;
#endif
#pragma unroll
  for (int group = 0; group < 4; group++) {
    int column = slice * SLICE + group * GROUP + 8 * t;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      bool inside = row[half] < rows && column < columns;
      size_t at = (first + row[half]) * columns + column;
#if SOURCE == W_BF16
      uint4 eight = inside ? load_stream(codes + 2 * at) : make_uint4(0, 0, 0, 0);
#endif
#if W_FORMAT == W_BF16
      *reinterpret_cast<uint4*>(record + ((group * 2 + half) * 32 + lane) * 16) = eight;
#elif SOURCE == W_BF16
      u32 nibbles = 0;
      __half scale = __float2half_rn(0.f);
      encode_group(eight, nibbles, scale, flag);
      words[group][half] = fragment_word(nibbles);
      if (group == t) kept[half] = scale;
#else
      u32 nibbles = inside ? *reinterpret_cast<const u32*>(codes + at / 2) : 0;
      words[group][half] = fragment_word(nibbles);
      if (group == t)
        kept[half] = inside ? scales[at / GROUP] : __float2half_rn(0.f);
#endif
    }
  }
#if W_FORMAT == W_FP4
#pragma unroll
  for (int pair = 0; pair < 2; pair++)
    *reinterpret_cast<uint4*>(record + pair * 512 + lane * 16) =
        make_uint4(words[2 * pair][0], words[2 * pair][1], words[2 * pair + 1][0],
                   words[2 * pair + 1][1]);
  *reinterpret_cast<__half2*>(record + 1024 + lane * 4) = __halves2half2(kept[0], kept[1]);
  if (flag) atomicOr(flags, flag);
#endif
}
CPU_KERNEL(prepare)
