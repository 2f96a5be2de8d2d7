// The matrix-vector core of qkv, output, experts and lm_head: up to 8 tokens, any weight format.
//
//   y[token][row] = sum_k W[row][k] x[token][k]
//
// Layout of W and the products: weight_formats.cuh.
// With BULK, weights pass through a ring of STAGES chunks in shared memory. A chunk is a run of
// records that follow one another in memory: one of the PARTS of a row tile (of one expert, in the
// experts' down projection).
// Numerics: bf16 products; float32 sums over a group on the tensor core, then groups in order, or, with
// groups apart, slices in order and then the four groups by a butterfly; then the warps of a block: FINISHERS
// runs of them in order, then those by a butterfly.
#pragma once
#include "hadamard.cuh"
#include "weight_formats.cuh"

#if !defined(BATCH) || !defined(STAGES)
#error "define BATCH and STAGES"
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef RESIDENT
#define RESIDENT 0  // 1: the ring holds every chunk of a block, nothing is fetched a second time
#endif
#ifndef WARPS
#define WARPS 16
#endif
#ifndef PAIRED
#define PAIRED 0  // 1: two tiles share what is read of the activations; not across two batches
#endif
#ifndef ROLLING
#define ROLLING 0  // slices of a warp's window through which activations pass; one token, one batch
#endif
#ifndef BUFFERS
#define BUFFERS 1  // 2: the sums of one batch are finished while the next is multiplied
#endif
#if BATCH < 1 || STAGES < 1 || PARTS < 1 || WARPS < 1 || WARPS > 32 || (WARPS > 2 && WARPS % 4)
#error "BATCH, STAGES and PARTS are 1 or more, WARPS is 1, 2 or a multiple of 4 up to 32"
#endif
// Where the ring goes round, a warp of its own keeps it full.
constexpr int PRODUCERS = BULK && !RESIDENT, THREADS = 32 * WARPS, BLOCK_THREADS = THREADS + 32 * PRODUCERS;
constexpr int FINISHERS = WARPS < 4 ? WARPS : 4;  // lanes that add up one output
constexpr int ABREAST = PAIRED ? 2 : 1;  // tiles side by side

__device__ __forceinline__ uint4 load_shared(const u8* p) { return *reinterpret_cast<const uint4*>(p); }

// How a block multiplies its row tiles.
//   SLICES: K / 128 of a chunk. CHUNKS: chunks a tile; x has 128 SLICES CHUNKS columns a token.
//   MAX_TOKENS: 1..8. NORM: multiply x by `norm` [columns] and sum its squares.
//   STAGED_TOKENS: if not 0, of so many tokens, all of which are staged, each tile picks up to MAX_TOKENS, at most 4.
//   TOGETHER, SIDE_BY_SIDE, WINDOW, SETS_OF_SUMS: what the macros BATCH, ABREAST, ROLLING and BUFFERS say.
template <int SLICES_, int CHUNKS_, int MAX_TOKENS_, bool NORM_, int TOGETHER_ = BATCH,
          int SIDE_BY_SIDE_ = ABREAST, int WINDOW_ = ROLLING, int SETS_OF_SUMS_ = BUFFERS, int STAGED_TOKENS_ = 0>
struct Pass {
  static constexpr int SLICES = SLICES_, CHUNKS = CHUNKS_, MAX_TOKENS = MAX_TOKENS_, TOGETHER = TOGETHER_;
  static constexpr int SIDE_BY_SIDE = SIDE_BY_SIDE_, WINDOW = WINDOW_, SETS_OF_SUMS = SETS_OF_SUMS_;
  static constexpr bool NORM = NORM_, PICKED = STAGED_TOKENS_ > 0;
  static constexpr int STAGED_TOKENS = PICKED ? STAGED_TOKENS_ : MAX_TOKENS;
  // Groups apart: see `multiply`.
  static constexpr bool APART = Weights<W_FORMAT>::GROUPS_A_SCALE == 1 && MAX_TOKENS == 1 && SIDE_BY_SIDE == 2;
  static constexpr int ALL = SLICES * CHUNKS, SETS = (MAX_TOKENS + 3) / 4;
  static constexpr int EACH = (ALL + WARPS - 1) / WARPS;  // slices of a warp
  static constexpr int AT_ONCE = WINDOW ? WINDOW : EACH < 1 ? 1 : EACH < 6 ? EACH : 4;  // SLICES may be 0: not launched
  // Whether a slice that a warp comes to, so many at a time, is one of ALL: the compiler sees where all are.
  static __device__ __forceinline__ bool has(int slice, int at_a_time) {
    return (STAGED_TOKENS == 1 && ALL % WARPS == 0 && EACH % at_a_time == 0) || slice < ALL;
  }
  static constexpr int SLICE_STEP = 2 * STAGED_TOKENS * 16;  // of staged activations
  static constexpr int STAGED = (WINDOW ? WARPS * AT_ONCE : ALL) * SLICE_STEP;
  static constexpr int CHUNK_BYTES = SLICES * RECORD_BYTES;
  // Of which tile chunk c is, in the order of use: of tiles side by side each in turn.
  static __device__ __forceinline__ int tile_of(int c) {
    return c / (SIDE_BY_SIDE * CHUNKS) * SIDE_BY_SIDE + c % SIDE_BY_SIDE;
  }
  static_assert(TOGETHER % SIDE_BY_SIDE == 0, "a batch is of whole pairs");
  static_assert(!WINDOW || STAGED_TOKENS == 1, "a window is of one token's slices");
  static_assert(!PICKED || MAX_TOKENS <= 4, "a tile picks one set");
};

#if BULK
// Chunks in shared memory. full, empty: a barrier of each place. place, phase: of the next chunk for the
// warps that multiply.
struct Ring {
  unsigned char* start;
  Barrier full, empty;
  int place = 0;
  u32 phase = 0;
};
#else
struct Ring {};
#endif

// Activations that the kernel before has written: 4 columns a lane of one slice. Heads of ROTATED elements, if that is
// not 0, are multiplied by a Hadamard matrix.
#ifndef ROTATED
#define ROTATED 0
#endif
struct Plain {
  static constexpr bool LATER_PASS = false;  // a pass after another
  typedef float4 Loaded;
  const float* x;
  int slices;
  __device__ __forceinline__ float4 load(int token, int slice) const {
    size_t at = static_cast<size_t>(token) * slices + slice;
    return __ldcg(reinterpret_cast<const float4*>(x + at * SLICE) + (threadIdx.x & 31));
  }
  __device__ __forceinline__ float4 confirmed(float4 v, int, int) const {
#if ROTATED
    float four[4] = {v.x, v.y, v.z, v.w};
    hadamard<ROTATED / 4>(four);
    v = make_float4(four[0], four[1], four[2], four[3]);
#endif
    return v;
  }
};

// Activations that blocks of this kernel hand over; one token.
struct HandedOver {
  static constexpr bool LATER_PASS = true;
  typedef uint4 Loaded;
  const float* x;
  __device__ __forceinline__ const float* at(int slice) const {
    return x + slice * SLICE + (threadIdx.x & 31) * 4;
  }
  __device__ __forceinline__ uint4 load(int, int slice) const { return look_at_four(at(slice)); }
  __device__ __forceinline__ float4 confirmed(const uint4& v, int, int slice) const {
    return take_over_four(v, at(slice));
  }
};

// Multiplies by the warps that do; P: a Pass.
//   work: shared memory for activations, their squares and sums. PLACE_BYTES: from one place of the ring to
//   the next. tiles: this block's number.
//   source: load(token, slice) asks for activations, confirmed(v, token, slice) gives what it brought; where tokens
//   are PICKED, token(j, i) is the i-th of those that its j-th tile picks, some token for i past them.
//   loaded(): called when this warp has asked for its first activations, ahead of weights, behind which they
//   would queue. ask(): when they are staged.
//   chunk(j, k): chunk k of its j-th tile.
//   done(j, row, token, sum, sum_squares, mine): called by whole warps; FINISHERS neighbouring lanes
//   bring the same output, the first of them with `mine`; rows of a tile follow one another. Where tokens are PICKED,
//   `token` counts those of the tile, up to MAX_TOKENS, however many it picks.
template <class P, int PLACE_BYTES, class Source, class Loaded, class Ask, class ChunkAt, class Done>
__device__ __forceinline__ void multiply_tiles(unsigned char* work, Ring& ring, int tiles, int tokens,
                                               Source source, const float* norm, Loaded loaded, Ask ask,
                                               ChunkAt chunk, Done done) {
  constexpr int SLICES = P::SLICES, CHUNKS = P::CHUNKS, MAX_TOKENS = P::MAX_TOKENS, ALL = P::ALL;
  constexpr int SETS = P::SETS, EACH = P::EACH, AT_ONCE = P::AT_ONCE, SLICE_STEP = P::SLICE_STEP;
  constexpr int SIDE_BY_SIDE = P::SIDE_BY_SIDE, TOGETHER = P::TOGETHER;
  constexpr bool NORM = P::NORM, WINDOW = P::WINDOW > 0;
  // Records of a chunk that a warp has, at least and at most.
  constexpr int LEAST = SLICES / WARPS, MOST = (SLICES + WARPS - 1) / WARPS;
  // With few slices a warp's activations stay in registers.
  constexpr bool HOLD = !WINDOW && !P::PICKED && EACH * SETS <= (PRODUCERS ? 2 : 1) && (LEAST == MOST || EACH == 1);
  constexpr int HELD = HOLD ? EACH : 1;
  u32 thread = Source::LATER_PASS ? kept(threadIdx.x) : threadIdx.x;  // computes anew what takes registers to keep
  int lane = thread & 31, warp = thread >> 5;
  // [slice][2 tokens][t][group]: 16 bytes, two steps of a group, of column 2 token + (0 head, 1
  // rest). Groups are turned so that lanes that read together are on different banks.
  uint4* staged = reinterpret_cast<uint4*>(work);
  float* squares = reinterpret_cast<float*>(staged + P::STAGED);
  float* partial = squares + WARPS * P::STAGED_TOKENS;  // [SETS_OF_SUMS][TOGETHER][WARPS][MAX_TOKENS][TILE]
  constexpr int BATCH_FLOATS = TOGETHER * WARPS * MAX_TOKENS * TILE;

  // Staging: lane l brings columns 4 l to 4 l + 3 of a slice, which are one step of one group.
  // A token takes ROUNDS rounds, each of AT_ONCE slices a warp; those of DEPTH rounds are asked for at a time.
  constexpr int ROUNDS = (EACH + AT_ONCE - 1) / AT_ONCE;
  constexpr bool NO_REGISTERS = !BULK || (WARPS > 8 && (AT_ONCE > 2 || !PRODUCERS));
  constexpr int DEPTH = P::STAGED_TOKENS == 1 || NO_REGISTERS ? 1 : PRODUCERS && (WARPS <= 8 || P::PICKED) ? 4 : 2;
  typename Source::Loaded q[DEPTH][AT_ONCE];
  float4 factor[ROUNDS == 1 ? 1 : DEPTH][AT_ONCE];
  auto load = [&](int token, int n, int d) {  // activations of the n-th and following of a warp's slices
#pragma unroll
    for (int s = 0; s < AT_ONCE; s++) {
      int slice = warp + (n + s) * WARPS;
      if (P::has(slice, AT_ONCE)) {
        q[d][s] = source.load(token, slice);
        if (NORM && (ROUNDS > 1 || token == 0))
          factor[ROUNDS == 1 ? 0 : d][s] = __ldg(reinterpret_cast<const float4*>(norm + slice * SLICE) + lane);
      }
    }
  };
  int rounds = WINDOW ? 1 : tokens * ROUNDS;
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (d == 0 || d < rounds) load(d / ROUNDS, d % ROUNDS * AT_ONCE, d);
  loaded();
  int column = lane >> 2, t = lane & 3;  // of B; results are those of token t
  int part = lane / 2 % 4, group = lane / 8 ^ part >> 1;
  u64* heads = reinterpret_cast<u64*>(staged + part * 4 + group) + lane % 2;
  u64* rests = reinterpret_cast<u64*>(staged + 16 + part * 4 + (group ^ 2)) + lane % 2;
  float square = 0.f;
  auto stage = [&](int token, int n, int d) {  // what load(token, n, d) brought
#pragma unroll
    for (int s = 0; s < AT_ONCE; s++) {
      int slice = warp + (n + s) * WARPS;
      if (P::has(slice, AT_ONCE)) {
        float4 v = source.confirmed(q[d][s], token, slice);
        if (NORM) {
          const float4& f = factor[ROUNDS == 1 ? 0 : d][s];
          square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
          v.x *= f.x, v.y *= f.y, v.z *= f.z, v.w *= f.w;
        }
        v.x *= EVEN_PAIR_SCALE, v.y *= EVEN_PAIR_SCALE;
        v.z *= ODD_PAIR_SCALE, v.w *= ODD_PAIR_SCALE;
        u32 first = bits(__floats2bfloat162_rn(v.x, v.y));
        u32 second = bits(__floats2bfloat162_rn(v.z, v.w));
        u32 rest = bits(__floats2bfloat162_rn(v.x - __uint_as_float(first << 16),
                                              v.y - __uint_as_float(first & 0xffff0000u)));
        u32 rest2 = bits(__floats2bfloat162_rn(v.z - __uint_as_float(second << 16),
                                               v.w - __uint_as_float(second & 0xffff0000u)));
        int at = ((WINDOW ? warp * AT_ONCE + s : slice) * SLICE_STEP + token * 32) * 2;
        heads[at] = static_cast<u64>(second) << 32 | first;
        rests[at] = static_cast<u64>(rest2) << 32 | rest;
      }
    }
  };
  auto keep_squares = [&](int token) {
    if (NORM) {
      square = warp_sum(square);
      if (lane == 0) squares[warp * P::STAGED_TOKENS + token] = square;
    }
  };
  if (!WINDOW) {
#pragma unroll 1
    for (int first = 0; first < rounds; first += DEPTH)
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        int round = first + d, token = round / ROUNDS, next = round + DEPTH;
        if (round >= rounds) break;
        if (round % ROUNDS == 0) square = 0.f;
        stage(token, round % ROUNDS * AT_ONCE, d);
        if (next < rounds) load(next / ROUNDS, next % ROUNDS * AT_ONCE, d);
        if (round % ROUNDS == ROUNDS - 1) keep_squares(token);
      }
  }
  __syncwarp();  // a warp reads only what it staged itself
  ask();
  STAMP(2);
#if !BULK
  __syncthreads();  // every warp asks chunk()
#endif

  const uint4* const first_home = staged + column % 2 * 16 + t * 4;
  const uint4* home = first_home + (P::APART || P::PICKED ? 0 : column / 2 * 32);
  int turn = t >> 1 ^ column % 2 * 2;
  typedef uint4 Slice[SETS][4];  // the B operand of a slice
  auto take = [&](Slice& b, int place) {
#pragma unroll
    for (int set = 0; set < SETS; set++)
      if (P::APART || P::PICKED || set * 8 + column < 2 * tokens)
#pragma unroll
        for (int g = 0; g < 4; g++) {
          const uint4* operand = home + place * SLICE_STEP + set * 128 + (g ^ turn);
          if (P::APART)
            load_shared_if(column / 2 == g, b[set][g], operand);
          else
            b[set][g] = *operand;
        }
  };
  Slice b[HELD] = {};
#pragma unroll
  for (int e = 0; e < HELD; e++)
    if (HOLD && P::has(warp + e * WARPS, 1)) take(b[e], warp + e * WARPS);
  auto keep = [&](const float4(&sums)[SETS], float* results, int batch) {
    if (P::APART) {  // four lanes have a group each: the first gets row g of all, the second row g + 8
      float low = sums[0].x + sums[0].y, high = sums[0].z + sums[0].w;
      float sum = (t % 2 ? high : low) + __shfl_xor_sync(ALL_LANES, t % 2 ? low : high, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      if (t < 2) results[(batch * WARPS + warp) * TILE + column + 8 * t] = sum * RESULT_SCALE;
      return;
    }
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      int token = set * 4 + t;
      if (token < MAX_TOKENS) {
        float* at = results + ((batch * WARPS + warp) * MAX_TOKENS + token) * TILE + column;
        at[0] = (sums[set].x + sums[set].y) * RESULT_SCALE;
        at[8] = (sums[set].z + sums[set].w) * RESULT_SCALE;
      }
    }
  };
  // Where a block has one batch and all of it is in shared memory, addresses are constants.
  constexpr bool UNROLLED = RESIDENT && SIDE_BY_SIDE == 1 && !WINDOW && TOGETHER * EACH <= 8 &&
                            TOGETHER * CHUNKS >= STAGES && (HOLD || MAX_TOKENS == 1);
#if BULK
  constexpr int PAIR = HOLD ? 2 : 1;  // tiles at a time: what one waits for, the other hides
  auto resident_record = [&](int j, int u) {
    return ring.start + (j * CHUNKS + u / SLICES) * PLACE_BYTES + u % SLICES * RECORD_BYTES;
  };
  if (UNROLLED) {
#pragma unroll
    for (int j = 0; j < (UNROLLED ? TOGETHER : 0); j += PAIR) {
      float4 sums[PAIR][SETS] = {};
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        int u = warp + e * WARPS;
        if (P::has(u, 1)) {
          if (!HOLD) take(b[0], u);
#pragma unroll
          for (int i = 0; i < PAIR; i++)
            if (j + i < TOGETHER && j + i < tiles) barrier_wait(ring.full + (j + i) * CHUNKS + u / SLICES, 0);
#pragma unroll
          for (int i = 0; i < PAIR; i++)
            if (j + i < TOGETHER && j + i < tiles)
              multiply<SETS, P::APART>(sums[i], resident_record(j + i, u), load_shared, b[HOLD ? e : 0]);
        }
      }
#pragma unroll
      for (int i = 0; i < PAIR; i++)
        if (j + i < TOGETHER && j + i < tiles) keep(sums[i], partial, j + i);
    }
  }
#endif
#pragma unroll 1
  for (int next = UNROLLED ? max(tiles - SIDE_BY_SIDE, 0) : 0; next < tiles; next += SIDE_BY_SIDE) {
    int last = next + SIDE_BY_SIDE - 1, batch = last % TOGETHER;  // a batch ends with tiles side by side
    float* results = partial + last / TOGETHER % P::SETS_OF_SUMS * BATCH_FLOATS;
    if (!UNROLLED) {
      if constexpr (P::PICKED) home = first_home + source.token(next, P::APART ? 0 : column / 2) * 32;
      float4 sums[SIDE_BY_SIDE][SETS] = {};
      int l = warp;  // this warp's next record of the chunk
      int staged_slices = 0, used_slices = 0;  // of the window
      auto use = [&](int part) {  // chunk `part` of the tiles side by side
#if BULK
        int places[SIDE_BY_SIDE];
#pragma unroll
        for (int i = 0; i < SIDE_BY_SIDE; i++) {
          places[i] = ring.place;
          barrier_wait(ring.full + ring.place, ring.phase);
          ring.place++;
          if (!RESIDENT && ring.place == STAGES) ring.place = 0, ring.phase ^= 1;
        }
#endif
#pragma unroll(LEAST == MOST ? MOST : 1)
        for (int e = 0; e < MOST; e++)
          if (e < LEAST || l < SLICES) {
            int at = HOLD && EACH > 1 ? part * LEAST + e : 0;
            if (WINDOW) {
              if (used_slices == staged_slices) {
                __syncwarp();
                stage(0, staged_slices, 0);
                staged_slices += AT_ONCE;
                __syncwarp();
                if (staged_slices < EACH) load(0, staged_slices, 0);  // while these are multiplied
              }
              take(b[0], warp * AT_ONCE + used_slices++ % AT_ONCE);
            } else if (!HOLD) {
              take(b[0], part * SLICES + l);
            }
#pragma unroll
            for (int i = 0; i < SIDE_BY_SIDE; i++) {
#if BULK
              const u8* record = ring.start + places[i] * PLACE_BYTES + l * RECORD_BYTES;
              multiply<SETS, P::APART>(sums[i], record, load_shared, b[at]);
#else
              multiply<SETS, P::APART>(sums[i], chunk(next + i, part) + l * RECORD_BYTES, load_stream, b[at]);
#endif
            }
            if (SLICES != WARPS) l += WARPS;
          }
        if (SLICES != WARPS) l -= SLICES;
#if BULK
        if (!RESIDENT) {
          __syncwarp();
          if (lane == 0)
#pragma unroll
            for (int i = 0; i < SIDE_BY_SIDE; i++) barrier_arrive(ring.empty + places[i]);
        }
#endif
      };
#pragma unroll(HOLD ? CHUNKS : 1)
      for (int part = 0; part < CHUNKS; part++) use(part);
      if (WINDOW) keep_squares(0);
#pragma unroll
      for (int i = 0; i < SIDE_BY_SIDE; i++) keep(sums[i], results, batch - SIDE_BY_SIDE + 1 + i);
    }
    if (batch == TOGETHER - 1 || last == tiles - 1) {
      STAMP(5);
      sync_threads(THREADS);
      STAMP(6);
      int share = lane % FINISHERS, outputs = (batch + 1) * MAX_TOKENS * TILE;
#pragma unroll 1
      for (int first = warp * 32 / FINISHERS; first < outputs; first += THREADS / FINISHERS) {
        int i = min(first + lane / FINISHERS, outputs - 1);  // whole warps: they shuffle
        int which = i / (MAX_TOKENS * TILE), at = i % (MAX_TOKENS * TILE), token = at / TILE;
        int staged_token = token;
        if constexpr (NORM && P::PICKED) staged_token = source.token(last - batch + which, token);
        float total = 0.f, square = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w += FINISHERS) {
          total += results[(which * WARPS + w + share) * MAX_TOKENS * TILE + at];
          if (NORM) square += squares[(w + share) * P::STAGED_TOKENS + staged_token];
        }
#pragma unroll
        for (int o = FINISHERS / 2; o; o >>= 1) {
          total += __shfl_xor_sync(ALL_LANES, total, o);
          if (NORM) square += __shfl_xor_sync(ALL_LANES, square, o);
        }
        bool mine = share == 0 && (P::PICKED || token < tokens) && first + lane / FINISHERS < outputs;
        done(last - batch + which, at % TILE, token, total, square, mine);
      }
      // The next batch's barrier comes before these floats are written again, if it has its own.
      if (P::SETS_OF_SUMS == 1 && last < tiles - 1) sync_threads(THREADS);
    }
  }
}

#if BULK
__device__ __forceinline__ void init_ring(const Ring& ring) {  // by one warp
  for (int i = threadIdx.x & 31; i < STAGES; i += 32)
    barrier_init(ring.full + i, 1), barrier_init(ring.empty + i, WARPS);
  barrier_init_done();
}
// Asks for chunk c of a pass.
template <class P, int PLACE_BYTES, class ChunkAt>
__device__ __forceinline__ void fetch_chunk(const Ring& ring, int place, int c, ChunkAt chunk) {
  int part = c % (P::SIDE_BY_SIDE * P::CHUNKS) / P::SIDE_BY_SIDE;
  bulk_copy(ring.start + place * PLACE_BYTES, chunk(P::tile_of(c), part), P::CHUNK_BYTES, ring.full + place);
}
#endif

// Streams a block's row tiles through its warps, which share the slices of K between them.
//   EARLY: fetch before grid_wait (the addresses depend on no kernel that may still run).
//   HASTY: let the next kernel begin before this one's predecessor has ended: it reads nothing but
//   weights before its own grid_wait.
//   shared: dynamic shared memory; npmoe/models/stream.py computes its size.
//   waited(): called by every thread when the kernel before has ended.
//   ready(): called by one warp (choose experts, say); if EARLY before the first chunk().
//   known(j): waits until chunk() may be called for tile j.
//   settled(): unless EARLY, called by each multiplying warp before its first product.
//   P, tiles, x, norm, chunk, done: as for multiply_tiles.
template <class P, bool EARLY, bool HASTY, class Waited, class Ready, class Known, class Settled,
          class ChunkAt, class Done>
__device__ __forceinline__ void stream_tiles(unsigned char* shared, int tiles, const float* x,
                                             int tokens, const float* norm, Waited waited, Ready ready,
                                             Known known, Settled settled, ChunkAt chunk, Done done) {
  static_assert(BULK || !RESIDENT, "only a ring can hold all chunks");
  STAMP(0);
  if (HASTY && !PRODUCERS) launch_next();  // with a producer later: as early as this costs it 2 %
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if BULK
  u64* barriers = reinterpret_cast<u64*>(shared + STAGES * P::CHUNK_BYTES);
  Ring ring = {shared, barriers, barriers + STAGES};
  shared = reinterpret_cast<unsigned char*>(barriers + 2 * STAGES);
  if (warp == 0) init_ring(ring);
  auto fetch = [&](int c) { fetch_chunk<P, P::CHUNK_BYTES>(ring, RESIDENT ? c : c % STAGES, c, chunk); };
#else
  Ring ring;
#endif
  constexpr int LEADER = PRODUCERS ? WARPS : 0;  // the warp that keeps the ring full, or the first
  int wanted = BULK ? min(STAGES, tiles * P::CHUNKS) : 0;  // chunks at first
  auto begin = [&] {
    ready();
    __syncwarp();
  };
  // Asking takes its time: every warp asks for some chunks, but one that is busy with ready().
  auto ask = [&] {
#if BULK
    constexpr int BUSY = EARLY || PRODUCERS || WARPS == 1 ? 0 : 1;
    for (int c = warp - BUSY; c >= 0 && c < wanted; c += WARPS - BUSY) {
      known(P::tile_of(c));
      if (lane == 0) fetch(c);
    }
#endif
  };
  auto ask_late = [&] {
    if (EARLY) return;
    ask();
    settled();
  };
  auto loaded = [&] {
    if (!EARLY && warp == LEADER) begin();
  };
  if (P::NORM) {
#pragma unroll
    for (int s = 0; s < P::EACH; s++)
      if (EARLY && warp + s * WARPS < P::ALL) prefetch(norm + (warp + s * WARPS) * SLICE + lane * 4);
  }
  if (EARLY && warp == LEADER) begin();
  __syncthreads();  // the ring's barriers are there
  if (EARLY && warp < WARPS) ask();
  STAMP(1);
  if (HASTY && PRODUCERS) launch_next();
  grid_wait();
  if (!HASTY) launch_next();
  STAMP(3);
  waited();
#if BULK
  if (PRODUCERS && warp == LEADER) {
    if (!EARLY) begin();
    __syncwarp();
    if (lane == 0)
#pragma unroll 1
      for (int c = STAGES; c < tiles * P::CHUNKS; c++) {
        barrier_wait(ring.empty + c % STAGES, (c / STAGES - 1) & 1);
        fetch(c);
      }
    return;
  }
#endif
  multiply_tiles<P, P::CHUNK_BYTES>(shared, ring, tiles, tokens, Plain{x, P::ALL}, norm, loaded, ask_late,
                                    chunk, done);
  STAMP(7);
}

// Blocks take tiles so many side by side: block b the b-th, then gridDim.x further on, and so on. How
// many of `all` row tiles (a multiple of that) this one has, and its j-th.
template <int SIDE_BY_SIDE = ABREAST>
__device__ __forceinline__ int own_tiles(int all) {
  int first = blockIdx.x, stride = gridDim.x, count = all / SIDE_BY_SIDE;
  return count > first ? ((count - first - 1) / stride + 1) * SIDE_BY_SIDE : 0;
}
template <int SIDE_BY_SIDE = ABREAST>
__device__ __forceinline__ int own_tile(int j) {
  return (blockIdx.x + j / SIDE_BY_SIDE * gridDim.x) * SIDE_BY_SIDE + j % SIDE_BY_SIDE;
}

// With one token: value(row) of the row for which this thread will be asked to finish a tile of the first batch.
template <class P, class Value>
__device__ __forceinline__ float row_ahead(Value value, int row_tiles) {
  static_assert(P::TOGETHER * TILE * FINISHERS <= THREADS, "a thread finishes one row of a batch");
  int at = threadIdx.x / FINISHERS, tile = own_tile<P::SIDE_BY_SIDE>(at / TILE);
  bool mine = at < P::TOGETHER * TILE && tile < row_tiles;
  return mine ? value(tile * TILE + at % TILE) : 0.f;
}
