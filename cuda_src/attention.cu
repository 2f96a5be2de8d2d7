// One token a sequence: q/k norm, rotary, K and V into their page, paged attention over the context.
//
//   out[s][h] = sum_j softmax_j(scale q[s][h] . k[j]) v[j],   j < seq_lens[s]
//
// of the last `window` tokens where WINDOWED; a head's sink is one more score, without a value.
//
//   out       float32 [seqs][HEADS][D]           out
//   projected float32 [seqs][(HEADS + 2 KV_HEADS) D]   in: rows of q, then k, then v
//   q_norm, k_norm float32 [D] or null           in: RMS norm of each head
//   cos_sin   float2 [max_positions][D / 2]      in: rotary factors
//   k_codes, v_codes   pages [num_pages][KV_HEADS][PAGE][D], bf16 or codes   in and out
//   k_scales, v_scales, k_zeros, v_zeros   [num_pages][KV_HEADS][PAGE][D / KV_GROUP] or null, as the formats have
//             them: see kv_formats.cuh        in and out
//   block_table int32 [seqs][max_pages]; seq_lens int32 [seqs], the new token counted   in
//   sinks     float32 [HEADS] or null            in
//   partial   float32 [seqs][HEAD_GROUPS][CLUSTER][splits / CLUSTER][QUADS][8]   scratch, words EMPTY; left so: of each
//             cluster's share of four outputs the sums, their level and weight, and padding; see Record
//   arrived   u32 [seqs][HEAD_GROUPS][CLUSTER], zero; left zero     scratch, if not SCATTERED
//   max_pages, window int32; eps, scale float32
// store_kv does the first part alone, q/k norm and rotary of the new key and K and V into their page;
// attention with FUSED 0 then reads them there like all others. So several new tokens of one sequence
// can be rows of one step, each with its own length.
// Grid of store_kv: (2 KV_HEADS, seqs) blocks of D / 2 threads, keys first.
// Grid of attention: (splits, HEAD_GROUPS, seqs) blocks of 32 WARPS threads, splits a multiple of
// CLUSTER. A group is the query heads of one KV head, or, of more than 8, an equal part of them. A split takes the next ceil(len / splits) tokens, rounded up to CHUNK, at
// least LEAST (or twice that, where one cluster would not do); its warps take turns at chunks of CHUNK
// tokens, which it brings by asynchronous copies, STAGES ahead, into shared memory. It scores a chunk, and
// tells the weights to its team of D / 32 warps, of which each mixes 32 elements of the values of all their
// chunks, while it scores the next. Each team then writes its sums into the shared memory of its
// cluster's blocks, to each the outputs that it combines. Where there are several clusters a head, they hand
// over their shares, and each combines a part of the outputs, or, unless SCATTERED, the last to be that far all.
// Dynamic shared memory: WARPS STAGES PLACE_BYTES; PLACE_BYTES as npmoe/models/attention_split.py counts:
// CHUNK rows of K and of V, and their scales.
// Macros: HEADS, KV_HEADS, HEAD_DIM (D: 64 or 128), PAGE (tokens a page), K_FORMAT, V_FORMAT,
// KV_GROUP (16, 32, 64, or 128 in heads of 128), CLUSTER (1, 2, 4 or 8), WARPS (multiples of D / 32, up to 16), STAGES (2 or more), LEAST (a
// multiple of 16), FUSED (1, or 0: the new tokens are in their pages), SCATTERED (1, or 0: not all blocks of
// the grid run at once), ROTATED (0, or 1: q, k and v are multiplied by a Hadamard matrix, and so is out), WINDOWED (0 or
// 1).
// Alignment: 16 bytes everywhere.
// Numerics: tensor-core products of exact codes with q split in a 16-bit head and rest, or, of more than
// four heads over quantised keys, in fp16; weights split likewise over bf16 values, times scales in fp16 over
// quantised values; float32 sums, key scales applied in float32; chunks of a team in order, then the teams of a
// cluster, helpers' shares in order and then by a butterfly, then clusters.
// Limits: scales of values below 8,188, of int8 127.9 and of fp8 31.9 (values of 16,000 and 14,000), since 2^(LIFT +
// SLACK) times that must fit fp16; of mxfp4 values above 2^-14, or weights lose
// bits; nvfp4 keys and values up to 448 times 6: beyond they are clipped.
#include "new_token.cuh"

#if PAGE < 1 || (CLUSTER & (CLUSTER - 1)) || CLUSTER > 8
#error "attention needs PAGE 1 or more, and CLUSTER 1, 2, 4 or 8"
#endif
#if WARPS < 1 || WARPS > 16 || WARPS % (HEAD_DIM / 32) != 0
#error "attention needs WARPS in multiples of HEAD_DIM / 32, up to 16"
#endif
#if STAGES < 2 || LEAST < 16 || LEAST % 16 != 0
#error "attention needs STAGES 2 or more and LEAST a multiple of 16"
#endif
#if !defined(FUSED) || (FUSED != 0 && FUSED != 1) || !defined(SCATTERED) || (SCATTERED != 0 && SCATTERED != 1)
#error "define FUSED and SCATTERED as 0 or 1"
#endif

#include "attention_combine.cuh"

extern "C" __global__ void __launch_bounds__(32 * PIECES)
store_kv(const float* projected, const float* __restrict__ k_norm,
         const float2* __restrict__ cos_sin, u8* k_codes, u8* k_scales, u8* k_zeros, u8* v_codes,
         u8* v_scales, u8* v_zeros, const int* block_table, const int* seq_lens, int max_pages, float eps) {
  __shared__ __align__(16) NewToken unused;
  int seq = blockIdx.y, length = __ldcg(seq_lens + seq);
  Pages pages = {k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros,
                 block_table + static_cast<size_t>(seq) * max_pages,
                 static_cast<int>(blockIdx.x) % KV_HEADS};
  const HeadFactors factors(k_norm, cos_sin + static_cast<size_t>(length - 1) * (D / 2));
  launch_next();  // attention reads nothing before its own wait
  grid_wait();
  store_new(projected + static_cast<size_t>(seq) * (HEADS + 2 * KV_HEADS) * D, pages, length,
            blockIdx.x < KV_HEADS, threadIdx.x / 32, factors, k_norm, eps, unused);
}
CPU_KERNEL(store_kv)

#if CLUSTER > 1 && !defined(CUDA_CPU)
#define CLUSTER_BOUNDS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_BOUNDS
#endif

extern "C" __global__ void CLUSTER_BOUNDS __launch_bounds__(THREADS, WARPS > 8 ? 2 : 16 / WARPS)
attention(float* __restrict__ out, const float* projected, const float* __restrict__ q_norm,
          const float* __restrict__ k_norm, const float2* __restrict__ cos_sin, u8* k_codes, u8* k_scales,
          u8* k_zeros, u8* v_codes, u8* v_scales, u8* v_zeros, const int* block_table, const int* seq_lens,
          const float* __restrict__ sinks, float* partial, u32* arrived, int max_pages, int window, float eps,
          float scale) {
  SHARED_MEMORY(shared);
  __shared__ __align__(16) Gathered gathered;
  __shared__ uint4 q_operands[Query::OPERANDS][32];
  __shared__ Weighed told[TEAMS][2];
  __shared__ __align__(16) NewToken new_token;
  __shared__ Inbox inbox;
  __shared__ bool combines;
  STAMP(0);
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, t = lane & 3, g = lane >> 2;
  int group = blockIdx.y, seq = blockIdx.z, splits = gridDim.x;

  // Lengths, tables and older tokens do not depend on the kernel before: fetch them early.
  int length = __ldcg(seq_lens + seq);
  int lowest = WINDOWED ? max(length - window, 0) : 0, base = lowest / CHUNK * CHUNK, span = length - base;
  int least = span > CLUSTER * LEAST ? 2 * LEAST : LEAST;  // a second cluster costs a microsecond
  int each = max(((span + splits - 1) / splits + CHUNK - 1) / CHUNK * CHUNK, least);
  int active = (span + each - 1) / each;
  int clusters = (active + CLUSTER - 1) / CLUSTER, cluster = blockIdx.x / CLUSTER;
  int begin = base + min(static_cast<int>(blockIdx.x) * each, span), end = min(begin + each, length);
  bool newest = FUSED && begin < end && end == length;
  int older = newest ? end - 1 : end;  // what is in the pages already
  Pages pages = {k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros,
                 block_table + static_cast<size_t>(seq) * max_pages, group / HEAD_PARTS};
  if (!FUSED) {  // the pages are what the kernel before writes
    launch_next();
    grid_wait();
  }
  // A warp's place of stage s is the (s WARPS + warp)-th.
  const SharedAt shared_at = shared, places_at = shared + warp * PLACE_BYTES;
  const LaneShare lane_share(pages, places_at);
  // This warp's next chunk begins at `first`, the one after it STRIDE further on.
  constexpr int STRIDE = WARPS * CHUNK;
  int first = begin + warp * CHUNK;
  // Where the table names the page of a chunk; its address is counted up where that is possible.
  constexpr bool COUNTED = PAGE % CHUNK == 0 && STRIDE % PAGE == 0;
  const int* entry = pages.table + first / PAGE;
  auto page_of = [&](int chunk) {
    int token = PAGE % CHUNK ? chunk + lane % CHUNK : chunk;  // a chunk begins at a multiple of CHUNK
    if (!COUNTED) entry = pages.table + token / PAGE;
    int found = token < older ? __ldg(entry) : 0;
    entry += STRIDE / PAGE;
    return found;
  };
  auto fetch = [&](int at, int chunk, int page) {
    if (chunk < older) fetch_chunk(lane_share, pages, places_at, at, chunk, older, page);
    async_commit();
  };
  int page[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; s++) page[s] = page_of(first + s * STRIDE);
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s * WARPS * PLACE_BYTES, first + s * STRIDE, page[s]);
  int page_ahead = page[STAGES - 1];
  const float2* turns = cos_sin + static_cast<size_t>(length - 1) * (D / 2);
  const HeadFactors q_factors(q_norm, turns), k_factors(k_norm, turns);
  STAMP(1);
  if (FUSED) {
    launch_next();  // output reads nothing but weights before its own wait
    grid_wait();
  }
  STAMP(3);
  if (cluster >= clusters) {
    STAMP(7);
    return;
  }

  const float* mine = projected + static_cast<size_t>(seq) * (HEADS + 2 * KV_HEADS) * D;
#pragma unroll 1
  for (int task = warp; newest && task < 2 * PIECES; task += WARPS)
    store_new(mine, pages, length, task < PIECES, task % PIECES, k_factors, k_norm, eps, new_token,
              group % HEAD_PARTS == 0);
  // The other warps take the query heads, two at a time, where there are enough of them.
  constexpr int STORING = WARPS > 2 * PIECES ? 2 * PIECES : 0;
  int workers = newest ? WARPS - STORING : WARPS, worker = WARPS - 1 - warp;
#pragma unroll 1
  for (int h = worker; worker < workers && h < 8; h += 2 * workers) {
    float v[2][D / 32] = {};
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (h + k * workers < RATIO) load_head(v[k], mine + (group * RATIO + h + k * workers) * D);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int head = h + k * workers;
      if (head >= 8) break;
      if (head < RATIO) {
        turn_head(v[k], q_factors, q_norm, eps);
        if (ROTATED) hadamard<32>(v[k]);
      }
#pragma unroll
      for (int i = 0; i < D / 32; i++)
        gathered.q[head][i / 2 * 64 + 2 * lane + i % 2] = v[k][i] * (scale * LOG2_E);
    }
  }
  __syncthreads();
  STAMP(4);
#pragma unroll 1
  for (int i = warp; i < Query::OPERANDS; i += WARPS)
    q_operands[i][lane] = query_operand(i / (D / 32), i % (D / 32), gathered.q);
  if (tid == 0) inbox.open();
  __syncthreads();
  cluster_announce();  // from here on its blocks may write to `received`

  int team = warp / TEAM, member = warp % TEAM;
  int team_first = begin + team * TEAM * CHUNK;  // where the first of the team's next chunks begins
  constexpr int STAGE = WARPS * PLACE_BYTES, TURN = sizeof(Weighed);
  Weigher weigher(places_at, q_operands, told[team][0], member, lowest, end);
  Mixer mixer(shared_at + team * TEAM * PLACE_BYTES, told[team][0], member);
  // The next chunk has come: what it needs besides.
  auto complete_chunk = [&](int chunk, int at) {
    if (chunk + CHUNK < end) return;
    u8* here = in_shared<u8>(places_at + at);
    if (newest && chunk < end) take_new_token(here, end - 1 - chunk, new_token);
    clear_values(here, max(end - chunk, 0));
    __syncwarp();
  };
  bool busy = team_first < end;
  if (busy) {
    async_wait<STAGES - 2>();
    __syncwarp();
    complete_chunk(first, 0);
    if (first < end)
      weigher.settle(weigher.weigh(first, 0, 0), 0, 0);
    else
      weigher.weigh_nothing(0);
    if (team_first + STRIDE >= end) weigher.tell_total(0);
  }
  int at = 0, turn = 0;  // of the stage that the team mixes next, and of what it is told
#pragma unroll 1
  for (; team_first < end; team_first += STRIDE) {
    int now = turn, following = at == (STAGES - 1) * STAGE ? 0 : at + STAGE;
    turn = TURN - turn;
    sync_team(team, 32 * TEAM);
    Weights weights[TEAM];
    mixer.take(weights, now);
    const Weighed& told_now = weigher.to(now);
    Weighed::Raised raised_now = told_now.raised;
    fetch(at ? at - STAGE : (STAGES - 1) * STAGE, first + (STAGES - 1) * STRIDE, page_ahead);
    page_ahead = page_of(first + STAGES * STRIDE);
    first += STRIDE;
    u32 raised = 0;
    for (u32 one : raised_now.of) raised |= one;
    if (raised) {
      mixer.follow(told_now, raised_now, weights);
      weigher.follow(told_now, raised_now);
    }
    bool more = team_first + STRIDE < end;
    if (more) {
      async_wait<STAGES - 2>();
      __syncwarp();
      complete_chunk(first, following);
    }
    const Values values(mixer.values, at);
    if (first < end) {  // in one piece, so that they are done together
      bool higher = weigher.weigh(first, following, turn);
      mix(mixer.sums, values, weights);
      weigher.settle(higher, following, turn);
    } else {
      if (more) weigher.weigh_nothing(turn);
      mix(mixer.sums, values, weights);
    }
    if (more && team_first + 2 * STRIDE >= end) weigher.tell_total(turn);
    at = following;
  }
  async_wait<0>();
  STAMP(5);

  int rank = cluster_rank();
  u32* counter = arrived + (seq * HEAD_GROUPS + group) * CLUSTER + rank;
  u32 arrived_before = 0;
  if (!SCATTERED && tid == 0 && clusters > 1) arrived_before = atomicAdd(counter, 1u);
  float total = member == 0 && busy ? mixer.total(weigher.to(TURN - turn)) : 0.f;
  cluster_wait();
  Received& received = gathered.received;
  give_sums(received, inbox, rank * TEAMS + team, member, mixer.sums);
  if (member == 0) give_weight(received, inbox, rank * TEAMS + team, mixer.reached, total);
  if (tid == 0) {
    combines = arrived_before == static_cast<u32>(clusters - 1);
    if (!SCATTERED && combines && clusters > 1) *counter = 0;
    inbox.expect(received_bytes(rank));
  }
  inbox.wait();
  STAMP(6);
  float* results = out + (static_cast<size_t>(seq) * HEADS + group * RATIO) * D;
  const float* sink = sinks ? sinks + group * RATIO : nullptr;
  auto finish = [&](int quad, const Share& share) { write_outputs(results, rank * QUADS + quad, share, sink); };
  size_t first_record = ((static_cast<size_t>(seq) * HEAD_GROUPS + group) * CLUSTER + rank) * (splits / CLUSTER);
  Record* records = reinterpret_cast<Record*>(partial) + first_record * QUADS;
  if (clusters == 1) {
    combine_teams(received, rank, finish);
  } else {
    combine_teams(received, rank,
                  [&](int quad, const Share& share) { records[cluster * QUADS + quad].hand_over_share(share); });
    int begin = SCATTERED ? QUADS * cluster / clusters : 0;
    int end = SCATTERED ? QUADS * (cluster + 1) / clusters : combines ? QUADS : 0;
    combine_clusters(records, clusters, begin, end, finish);
  }
  STAMP(7);
}
CPU_KERNEL_OF(attention, SCATTERED ? sizes[0] : CLUSTER, CLUSTER)
