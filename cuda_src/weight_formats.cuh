// Weights in any format: their layout in memory, and the product of one piece with activations.
//
// Tensor cores do the products: weights are the A operand (16 rows at a time), activations the B
// operand. Each float32 activation is split into a 16-bit head and a 16-bit rest, which are two
// columns of B, 2 token and 2 token + 1: precision is kept, and up to 4 tokens share one product.
//
// Layout of W ("fragments"): records of 16 rows x 128 columns, [row tiles][K / 128][RECORD_BYTES]. In
// a record, lane = 4 g + t holds of rows g and g + 8, and of every group of 32 columns, the 8 from
// 8 t on: pairs 0 to 3 of neighbours, the even column in the low half of a word. Codes come first:
//   W_BF16: 8 x [32 lanes][16 bytes]: group 0 of row g, group 0 of row g + 8, group 1 of row g, ...,
//           each 8 bf16 in column order
//   W_FP8:  4 x [32 lanes][16 bytes], one for each group: two words of row g, then two of row g + 8.
//           In half a word lie two E4M3 codes, sign and magnitude: bits 15, 13-7 (pairs 0 and 2)
//           and 14, 6-0 (1 and 3).
//   4 bits: 2 x [32 lanes][16 bytes]: a word for group 0 of row g, group 0 of row g + 8, group 1 of
//           row g, group 1 of row g + 8; then the same for groups 2 and 3. In half a word:
//     E2M1 (fp4, mxfp4, nvfp4): sign and magnitude at bits 15, 11-9 (pair 0), 12, 8-6 (1), 14, 5-3
//           (2), 13, 2-0 (3), so that pair 0 needs one operation to become fp16 and pair 1 two.
//     int4: nibble p is pair p's.
// Scales, and what else goes with the codes, follow; "rows" are g and g + 8:
//   W_FP8:       float32 [g][rows]
//   W_FP4, W_INT4, W_INT4_ASYM:  fp16 [g][group][rows]; with W_INT4_ASYM zero points u8 [g][rows][group]
//   W_MXFP4:     E8M0 [g][rows][group]
//   W_NVFP4:     E4M3 [g][half of a group][rows][group], then the float32 global scale, four times
//
// Numerics: every weight is exact in the 16 bits that are multiplied, up to its scale and a power of
// two, FORMAT_SCALE. E4M3 or E2M1 magnitude bits under fp16's sign are the value times 2^-8 or 2^-14,
// subnormals included. E2M1 times E4M3 (nvfp4) has 6 bits of mantissa. The E8M0 code 0 (2^-127)
// counts as zero; NaN codes count as 480 (E4M3) and as infinite (E8M0).
#pragma once
#include "common.cuh"

#define W_BF16 0
#define W_FP4 1
#define W_FP8 2
#define W_INT4 3
#define W_INT4_ASYM 4
#define W_MXFP4 5
#define W_NVFP4 6
#if !defined(W_FORMAT) || W_FORMAT < 0 || W_FORMAT > 6
#error "define W_FORMAT as 0 to 6: bf16, fp4, fp8, int4, int4_asym, mxfp4, nvfp4"
#endif

// What the tensor core multiplies, for one group of 32 columns: A operands of its two steps.
struct Operands {
  uint4 first, second;
};

__device__ __forceinline__ __half2 halves(u32 pair) { return *reinterpret_cast<__half2*>(&pair); }
// Fewer than the 16 bytes that `load` brings.
template <class T>
__device__ __forceinline__ T read(const u8* p) {
  return *reinterpret_cast<const T*>(p);
}

// Weights<FORMAT>: how a lane reads one record, group after group in order.
//   RECORD_BYTES
//   FORMAT_SCALE: a weight is its operand times its scale times FORMAT_SCALE
//   GROUPS_A_SCALE: 1: each group has its scales; 4: the record has one for each row
//   Weights(record, load): reads what goes with the codes
//   decode(group, load): the operands of a group
//   scale(group): of rows g and g + 8
//   multiply(c, a, b0, b1): the tensor core's product
template <int FORMAT>
struct Weights;

// Where a lane is in its record, and fp16 products.
struct Record {
  const u8* record;
  int lane = threadIdx.x & 31, g = lane >> 2;
  __device__ __forceinline__ Record(const u8* record) : record(record) {}
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    mma_f16(c, a, b0, b1);
  }
};

template <>
struct Weights<W_BF16> : Record {
  static constexpr int RECORD_BYTES = 4096, GROUPS_A_SCALE = 4;
  static constexpr float FORMAT_SCALE = 1.f;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load) : Record(record) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    uint4 v = load(record + (2 * group) * 512 + lane * 16);
    uint4 w = load(record + (2 * group + 1) * 512 + lane * 16);
    return {make_uint4(v.x, w.x, v.y, w.y), make_uint4(v.z, w.z, v.w, w.w)};
  }
  __device__ __forceinline__ float2 scale(int) const { return make_float2(1.f, 1.f); }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    mma_bf16(c, a, b0, b1);
  }
};

template <>
struct Weights<W_FP8> : Record {
  static constexpr int RECORD_BYTES = 2048 + 64, GROUPS_A_SCALE = 4;
  static constexpr float FORMAT_SCALE = 256.f;
  float2 scales;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load)
      : Record(record), scales(read<float2>(record + 2048 + g * 8)) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    uint4 v = load(record + group * 512 + lane * 16);
    return {make_uint4(outer(v.x), outer(v.z), inner(v.x), inner(v.z)),
            make_uint4(outer(v.y), outer(v.w), inner(v.y), inner(v.w))};
  }
  __device__ __forceinline__ float2 scale(int) const { return scales; }
  static __device__ __forceinline__ u32 outer(u32 v) { return v & 0xBF80BF80u; }
  static __device__ __forceinline__ u32 inner(u32 v) {
    return ((v << 1) & 0x80008000u) | ((v << 7) & 0x3F803F80u);
  }
};

// 16 bytes a lane hold the codes of two groups.
struct FourBits : Record {
  uint4 codes;
  __device__ __forceinline__ FourBits(const u8* record) : Record(record) {}
  // The words of rows g and g + 8.
  template <class Load>
  __device__ __forceinline__ uint2 words(int group, Load load) {
    if (group % 2 == 0) codes = load(record + group / 2 * 512 + lane * 16);
    return group % 2 ? make_uint2(codes.z, codes.w) : make_uint2(codes.x, codes.y);
  }
};

struct E2M1 : FourBits {
  static constexpr float FORMAT_SCALE = 16384.f;
  __device__ __forceinline__ E2M1(const u8* record) : FourBits(record) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    constexpr u32 BOTH = 0x8E008E00u, SIGN = 0x80008000u;
    uint2 word = words(group, load);
    u32 v = word.x, w = word.y;
    return {make_uint4(v & BOTH, w & BOTH, (v << 3) & BOTH, (w << 3) & BOTH),
            make_uint4((((v << 1) & SIGN) | ((v << 6) & ~SIGN)) & BOTH,
                       (((w << 1) & SIGN) | ((w << 6) & ~SIGN)) & BOTH,
                       (((v << 2) & SIGN) | ((v << 9) & ~SIGN)) & BOTH,
                       (((w << 2) & SIGN) | ((w << 9) & ~SIGN)) & BOTH)};
  }
};

// fp16 scales of each group of 32.
template <class Codes>
struct HalfScales : Codes {
  static constexpr int GROUPS_A_SCALE = 1;
  uint4 scales;
  template <class Load>
  __device__ __forceinline__ HalfScales(const u8* record, Load load)
      : Codes(record), scales(load(record + 1024 + this->g * 16)) {}
  __device__ __forceinline__ float2 scale(int group) const {
    return floats(group == 0 ? scales.x : group == 1 ? scales.y : group == 2 ? scales.z : scales.w);
  }
};

template <>
struct Weights<W_FP4> : HalfScales<E2M1> {
  static constexpr int RECORD_BYTES = 1024 + 128;
  using HalfScales::HalfScales;
};

template <>
struct Weights<W_MXFP4> : E2M1 {
  static constexpr int RECORD_BYTES = 1024 + 64, GROUPS_A_SCALE = 1;
  uint2 scales;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load)
      : E2M1(record), scales(read<uint2>(record + 1024 + g * 8)) {}
  __device__ __forceinline__ float2 scale(int group) const {
    return make_float2(power(scales.x, group), power(scales.y, group));
  }
  // 2^(code - 127): the code is a float's exponent.
  static __device__ __forceinline__ float power(u32 codes, int i) {
    u32 moved = i < 3 ? codes << (23 - 8 * i) : codes >> 1;
    return __uint_as_float(moved & 0x7F800000u);
  }
};

// Each half of a group has its scale, which is multiplied into the operands; operands are the value
// times 2^-7.
template <>
struct Weights<W_NVFP4> : E2M1 {
  static constexpr int RECORD_BYTES = 1024 + 128 + 16, GROUPS_A_SCALE = 4;
  static constexpr float FORMAT_SCALE = 128.f;
  uint2 scales;
  float global_scale;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load)
      : E2M1(record),
        scales(read<uint2>(record + 1024 + lane / 2 * 8)),
        global_scale(read<float>(record + 1152)) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    Operands a = E2M1::decode(group, load);
    __half2 low = block_scale(scales.x, group), high = block_scale(scales.y, group);
    return {scaled(a.first, low, high), scaled(a.second, low, high)};
  }
  __device__ __forceinline__ float2 scale(int) const {
    return make_float2(global_scale, global_scale);
  }
  // E4M3 code i in both halves, times 2^7: bits 13-7 of fp16 are the value times 2^-8.
  static __device__ __forceinline__ __half2 block_scale(u32 codes, int i) {
    u32 pair = __byte_perm(codes, 0, 0x0404 + i * 0x1010) >> 1;
    return __hmul2(halves(pair), halves(0x78007800u));
  }
  static __device__ __forceinline__ uint4 scaled(const uint4& a, __half2 low, __half2 high) {
    return make_uint4(bits(__hmul2(halves(a.x), low)), bits(__hmul2(halves(a.y), high)),
                      bits(__hmul2(halves(a.z), low)), bits(__hmul2(halves(a.w), high)));
  }
};

// Operands are 2^-9 times nibble less zero point. As fp16 bits a nibble n is the subnormal n 2^-24,
// and four bits further left n 2^-20.
struct Int4 : FourBits {
  static constexpr float FORMAT_SCALE = 512.f;
  __device__ __forceinline__ Int4(const u8* record) : FourBits(record) {}
  // low, high: -2^-9 times the zero points of rows g and g + 8, in both halves.
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load, __half2 low, __half2 high) {
    uint2 word = words(group, load);
    return {step(word.x, word.y, low, high), step(word.x >> 8, word.y >> 8, low, high)};
  }
  static __device__ __forceinline__ uint4 step(u32 v, u32 w, __half2 low, __half2 high) {
    return make_uint4(first(v, low), first(w, high), second(v, low), second(w, high));
  }
  static __device__ __forceinline__ u32 first(u32 v, __half2 offset) {
    return bits(__hfma2(halves(v & 0x000F000Fu), halves(0x78007800u), offset));  // times 2^15
  }
  static __device__ __forceinline__ u32 second(u32 v, __half2 offset) {
    return bits(__hfma2(halves(v & 0x00F000F0u), halves(0x68006800u), offset));  // times 2^11
  }
};

template <>
struct Weights<W_INT4> : HalfScales<Int4> {
  static constexpr int RECORD_BYTES = 1024 + 128;
  using HalfScales::HalfScales;
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    __half2 offset = halves(0xA400A400u);  // -2^-9 times 8
    return Int4::decode(group, load, offset, offset);
  }
};

template <>
struct Weights<W_INT4_ASYM> : HalfScales<Int4> {
  static constexpr int RECORD_BYTES = 1024 + 128 + 64;
  uint2 zeros;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load load)
      : HalfScales(record, load), zeros(read<uint2>(record + 1152 + g * 8)) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    return Int4::decode(group, load, offset(zeros.x, group), offset(zeros.y, group));
  }
  static __device__ __forceinline__ __half2 offset(u32 bytes, int i) {
    u32 zero = __byte_perm(bytes, 0, 0x4040 + i * 0x0101);  // byte i in both halves
    return __hmul2(halves(zero), halves(0xF800F800u));      // times -2^15
  }
};

constexpr int SLICE = 128, TILE = 16;
constexpr int RECORD_BYTES = Weights<W_FORMAT>::RECORD_BYTES;
constexpr float FORMAT_SCALE = Weights<W_FORMAT>::FORMAT_SCALE;

// Sums of one record times one slice of activations for rows g and g + 8 (low, high) and the two
// columns of token t (x head, y rest). b: [set of 4 tokens][group] two steps of the B operand.
struct Sums {
  float2 low, high;
};
template <int SETS, class Load>
__device__ __forceinline__ void multiply(Sums (&sums)[SETS], const u8* record, Load load,
                                         const uint4 (&b)[SETS][4], const float (&undo)[SETS]) {
  using Format = Weights<W_FORMAT>;
  Format weights(record, load);
  float4 total[SETS] = {};
  float c[SETS][4] = {};
#pragma unroll
  for (int group = 0; group < 4; group++) {
    Operands a = weights.decode(group, load);
    bool ends = (group + 1) % Format::GROUPS_A_SCALE == 0;  // of what the scales are for
    float2 scale = ends ? weights.scale(group) : make_float2(0.f, 0.f);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      float(&p)[4] = c[set];
      Format::multiply(p, a.first, b[set][group].x, b[set][group].y);
      Format::multiply(p, a.second, b[set][group].z, b[set][group].w);
      if (!ends) continue;
      if (Format::GROUPS_A_SCALE == 4) {
        total[set] = make_float4(scale.x * p[0], scale.x * p[1], scale.y * p[2], scale.y * p[3]);
      } else {
        total[set].x += scale.x * p[0], total[set].y += scale.x * p[1];
        total[set].z += scale.y * p[2], total[set].w += scale.y * p[3];
      }
      p[0] = p[1] = p[2] = p[3] = 0.f;
    }
  }
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    sums[set].low.x += undo[set] * total[set].x, sums[set].low.y += undo[set] * total[set].y;
    sums[set].high.x += undo[set] * total[set].z, sums[set].high.y += undo[set] * total[set].w;
  }
}
