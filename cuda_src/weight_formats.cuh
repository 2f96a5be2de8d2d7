// Weights in any format: their layout in memory, and the product of one piece with activations.
//
// Tensor cores do the products: weights are the A operand (16 rows at a time), activations the B
// operand. Each float32 activation is split into a bf16 head and a bf16 rest, which are two columns
// of B, 2 token and 2 token + 1: 16 bits of precision are kept, and up to 4 tokens share one product.
//
// Layout of W ("fragments"): records of 16 rows x 128 columns, [row tiles][K / 128][RECORD_BYTES]. In
// a record, lane = 4 g + t holds of rows g and g + 8, and of every group of 32 columns, the 8 from
// 8 t on: pairs 0 to 3 of neighbours, the even column in the low half of a word. Codes come first:
//   W_BF16: 8 x [32 lanes][16 bytes]: group 0 of row g, group 0 of row g + 8, group 1 of row g, ...,
//           each 8 bf16 in column order
//   W_FP8:  4 x [32 lanes][16 bytes], one for each group: two words of row g, then two of row g + 8,
//           each with pairs 0 and 1, or 2 and 3
//   4 bits: 2 x [32 lanes][16 bytes]: a word for group 0 of row g, group 0 of row g + 8, group 1 of
//           row g, group 1 of row g + 8; then the same for groups 2 and 3
// A code's bits lie where unpacking takes fewest operations. Of the even column, from the sign or the
// highest bit down; those of the odd column are 16 bits on, modulo 32:
//   E2M1 (fp4, mxfp4, nvfp4): pair 0 at 15, 8, 7, 6; 1 at 21, 14, 13, 12; 2 at 9, 2, 1, 0; 3 at 11,
//           4, 3, 10
//   E4M3:   pairs 0 and 2 at 15, 10-4; 1 and 3 at 19, 14-11, 2-0
//   int4:   pair p at 4 p + 3 to 4 p
// Scales, and what else goes with the codes, follow; "rows" are g and g + 8:
//   W_FP8:       float32 [g][rows]
//   W_FP4, W_INT4, W_INT4_ASYM:  fp16 [g][group][rows]; with W_INT4_ASYM zero points u8 [g][rows][group]
//   W_MXFP4:     E8M0 [g][rows][group]
//   W_NVFP4:     E4M3 [g][half of a group][rows][group], then float32 global scales: of the even
//                rows, of the odd ones (gate and up alternate), and both once more
//
// Numerics: weights are multiplied as bf16 and are exact in it, up to their scale and a power of two;
// subnormal numbers count like all others. Activations are multiplied by ACTIVATION_SCALE, so that
// they must stay below 2^32, and finished sums by RESULT_SCALE, so that results below 2^-126
// RESULT_SCALE lose bits. The E8M0 code 0 (2^-127) counts as zero; NaN codes count as 480 (E4M3) and
// as infinite (E8M0).
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

// A operands of one group of 32 columns: pairs 0 and 1, and pairs 2 and 3.
struct Operands {
  uint4 first, second;
  __device__ __forceinline__ void multiply(float (&c)[4], const uint4& b) const {
    mma_bf16(c, first, b.x, b.y);
    mma_bf16(c, second, b.z, b.w);
  }
};
// The same, and what is added to every column of them, of either step.
struct OffsetOperands : Operands {
  uint4 offset;
  __device__ __forceinline__ void multiply(float (&c)[4], const uint4& b) const {
    mma_bf16(c, offset, b.x, b.y);
    mma_bf16(c, offset, b.z, b.w);
    Operands::multiply(c, b);
  }
};

// Weights<FORMAT>: how a lane reads one record, group after group in order.
//   RECORD_BYTES
//   ACTIVATION_SCALE[2]: of pairs 0 and 2, and of pairs 1 and 3
//   RESULT_SCALE: a weight is its operand times its scale times ACTIVATION_SCALE times RESULT_SCALE
//   GROUPS_A_SCALE: 1: each group has its scales; 4: the record has one for each row; 0: there are none
//   Weights(record, load): reads what goes with the codes
//   decode(group, load): the operands of a group
//   scale(group, load): of rows g and g + 8
//   own_scale(), where each group has its scales: the same of group t
template <int FORMAT>
struct Weights;

// Where a lane is in its record.
struct Record {
  const u8* record;
  int lane = threadIdx.x & 31, g = lane >> 2;
  __device__ __forceinline__ Record(const u8* record) : record(record) {}
  // Fewer than the 16 bytes that `load` brings.
  template <class T>
  __device__ __forceinline__ T read(int at) const {
    return *reinterpret_cast<const T*>(record + at);
  }
};

template <>
struct Weights<W_BF16> : Record {
  static constexpr int RECORD_BYTES = 4096, GROUPS_A_SCALE = 0;
  static constexpr float ACTIVATION_SCALE[2] = {1.f, 1.f}, RESULT_SCALE = 1.f;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load) : Record(record) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    uint4 v = load(record + (2 * group) * 512 + lane * 16);
    uint4 w = load(record + (2 * group + 1) * 512 + lane * 16);
    return {make_uint4(v.x, w.x, v.y, w.y), make_uint4(v.z, w.z, v.w, w.w)};
  }
  template <class Load>
  __device__ __forceinline__ float2 scale(int, Load) const { return make_float2(1.f, 1.f); }
};

// Operands are the value times 2^-120: E4M3 bits in the middle of a bf16's.
template <>
struct Weights<W_FP8> : Record {
  static constexpr int RECORD_BYTES = 2048 + 64, GROUPS_A_SCALE = 4;
  static constexpr float ACTIVATION_SCALE[2] = {0x1p96f, 0x1p96f}, RESULT_SCALE = 0x1p24f;
  float2 scales;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load)
      : Record(record), scales(read<float2>(2048 + g * 8)) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    uint4 v = load(record + group * 512 + lane * 16);
    return {make_uint4(outer(v.x), outer(v.z), inner(v.x), inner(v.z)),
            make_uint4(outer(v.y), outer(v.w), inner(v.y), inner(v.w))};
  }
  template <class Load>
  __device__ __forceinline__ float2 scale(int, Load) const { return scales; }
  static __device__ __forceinline__ u32 outer(u32 v) { return v & 0x87F087F0u; }
  static __device__ __forceinline__ u32 inner(u32 v) {
    return (__funnelshift_r(v, v, 4) & 0x87808780u) | ((v << 4) & 0x00700070u);
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

// Operands are the value times 2^-126: E2M1 bits at 15, 8, 7, 6 (a subnormal number for 0.5).
struct E2M1 : FourBits {
  static constexpr float ACTIVATION_SCALE[2] = {0x1p96f, 0x1p96f}, RESULT_SCALE = 0x1p30f;
  __device__ __forceinline__ E2M1(const u8* record) : FourBits(record) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    uint2 word = words(group, load);
    u32 v = word.x, w = word.y;
    uint2 low = front(v), high = front(w), low2 = back(v), high2 = back(w);
    return {make_uint4(low.x, high.x, low.y, high.y), make_uint4(low2.x, high2.x, low2.y, high2.y)};
  }
  // Pairs 0 and 1, or 2 and 3, of a word.
  static __device__ __forceinline__ uint2 front(u32 v) {
    constexpr u32 BITS = 0x81C081C0u;
    return make_uint2(v & BITS, __funnelshift_r(v, v, 6) & BITS);
  }
  static __device__ __forceinline__ uint2 back(u32 v) {
    return make_uint2((v << 6) & 0x81C081C0u, ((v << 4) & 0x81808180u) | ((v >> 4) & 0x00400040u));
  }
};

// fp16 scales of each group of 32.
template <class Codes>
struct HalfScales : Codes {
  static constexpr int GROUPS_A_SCALE = 1;
  uint4 scales;
  template <class Load>
  __device__ __forceinline__ HalfScales(const u8* record, Load) : Codes(record) {}
  template <class Load>
  __device__ __forceinline__ float2 scale(int group, Load load) {
    if (group == 0) scales = load(this->record + 1024 + this->g * 16);
    return floats(group == 0 ? scales.x : group == 1 ? scales.y : group == 2 ? scales.z : scales.w);
  }
  __device__ __forceinline__ float2 own_scale() const {
    return floats(this->template read<u32>(1024 + this->lane * 4));
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
      : E2M1(record), scales(read<uint2>(1024 + g * 8)) {}
  template <class Load>
  __device__ __forceinline__ float2 scale(int group, Load) const {
    return make_float2(power(scales.x, group), power(scales.y, group));
  }
  __device__ __forceinline__ float2 own_scale() const {
    int at = 1024 + g * 8 + lane % 4;
    return make_float2(power(read<u8>(at), 0), power(read<u8>(at + 4), 0));
  }
  // 2^(code - 127): the code is a float's exponent.
  static __device__ __forceinline__ float power(u32 codes, int i) {
    u32 moved = i < 3 ? codes << (23 - 8 * i) : codes >> 1;
    return __uint_as_float(moved & 0x7F800000u);
  }
};

// Each half of a group has its scale, which is multiplied into the operands; they are the value times
// 2^-119, a multiple of 2^-129.
template <>
struct Weights<W_NVFP4> : E2M1 {
  static constexpr int RECORD_BYTES = 1024 + 128 + 16, GROUPS_A_SCALE = 4;
  static constexpr float RESULT_SCALE = 0x1p23f;
  uint2 scales;
  float global_scale;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load)
      : E2M1(record), scales(read<uint2>(1024 + lane / 2 * 8)), global_scale(read<float>(1152 + lane / 4 % 2 * 4)) {}
  template <class Load>
  __device__ __forceinline__ Operands decode(int group, Load load) {
    Operands a = E2M1::decode(group, load);
    u32 low = block_scale(scales.x, group), high = block_scale(scales.y, group);
    return {scaled(a.first, low, high), scaled(a.second, low, high)};
  }
  template <class Load>
  __device__ __forceinline__ float2 scale(int, Load) const {
    return make_float2(global_scale, global_scale);
  }
  // E4M3 code i in both halves, times 2^7: bits 10-4 of a bf16 are the value times 2^-120.
  static __device__ __forceinline__ u32 block_scale(u32 codes, int i) {
    return product(__byte_perm(codes, 0, 0x4040 + i * 0x0101) << 4, 0x7F007F00u);
  }
  static __device__ __forceinline__ uint4 scaled(const uint4& a, u32 low, u32 high) {
    return make_uint4(product(a.x, low), product(a.y, high), product(a.z, low), product(a.w, high));
  }
  // Of two bf16 each.
  static __device__ __forceinline__ u32 product(u32 a, u32 b) {
    return bits(__hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b)));
  }
};

// A nibble n is as bf16 bits n 2^-133, a subnormal number, and four bits further left 16 times that,
// which the activations of pairs 1 and 3 make up for. The zero point is another product.
struct Int4 : FourBits {
  static constexpr float ACTIVATION_SCALE[2] = {0x1p96f, 0x1p92f}, RESULT_SCALE = 0x1p37f;
  __device__ __forceinline__ Int4(const u8* record) : FourBits(record) {}
  // offset: minus the zero points of rows g and g + 8, of pairs 0 and 2 and of pairs 1 and 3.
  template <class Load>
  __device__ __forceinline__ OffsetOperands decode(int group, Load load, const uint4& offset) {
    uint2 word = words(group, load);
    return {{step(word.x, word.y), step(word.x >> 8, word.y >> 8)}, offset};
  }
  static __device__ __forceinline__ uint4 step(u32 v, u32 w) {
    constexpr u32 EVEN = 0x000F000Fu, ODD = 0x00F000F0u;
    return make_uint4(v & EVEN, w & EVEN, v & ODD, w & ODD);
  }
};

template <>
struct Weights<W_INT4> : HalfScales<Int4> {
  static constexpr int RECORD_BYTES = 1024 + 128;
  using HalfScales::HalfScales;
  template <class Load>
  __device__ __forceinline__ OffsetOperands decode(int group, Load load) {
    constexpr u32 EVEN = 0x80088008u, ODD = 0x80808080u;  // -8
    return Int4::decode(group, load, make_uint4(EVEN, EVEN, ODD, ODD));
  }
};

template <>
struct Weights<W_INT4_ASYM> : HalfScales<Int4> {
  static constexpr int RECORD_BYTES = 1024 + 128 + 64;
  uint2 zeros;
  template <class Load>
  __device__ __forceinline__ Weights(const u8* record, Load load)
      : HalfScales(record, load), zeros(read<uint2>(1152 + g * 8)) {}
  template <class Load>
  __device__ __forceinline__ OffsetOperands decode(int group, Load load) {
    return Int4::decode(group, load,
                        make_uint4(minus(zeros.x, group), minus(zeros.y, group),
                                   minus(zeros.x << 4, group), minus(zeros.y << 4, group)));
  }
  // Byte i below a sign, in both halves.
  static __device__ __forceinline__ u32 minus(u32 bytes, int i) {
    return __byte_perm(bytes, 0x80u, 0x4040 + i * 0x0101);
  }
};

constexpr int SLICE = 128, TILE = 16;
constexpr int RECORD_BYTES = Weights<W_FORMAT>::RECORD_BYTES;
constexpr float EVEN_PAIR_SCALE = Weights<W_FORMAT>::ACTIVATION_SCALE[0];
constexpr float ODD_PAIR_SCALE = Weights<W_FORMAT>::ACTIVATION_SCALE[1];
constexpr float RESULT_SCALE = Weights<W_FORMAT>::RESULT_SCALE;

// Adds one record times one slice of activations. sums: rows g (x, y) and g + 8 (z, w) with the head
// and the rest of token t. b: [set of 4 tokens][group] two steps of the B operand.
// One token leaves six columns of B empty. With groups APART, the head and rest of group g are columns 2 g and
// 2 g + 1, which are zero at other groups: all groups are one run of products, scaled once, and `sums` of lane t are
// those of group t. Of these eight products each waits for the one before, so it pays with two records side by side.
template <int SETS, bool APART, int FORMAT = W_FORMAT, class Load>
__device__ __forceinline__ void multiply(float4 (&sums)[SETS], const u8* record, Load load,
                                         const uint4 (&b)[SETS][4]) {
  using Format = Weights<FORMAT>;
  constexpr bool SCALED = Format::GROUPS_A_SCALE > 0;
  constexpr int TOGETHER = APART ? 4 : SCALED ? Format::GROUPS_A_SCALE : 1;
  Format weights(record, load);
#pragma unroll
  for (int group = 0; group < 4; group += TOGETHER) {
    decltype(weights.decode(group, load)) a[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) a[i] = weights.decode(group + i, load);
    float2 scale;
    if constexpr (APART)
      scale = weights.own_scale();
    else
      scale = weights.scale(group, load);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      float4& sum = sums[set];
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      if (!SCALED) c[0] = sum.x, c[1] = sum.y, c[2] = sum.z, c[3] = sum.w;
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) a[i].multiply(c, b[set][group + i]);
      if (SCALED) {
        sum.x += scale.x * c[0], sum.y += scale.x * c[1];
        sum.z += scale.y * c[2], sum.w += scale.y * c[3];
      } else {
        sum = make_float4(c[0], c[1], c[2], c[3]);
      }
    }
  }
}
