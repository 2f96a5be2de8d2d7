// All inline PTX, and what differs between a GPU and the CPU that runs these kernels in tests.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Programmatic dependent launch (sm_90 and later): a kernel may begin before its predecessor has
// ended. grid_wait returns when the predecessor's writes are visible; before it a kernel may read
// only what older kernels wrote. launch_next lets the successor begin.
__device__ __forceinline__ void grid_wait() {
#if defined(CUDA_CPU)
  cpu::grid_wait();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_next() {
#if defined(CUDA_CPU)
  cpu::launch_next();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Words that blocks hand to others which run already, of their launch or of the next: EMPTY until they
// are written, as a float a NaN that no arithmetic makes. Where blocks of one launch wait for each
// other, all must run at once, and each looks at the words themselves: one word that all look at is slower.
constexpr u32 EMPTY = 0xffffffffu;
__device__ __forceinline__ void hand_over(u32* to, u32 word) {
#ifdef CUDA_CPU
  memcpy(to, &word, sizeof word);
#else
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
#endif
}
__device__ __forceinline__ void hand_over(float* to, float v) {
  u32 word = __float_as_uint(v);
  hand_over(reinterpret_cast<u32*>(to), word == EMPTY ? 0x7fffffffu : word);
}
__device__ __forceinline__ void hand_over(float4* to, const float4& v) {
  u32 words[4] = {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
  for (u32& word : words)
    if (word == EMPTY) word = 0x7fffffffu;
#ifdef CUDA_CPU
  memcpy(to, words, sizeof words);
#else
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
#endif
}
__device__ __forceinline__ uint4 look_at_four(const void* from) {  // some may be EMPTY
  uint4 v;
#ifdef CUDA_CPU
  memcpy(&v, from, sizeof v);
#else
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
#endif
  return v;
}
__device__ __forceinline__ bool complete(const uint4& v) {
  return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY;
}
__device__ __forceinline__ void let_others_run() {  // on a GPU they do
#ifdef CUDA_CPU
  cpu::poll();
#endif
}
__device__ __forceinline__ u32 look(const u32* from) {  // it may be EMPTY
  u32 word;
#ifdef CUDA_CPU
  word = *from;
#else
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
#endif
  return word;
}
// What stands there once it is written.
__device__ __forceinline__ u32 take_over(const u32* from) {
  u32 word;
  while ((word = look(from)) == EMPTY) let_others_run();
  return word;
}
__device__ __forceinline__ float4 four_floats(const uint4& v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
// `seen`, or what stands there once all four are written.
__device__ __forceinline__ float4 take_over_four(uint4 seen, const void* from) {
  for (; !complete(seen); seen = look_at_four(from)) let_others_run();
  return four_floats(seen);
}
__device__ __forceinline__ void empty_four(float4* at) {
  *reinterpret_cast<uint4*>(at) = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
}

// With STAMPS (bench/timeline.py), the first thread of each block notes when it passes STAMP(0) to
// STAMP(7), in nanoseconds; STAMP(0) begins a launch, STAMP(7) ends it.
#ifdef STAMPS
constexpr int STAMP_BLOCKS = 256, STAMP_LAUNCHES = 128;
extern "C" {
__device__ u64 stamps[STAMP_BLOCKS * STAMP_LAUNCHES * 8];
__device__ u32 stamp_launches[STAMP_BLOCKS];
}
__device__ __forceinline__ void stamp(int i) {
  __shared__ u32 launch;  // read once: a load waits behind the weights that were asked for
  u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x || block >= STAMP_BLOCKS) return;
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  if (i == 0) launch = stamp_launches[block];
  stamps[(block * STAMP_LAUNCHES + launch % STAMP_LAUNCHES) * 8 + i] = now;
  if (i == 7) stamp_launches[block] = launch + 1;
}
#define STAMP(i) stamp(i)
#else
#define STAMP(i)
#endif

// Weights come through shared memory by bulk copies where the hardware has them (BULK, sm_90 and
// later; the CPU imitates them); elsewhere they are read from global memory directly.
#ifndef BULK
#define BULK 0
#endif

#ifndef CUDA_CPU
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
// 16 bytes that are read once: no room in L1.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// 16 bytes of shared memory if `there`; else v stays. The compiler would branch.
__device__ __forceinline__ void load_shared_if(bool there, uint4& v, const uint4* p) {
  asm volatile("{ .reg .pred there; setp.ne.u32 there, %4, 0;\n"
               "@there ld.shared.v4.u32 {%0,%1,%2,%3}, [%5]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "r"(static_cast<u32>(there)), "r"(static_cast<u32>(__cvta_generic_to_shared(p)))
               : "memory");
}
// Brings the line of an address into L2, without a register to wait for.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
// c[16 x 8] += a[16 x 16] b[16 x 8]: lane = 4 g + t holds a rows g, g + 8 at columns 2t, 2t + 1 (a0,
// a1) and 2t + 8, 2t + 9 (a2, a3); b column g at the same rows (b0, b1); c rows g (c0, c1) and g + 8
// (c2, c3) at columns 2t, 2t + 1.
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
// A place in shared memory, hidden from the compiler, which would compute it anew for every use.
struct SharedAt {
  u32 address;
  SharedAt() = default;
  __device__ __forceinline__ SharedAt(const void* p) : address(shared_address(p)) {
    asm volatile("" : "+r"(address));
  }
  __device__ __forceinline__ SharedAt operator+(int bytes) const {
    SharedAt moved = *this;
    moved.address += bytes;
    return moved;
  }
  // Where the bits of `bytes` are, below 128, the other way round: of a place in a line of 128 bytes.
  __device__ __forceinline__ SharedAt turned(int bytes) const {
    SharedAt moved = *this;
    moved.address ^= bytes;
    return moved;
  }
};
template <class T>
__device__ __forceinline__ T* in_shared(SharedAt at) {
  return static_cast<T*>(__cvta_shared_to_generic(at.address));
}
// A pointer, a place or a number hidden likewise, which stays in registers.
template <class T>
__device__ __forceinline__ T* kept(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}
__device__ __forceinline__ SharedAt kept(SharedAt at) {
  asm volatile("" : "+r"(at.address));
  return at;
}
__device__ __forceinline__ int kept(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
// 16 bytes (or 8, or 4) into shared memory in the background; groups of copies end in order.
// async_wait<N>: until at most N of this thread's groups are on their way.
template <int BYTES>
__device__ __forceinline__ void async_copy(SharedAt to, const void* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to.address), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to.address), "l"(from), "n"(BYTES)
                 : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Four matrices of 8 rows of 16 bytes in shared memory, the rows of matrix i at the addresses of
// lanes 8 i and on. Lane 4 g + t gets of each matrix bytes 4 t to 4 t + 3 of row g; or, transposed,
// the g-th 16 bits of rows 2 t (low) and 2 t + 1.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], SharedAt row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], SharedAt row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.address)
               : "memory");
}
// 2^v, within 2 ulp; 0 for -infinity.
__device__ __forceinline__ float power_of_two(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
// 1 / v of a normal number, correctly rounded.
__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return __fmaf_rn(r, __fmaf_rn(-v, r, 1.f), r);
}
// Thread-block clusters (sm_90 and later): CLUSTER blocks that read each other's shared memory.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
__device__ __forceinline__ int cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What lies at `own`, an address in this block's shared memory, in block `rank`'s.
__device__ __forceinline__ u32 peer_address(const void* own, int rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address(own)), "r"(rank));
  return mapped;
}
__device__ __forceinline__ u32 peer_u32(const u32* own, int rank) {
  u32 v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(peer_address(own, rank)) : "memory");
  return v;
}
__device__ __forceinline__ u64 peer_u64(const u64* own, int rank) {
  u64 v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(peer_address(own, rank)) : "memory");
  return v;
}
// Announces this thread, but nothing that it wrote.
__device__ __forceinline__ void cluster_announce() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Where the blocks of a cluster give each other results: a barrier in shared memory that counts bytes, in phases
// 0, 1, 0 and so on. `open` by one thread, before it announces itself; `give` once the cluster has; `expect` by one
// thread, how much will be given to its block in this phase; `wait`, by all threads, until that is there, and what
// this thread wrote before. Nobody may give for the next phase before all have waited for this one.
struct Inbox {
  u64 barrier;
  __device__ __forceinline__ void open() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void give(float4* own, int rank, const float4& v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                     peer_address(own, rank)),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(peer_address(&barrier, rank))
                 : "memory");
  }
  __device__ __forceinline__ void give(float2* own, int rank, const float2& v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(
                     peer_address(own, rank)),
                 "f"(v.x), "f"(v.y), "r"(peer_address(&barrier, rank))
                 : "memory");
  }
  __device__ __forceinline__ void expect(u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(u32 phase = 0) {
    asm volatile(
        "{\n.reg .pred done;\nagain%=:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again%=;\n}" ::"r"(shared_address(&barrier)),
        "r"(phase)
        : "memory");
  }
};
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() { __syncthreads(); }
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void cluster_announce() { __syncthreads(); }
struct Inbox {  // of a block alone
  __device__ __forceinline__ void open() {}
  __device__ __forceinline__ void give(float4* own, int, const float4& v) { *own = v; }
  __device__ __forceinline__ void give(float2* own, int, const float2& v) { *own = v; }
  __device__ __forceinline__ void expect(u32) {}
  __device__ __forceinline__ void wait(u32 = 0) { __syncthreads(); }
};
__device__ __forceinline__ u32 peer_u32(const u32* own, int) { return *own; }
__device__ __forceinline__ u64 peer_u64(const u64* own, int) { return *own; }
#endif
// A barrier of the block's first `count` threads, whole warps.
__device__ __forceinline__ void sync_threads(int count) {
  asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory");
}
// The same of one of up to 8 teams of `count` threads each.
__device__ __forceinline__ void sync_team(int team, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + team), "r"(count) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
#if BULK
// mbarriers: `arrivals` threads (and the bytes of bulk copies) complete a phase; phases alternate.
// Their addresses are hidden from the compiler, which would compute them anew for every use.
struct Barrier {
  u32 address;
  __device__ __forceinline__ Barrier(const u64* p) : address(shared_address(p)) {
    asm volatile("" : "+r"(address));
  }
  __device__ __forceinline__ Barrier operator+(int i) const {  // the i-th after this one
    Barrier other = *this;
    other.address += 8 * i;
    return other;
  }
};
__device__ __forceinline__ void barrier_init(Barrier barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.address), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier.address)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(Barrier barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=;\n}" ::"r"(barrier.address),
      "r"(phase)
      : "memory");
}
// Copies bytes (a multiple of 16, both sides aligned to 16) and counts them at the barrier. They are
// read once: the first to leave L2.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, Barrier barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   barrier.address),
               "r"(bytes)
               : "memory");
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(barrier.address), "l"(policy)
      : "memory");
}
#endif
#else
#ifndef CLUSTER
#define CLUSTER 1
#endif
inline int cluster_rank() { return cpu::cluster_rank(); }
inline void cluster_arrive() { cpu::cluster_arrive(); }
inline void cluster_wait() { cpu::cluster_wait(); }
inline void cluster_sync() { cpu::cluster_barrier(); }
inline void cluster_announce() { cpu::cluster_arrive(); }
struct Inbox {
  cpu::Given given;
  void open() { given = {true, 0, 0}; }
  template <class T>
  void give(T* own, int rank, const T& v) {
    cpu::give(own, rank, v, &given);
  }
  void expect(u32 bytes) { given.expected += bytes; }
  void wait(u32 = 0) { cpu::await(given); }
};
inline u32 peer_u32(const u32* own, int rank) { return cpu::peer(own, rank); }
inline u64 peer_u64(const u64* own, int rank) { return cpu::peer(own, rank); }
#define SHARED_MEMORY(name) unsigned char* name = reinterpret_cast<unsigned char*>(cpu::block->smem.data())
inline void prefetch(const void*) {}
#define sync_threads(count) cpu::barrier(__LINE__, count, 1)
#define sync_team(team, count) cpu::barrier(__LINE__, count, 2 + (team))
inline uint4 load_stream(const void* p) {
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline void load_shared_if(bool there, uint4& v, const uint4* p) {
  if (there) v = *p;
}
struct SharedAt {
  u8* address;
  SharedAt() = default;
  SharedAt(const void* p) : address(static_cast<u8*>(const_cast<void*>(p))) {}
  SharedAt operator+(int bytes) const { return address + bytes; }
  SharedAt turned(int bytes) const {
    return reinterpret_cast<u8*>(reinterpret_cast<size_t>(address) ^ static_cast<size_t>(bytes));
  }
};
template <class T>
inline T* in_shared(SharedAt at) {
  return reinterpret_cast<T*>(at.address);
}
template <class T>
inline T* kept(T* p) {
  return p;
}
inline SharedAt kept(SharedAt at) { return at; }
inline int kept(int v) { return v; }
template <int BYTES>
inline void async_copy(SharedAt to, const void* from) {
  cpu::async_copy(to.address, from, BYTES);
}
inline void async_commit() { cpu::current->async_groups++; }
template <int N>
inline void async_wait() {
  cpu::async_wait(N);
}
inline void load_matrices(u32 (&r)[4], SharedAt row) {
  auto words = cpu::warp_op(~0u, static_cast<const void*>(row.address), [](auto of, int lane) {
    std::array<u32, 4> out;
    for (int i = 0; i < 4; i++)
      memcpy(&out[i], static_cast<const u8*>(of(8 * i + lane / 4)) + lane % 4 * 4, 4);
    return out;
  });
  for (int i = 0; i < 4; i++) r[i] = words[i];
}
inline void load_matrices_transposed(u32 (&r)[4], SharedAt row) {
  auto words = cpu::warp_op(~0u, static_cast<const void*>(row.address), [](auto of, int lane) {
    std::array<u32, 4> out;
    for (int i = 0; i < 8; i++) {
      unsigned short half;
      memcpy(&half, static_cast<const u8*>(of(i / 2 * 8 + lane % 4 * 2 + i % 2)) + lane / 4 * 2, 2);
      out[i / 2] = i % 2 ? out[i / 2] | static_cast<u32>(half) << 16 : half;
    }
    return out;
  });
  for (int i = 0; i < 4; i++) r[i] = words[i];
}
inline float power_of_two(float v) { return exp2f(v); }
inline float reciprocal(float v) { return 1.f / v; }
template <class Decode>  // decode(word, high): one of the two 16-bit numbers of a word
inline void mma_cpu(float (&c)[4], const uint4& a, u32 b0, u32 b1, Decode decode) {
  struct Operands {
    float a[4][2], b[2][2];
  } mine;
  const u32 words[6] = {a.x, a.y, a.z, a.w, b0, b1};
  for (int i = 0; i < 12; i++)
    (i < 8 ? mine.a[i / 2] : mine.b[i / 2 - 4])[i % 2] = decode(words[i / 2], i % 2);
  auto sums = cpu::warp_op(~0u, mine, [&](auto of, int lane) {
    std::array<float, 4> out;
    for (int i = 0; i < 4; i++) {
      int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
      float sum = c[i];
      for (int k = 0; k < 16; k++) {
        const Operands& left = of(row % 8 * 4 + k % 8 / 2);
        const Operands& right = of(column * 4 + k % 8 / 2);
        sum += left.a[row / 8 + 2 * (k / 8)][k % 2] * right.b[k / 8][k % 2];
      }
      out[i] = sum;
    }
    return out;
  });
  for (int i = 0; i < 4; i++) c[i] = sums[i];
}
inline void mma_f16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  mma_cpu(c, a, b0, b1, [](u32 w, int high) {
    __half_raw h;
    h.x = high ? w >> 16 : w & 0xffff;
    return __half2float(__half(h));
  });
}
inline void mma_bf16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  mma_cpu(c, a, b0, b1, [](u32 w, int high) {
    return __uint_as_float(high ? w & 0xffff0000u : w << 16);
  });
}
#if BULK
typedef u64* Barrier;
inline cpu::Mbarrier* mbarrier(u64* p) { return reinterpret_cast<cpu::Mbarrier*>(p); }
inline void barrier_init(u64* barrier, u32 arrivals) {
  u8 count = static_cast<u8>(arrivals);
  *mbarrier(barrier) = {0, count, count, 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive(u64* barrier) { cpu::mbarrier_step(mbarrier(barrier), 1, 0); }
inline void barrier_wait(u64* barrier, u32 phase) { cpu::mbarrier_wait(mbarrier(barrier), phase); }
inline void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
  cpu::bulk_copy(to, from, bytes, mbarrier(barrier));
}
#endif
#endif
