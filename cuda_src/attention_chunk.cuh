// Chunks of 16 tokens of one KV head, as warps bring them into shared memory, each into places of its own.
//
// A place: CHUNK rows of K and of V, then the scales of K, of V, and the zero points of K, of V. The pieces of 16
// bytes of a row are turned, so that the same piece of 8 rows in a line lies on different banks.
// Macros, numerics: attention.cu.
#pragma once
#include "new_token.cuh"

constexpr int CHUNK = 16, TEAM = D / 32;
constexpr int V_AT = CHUNK * K_ROW, K_SCALES_AT = V_AT + CHUNK * V_ROW;
constexpr int V_SCALES_AT = K_SCALES_AT + CHUNK * K_SCALE_ROW, K_ZEROS_AT = V_SCALES_AT + CHUNK * V_SCALE_ROW;
constexpr int V_ZEROS_AT = K_ZEROS_AT + CHUNK * K_ZERO_ROW;
constexpr int PLACE_BYTES = (V_ZEROS_AT + CHUNK * V_ZERO_ROW + 127) / 128 * 128;
// Where piece `piece` of row `row` is, of rows of ROW bytes: the same piece of eight rows in a line, or of every
// second of all, lies on different banks. And, from such a place, where the piece is that is `pieces` further in
// the row, if they have no bit in common, and, from an even row, the same piece of the next.
template <int ROW>
__device__ __forceinline__ int piece_at(int row, int piece) {
  if (ROW >= 128) return row * ROW + (piece ^ row / 2 ^ row % 2 * 4) * 16;
  constexpr int ROWS = 128 / ROW;  // of a line
  return row / ROWS * 128 + ((row % ROWS * (ROW / 16) + piece) ^ row / ROWS % 8) * 16;
}
__device__ __forceinline__ int further(int at, int pieces) {
  return (at ^ pieces % 8 * 16) + pieces / 8 * 128;
}
template <int ROW>
__device__ __forceinline__ int next_row(int at) {
  return ROW < 128 ? at ^ ROW : (at ^ 64) + ROW;
}
// What a lane copies of a chunk's scales, or of its zero points: of K_BYTES a token for keys, which are copied to
// K_TO in a place, and V_BYTES for values; the first 16 lanes those of keys. Rows of a chunk on one page are in a line.
template <int K_BYTES, int V_BYTES, int K_TO, int V_TO>
struct SmallRows {
  const u8* from;  // the lane's first bytes on page 0
  SharedAt to;     // and in a warp's first place
  static __device__ __forceinline__ constexpr int unit(int bytes) { return bytes < 4 ? 4 : bytes; }
  static __device__ __forceinline__ bool values() { return (threadIdx.x & 31) >= CHUNK; }
  __device__ __forceinline__ SmallRows(const u8* k, const u8* v, size_t first, SharedAt places) {
    if constexpr (K_BYTES + V_BYTES == 0) return;
    int at = threadIdx.x % CHUNK;
    from = kept(values() ? v + first * V_BYTES + at * unit(V_BYTES) : k + first * K_BYTES + at * unit(K_BYTES));
    to = kept(places + (values() ? V_TO + at * unit(V_BYTES) : K_TO + at * unit(K_BYTES)));
  }
  // Of the chunk that begins with the row-th row of all pages, to the place that is `at` bytes on.
  __device__ __forceinline__ void fetch(int at, u32 row) const {
    if constexpr (K_BYTES == V_BYTES) {
      fetch_bytes<K_BYTES>(true, at, row);
    } else {
      fetch_bytes<K_BYTES>(!values(), at, row);
      fetch_bytes<V_BYTES>(values(), at, row);
    }
  }
  // Of rows that may be on several pages; page: of token first + lane % CHUNK. Rows of less than 4 bytes are copied
  // at once.
  __device__ __forceinline__ void fetch_row(const u8* k, const u8* v, const Pages& pages, SharedAt places, int first,
                                            int limit, int page) const {
    int r = threadIdx.x % CHUNK;
    if (r >= limit) return;
    size_t row = pages.row(page, first + r);
    if (values())
      copy_row<V_BYTES>(places + (V_TO + r * V_BYTES), v + row * V_BYTES);
    else
      copy_row<K_BYTES>(places + (K_TO + r * K_BYTES), k + row * K_BYTES);
  }

 private:
  template <int BYTES>
  __device__ __forceinline__ void fetch_bytes(bool own, int at, u32 row) const {
    if constexpr (BYTES > 0)
      if (own && (BYTES >= 4 || threadIdx.x % CHUNK * 4 < CHUNK * BYTES))
        async_copy<unit(BYTES)>(to + at, from + static_cast<size_t>(row) * BYTES);
  }
  template <int BYTES>
  static __device__ __forceinline__ void copy_row(SharedAt to, const u8* from) {
    if constexpr (BYTES >= 4)
      async_copy<BYTES>(to, from);
    else
#pragma unroll
      for (int i = 0; i < BYTES; i++) in_shared<u8>(to)[i] = __ldcg(from + i);
  }
};
typedef SmallRows<K_SCALE_ROW, V_SCALE_ROW, K_SCALES_AT, V_SCALES_AT> ScaleRows;
typedef SmallRows<K_ZERO_ROW, V_ZERO_ROW, K_ZEROS_AT, V_ZEROS_AT> ZeroRows;

// What a lane copies of a chunk on one page: pieces of 16 bytes, 512 bytes apart, and scales and zero points. Where
// the pieces are on page 0, and in a warp's first place; those of values are V_AT further on.
struct LaneShare {
  const u8 *k, *v;
  SharedAt k_to, v_to;
  ScaleRows scales;
  ZeroRows zeros;
  __device__ __forceinline__ LaneShare(const Pages& pages, SharedAt places)
      : scales(pages.k_scales, pages.v_scales, pages.row(0, 0), places),
        zeros(pages.k_zeros, pages.v_zeros, pages.row(0, 0), places) {
    int lane = threadIdx.x & 31;
    size_t first = pages.row(0, 0);
    k = kept(pages.k_codes + first * K_ROW + lane * 16), v = kept(pages.v_codes + first * V_ROW + lane * 16);
    k_to = kept(places + piece_at<K_ROW>(lane / (K_ROW / 16), lane % (K_ROW / 16)));
    v_to = K_ROW == V_ROW ? k_to : kept(places + piece_at<V_ROW>(lane / (V_ROW / 16), lane % (V_ROW / 16)));
  }
};
// Starts copying CHUNK rows of ROW bytes, the first the row-th of all pages, to `beyond` bytes behind `to`; rows
// behind the last token as well.
template <int ROW>
__device__ __forceinline__ void fetch_whole(SharedAt to, int beyond, const u8* from, u32 row) {
  from += static_cast<size_t>(row) * ROW;
#pragma unroll
  for (int i = 0; i < CHUNK * ROW / 512; i++)
    async_copy<16>(to.turned(i * (256 / ROW) % 8 * 16) + (beyond + i * 512), from + i * 512);
}
// Starts copying `limit` rows of ROW bytes that may be on several pages. page: of token first + lane % CHUNK.
template <int ROW>
__device__ __forceinline__ void fetch_rows(SharedAt to, const u8* from, const Pages& pages, int first, int limit,
                                           int page) {
  constexpr int PIECES_A_ROW = ROW / 16;
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < CHUNK * PIECES_A_ROW / 32; i++) {
    int at = i * 32 + lane, token = at / PIECES_A_ROW, c = at % PIECES_A_ROW;
    size_t row = pages.row(__shfl_sync(ALL_LANES, page, token), first + token);
    if (token < limit) async_copy<16>(to + piece_at<ROW>(token, c), from + row * ROW + c * 16);
  }
}

// Starts copying the tokens [first, first + CHUNK) below `end` to the place that is `at` bytes on. page: theirs, or
// that of token first + lane % CHUNK. Only rows of tokens below `end` mean anything there.
__device__ __forceinline__ void fetch_chunk(const LaneShare& mine, const Pages& pages, SharedAt places, int at,
                                            int first, int end, int page) {
  if constexpr (PAGE % CHUNK == 0) {
    u32 row = static_cast<u32>(page) * (KV_HEADS * PAGE) + static_cast<u32>(first) % PAGE;
    fetch_whole<K_ROW>(mine.k_to + at, 0, mine.k, row);
    fetch_whole<V_ROW>(mine.v_to + at, V_AT, mine.v, row);
    mine.scales.fetch(at, row), mine.zeros.fetch(at, row);
  } else {
    int limit = end - first;
    fetch_rows<K_ROW>(places + at, pages.k_codes, pages, first, limit, page);
    fetch_rows<V_ROW>(places + (at + V_AT), pages.v_codes, pages, first, limit, page);
    mine.scales.fetch_row(pages.k_scales, pages.v_scales, pages, places + at, first, limit, page);
    mine.zeros.fetch_row(pages.k_zeros, pages.v_zeros, pages, places + at, first, limit, page);
  }
}

// The i-th word of row r, of rows of ROW bytes.
template <int ROW>
__device__ __forceinline__ u32* word_of(u8* rows, int r, int i) {
  return reinterpret_cast<u32*>(rows + piece_at<ROW>(r, i / 4)) + i % 4;
}

// Puts the new token into row r of a place.
__device__ __forceinline__ void take_new_token(u8* place, int r, const NewToken& token) {
  int lane = threadIdx.x & 31;
  for (int i = lane; i < K_ROW / 4; i += 32)
    *word_of<K_ROW>(place, r, i) = reinterpret_cast<const u32*>(token.k)[i];
  for (int i = lane; i < V_ROW / 4; i += 32)
    *word_of<V_ROW>(place + V_AT, r, i) = reinterpret_cast<const u32*>(token.v)[i];
  if (lane < K_SCALE_ROW) place[K_SCALES_AT + r * K_SCALE_ROW + lane] = token.k_scales[lane];
  if (lane < V_SCALE_ROW) place[V_SCALES_AT + r * V_SCALE_ROW + lane] = token.v_scales[lane];
  if (lane < K_ZERO_ROW) place[K_ZEROS_AT + r * K_ZERO_ROW + lane] = token.k_zeros[lane];
  if (lane < V_ZERO_ROW) place[V_ZEROS_AT + r * V_ZERO_ROW + lane] = token.v_zeros[lane];
}

// Clears what could be NaN of the values from row r on: behind the end is whatever lay there.
__device__ __forceinline__ void clear_values(u8* place, int r) {
  int lane = threadIdx.x & 31;
#pragma unroll 1
  for (; r < CHUNK; r++) {
    if (lane < V_SCALE_ROW) place[V_SCALES_AT + r * V_SCALE_ROW + lane] = 0;
    for (int i = lane; !V_SCALED && i < V_ROW / 4; i += 32) *word_of<V_ROW>(place + V_AT, r, i) = 0;
  }
}
