// Runs CUDA C kernels on the CPU, for tests: included before a .cu, it lets g++ build the file as it is.
//
// One fiber per CUDA thread, all on one OS thread; blocks run one after another, those of a cluster
// in turns from one cluster barrier to the next. A fiber runs until it waits (__syncthreads, a warp
// operation) or ends, then the scheduler picks the next. The seed decides the order of blocks, warps
// and lanes:
//   0  forward, 1 backward; each warp runs as far as it can before the next one starts
//   *  warps and lanes shuffled again and again
// so a result that depends on the seed shows a race. The two halves of a cluster's barrier, arrive and
// wait, hold a thread in one of them only: with even seeds nobody leaves cluster_arrive before all are
// there (what follows it may find peers that have gone on, or ended), with odd ones cluster_wait. Shared memory is filled with POISON (a NaN in
// every float format) before each block, and the bytes behind dynamic shared memory are checked after it.
// Bulk copies into shared memory land at once with seed 0, when nothing else can run with 1, and else
// when a thread waits for them; asynchronous copies of a thread land at once with seed 0, else when
// it waits for them.
// A launch may be told what memory kernels before it still write (watch): up to grid_wait those bytes
// are POISON, each cluster of blocks stops there until all its threads have come, and none may have
// written to watched memory. So a kernel that begins too early, by a launch_next before its own wait in
// the kernel before it, gives other results or an error.
// Reported as an error text: a deadlock, lanes that meet in different warp operations, threads that
// meet at different barriers, a write past dynamic shared memory, a bulk copy that is misaligned or
// never waited for, arguments of the wrong type.
// Results below the normal float32 numbers become 0, since CuPy compiles kernels with -ftz=true.
// Types and conversions of half and bf16 are NVIDIA's own headers, which g++ compiles unchanged.
#pragma once
#define CUDA_CPU 1
#if !defined(__x86_64__)
#error "cuda_cpu.h: add a context switch for this processor"
#endif

#include <xmmintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __constant__ static
// A section of its own, so that it can be poisoned as a whole: see poison_shared.
#define __shared__ static __attribute__((section("shared_memory")))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

extern "C" {
extern unsigned char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));
void cpu_switch(void** save, void* load);  // saves this fiber's stack pointer, goes on with another
#if defined(__SANITIZE_ADDRESS__)
void __asan_unpoison_memory_region(void const volatile*, size_t);
#else
static inline void __asan_unpoison_memory_region(void const volatile*, size_t) {}
#endif
}
asm(R"(
.text
.weak cpu_switch
.type cpu_switch, @function
cpu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size cpu_switch, . - cpu_switch
)");

namespace cpu {

constexpr size_t STACK_BYTES = 128 << 10, GUARD = 4;  // GUARD: uint4 behind dynamic shared memory
template <class T>
struct InLines {  // an allocator: memory begins at a line of 128 bytes, as SHARED_MEMORY says
  using value_type = T;
  static constexpr std::align_val_t LINE{128};
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
  void deallocate(T* p, size_t) { ::operator delete(p, LINE); }
  bool operator==(const InLines&) const { return true; }
  bool operator!=(const InLines&) const { return false; }
};
constexpr unsigned char POISON = 0xFF;
constexpr int BARRIERS = 16;  // of a block

enum State { READY, AT_BARRIER, AT_WARP_OP, AT_MBARRIER, AT_CLUSTER, POLLING, ENDED };

struct Mbarrier {  // lies in the kernel's u64
  uint8_t phase, arrivals, pending, unused;
  int32_t bytes;
};
struct BulkCopy {
  void* to;
  const void* from;
  unsigned bytes;
  Mbarrier* barrier;
};

struct AsyncCopy {
  void* to;
  const void* from;
  unsigned bytes;
  int group;
};

struct Fiber {
  void* stack_pointer = nullptr;
  uint3 thread{};
  int lane = 0, warp = 0, line = 0, barrier = 0;  // line: of the barrier it waits at
  State state = READY;
  // A warp operation: lanes that take part, what this lane brings, how to compute its result.
  unsigned mask = 0;
  const void* brought = nullptr;
  void* call = nullptr;
  void (*finish)(void*) = nullptr;
  Mbarrier* awaits = nullptr;
  bool waited = false;   // for the kernels before
  bool arrived = false;  // at a barrier of the cluster, for which it has not waited yet
  // Copies into shared memory of this thread that are on their way, and groups committed so far.
  std::vector<AsyncCopy> async;
  int async_groups = 0;
};

struct Block {
  dim3 grid, size;
  uint3 index{};
  std::vector<Fiber> fibers;
  std::vector<uint4, InLines<uint4>> smem;  // dynamic shared memory
  std::vector<unsigned char> statics;  // static shared memory while another block of the cluster runs
  std::vector<BulkCopy> copies;  // on their way
  unsigned seed = 0;
  std::function<void()> run;
  void* scheduler = nullptr;  // its stack pointer
  int alive = 0;
  int waiting[BARRIERS] = {}, expected[BARRIERS] = {};  // at each barrier; of all that have not ended: 0
  std::string error;
};
inline Block* block = nullptr;
inline Fiber* current = nullptr;
inline std::vector<Block>* cluster = nullptr;  // one, or several that run in turns
inline int cluster_size = 1;

struct Random {
  uint64_t state;
  unsigned below(unsigned n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>(state >> 33) % n;
  }
  // 0 .. n - 1: forward, backward, or shuffled.
  std::vector<int> order(int n, unsigned seed) {
    std::vector<int> all(n);
    std::iota(all.begin(), all.end(), 0);
    for (int i = n - 1; i > 0; i--) {
      if (seed == 1 && i > n - 1 - i) std::swap(all[i], all[n - 1 - i]);
      if (seed > 1) std::swap(all[i], all[below(i + 1)]);
    }
    return all;
  }
};

inline void pause() { cpu_switch(&current->stack_pointer, block->scheduler); }

inline void fail(const std::string& what) {  // ends the launch; a fiber does not return from it
  Block& b = *block;
  const char* names[] = {"ready", "at a barrier", "in a warp operation", "at an mbarrier",
                         "at a cluster barrier", "polling", "ended"};
  int counts[7] = {};
  for (const Fiber& f : b.fibers) counts[f.state]++;
  b.error = what + " in block " + std::to_string(b.index.x) + ", " + std::to_string(b.index.y) +
            ", " + std::to_string(b.index.z) + ":";
  for (int i = 0; i < 7; i++)
    if (counts[i]) b.error += " " + std::to_string(counts[i]) + " threads " + names[i] + ";";
  if (current) pause();
}

inline void release_if_all_wait(Block& b) {
  for (int i = 0; i < BARRIERS; i++) {
    int expected = b.expected[i] ? b.expected[i] : b.alive;
    if (b.waiting[i] == 0 || b.waiting[i] < expected) continue;
    b.waiting[i] = 0;
    for (Fiber& f : b.fibers)
      if (f.state == AT_BARRIER && f.barrier == i) f.state = READY;
  }
}

// The number-th barrier, of so many threads, 0: of all that have not ended.
inline void barrier(int line, int threads = 0, int number = 0) {
  Block& b = *block;
  if (number < 0 || number >= BARRIERS) fail("a barrier that there is not");
  b.expected[number] = threads;
  for (const Fiber& f : b.fibers)
    if (f.state == AT_BARRIER && f.barrier == number && f.line != line)
      fail("threads at barriers of lines " + std::to_string(f.line) + " and " + std::to_string(line));
  current->state = AT_BARRIER, current->line = line, current->barrier = number;
  b.waiting[number]++;
  release_if_all_wait(b);
  if (current->state == AT_BARRIER) pause();
}

// Waits until every lane of the mask is here; the last one computes all results.
inline void meet() {
  Fiber& me = *current;
  Fiber* first = &me - me.lane;
  int lanes = static_cast<int>(block->fibers.data() + block->fibers.size() - first);
  if (!(me.mask >> me.lane & 1) || (lanes < 32 && me.mask >> lanes)) fail("a wrong warp mask");
  me.state = AT_WARP_OP;
  for (int l = 0; l < 32; l++) {
    if (!(me.mask >> l & 1)) continue;
    const Fiber& other = first[l];
    if (other.state != AT_WARP_OP || other.mask != me.mask) return pause();
    if (other.finish != me.finish) fail("lanes in different warp operations");
  }
  for (int l = 0; l < 32; l++)
    if (me.mask >> l & 1) first[l].finish(first[l].call);
  for (int l = 0; l < 32; l++)
    if (me.mask >> l & 1) first[l].state = READY;
}

// What lane l brought; POISON for a lane outside the mask.
template <class T>
struct Lanes {
  const Fiber* first;
  unsigned mask;
  const T& operator()(int l) const {
    static_assert(std::is_trivially_copyable_v<T>);
    static const std::array<unsigned char, sizeof(T) + 16> poison = [] {
      std::array<unsigned char, sizeof(T) + 16> a;
      a.fill(POISON);
      return a;
    }();
    if (!(mask >> (l & 31) & 1)) return *reinterpret_cast<const T*>(poison.data());
    return *static_cast<const T*>(first[l & 31].brought);
  }
};

// Shuffles, votes and mma: all lanes of the mask meet, then each gets f(lanes, own lane).
template <class T, class F>
auto warp_op(unsigned mask, const T& mine, F f) {
  Fiber& me = *current;
  struct Call {
    F& f;
    Lanes<T> lanes;
    int lane;
    decltype(f(Lanes<T>{}, 0)) result;
  } call{f, {&me - me.lane, mask}, me.lane, {}};
  me.mask = mask, me.brought = &mine, me.call = &call;
  me.finish = [](void* p) {
    Call& c = *static_cast<Call*>(p);
    c.result = c.f(c.lanes, c.lane);
  };
  meet();
  return call.result;
}

inline void mbarrier_step(Mbarrier* m, int arrivals, int bytes) {
  m->pending -= arrivals, m->bytes += bytes;
  if (m->pending || m->bytes) return;
  m->phase ^= 1, m->pending = m->arrivals;
  for (Fiber& f : block->fibers)
    if (f.state == AT_MBARRIER && f.awaits == m) f.state = READY;
}

// Lets copies that count at this mbarrier arrive.
inline void land(Mbarrier* m) {
  std::vector<BulkCopy>& all = block->copies;
  for (size_t i = 0; i < all.size();) {
    BulkCopy c = all[i];
    if (c.barrier != m) {
      i++;
      continue;
    }
    all.erase(all.begin() + i);
    memcpy(c.to, c.from, c.bytes);
    mbarrier_step(m, 0, -static_cast<int>(c.bytes));
  }
}

inline void mbarrier_wait(Mbarrier* m, unsigned phase) {
  if (block->seed != 1) land(m);
  while (m->phase == phase) {
    current->state = AT_MBARRIER, current->awaits = m;
    pause();
  }
}

inline void bulk_copy(void* to, const void* from, unsigned bytes, Mbarrier* m) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16)
    fail("a bulk copy that is not aligned to 16 bytes");
  mbarrier_step(m, 1, static_cast<int>(bytes));
  memset(to, POISON, bytes);
  block->copies.push_back({to, from, bytes, m});
  if (block->seed == 0) land(m);
}

inline void async_copy(void* to, const void* from, unsigned bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes)
    fail("an asynchronous copy that is not aligned to its size");
  if (block->seed == 0) {
    memcpy(to, from, bytes);
    return;
  }
  memset(to, POISON, bytes);
  current->async.push_back({to, from, bytes, current->async_groups});
}

inline void async_wait(int at_most) {
  std::vector<AsyncCopy>& all = current->async;
  size_t kept = 0;
  for (const AsyncCopy& c : all) {
    if (c.group + at_most >= current->async_groups) all[kept++] = c;
    else memcpy(c.to, c.from, c.bytes);
  }
  all.resize(kept);
}

// Where this block is among those that run in turns, clusters one after another.
inline int place_in_turns() { return static_cast<int>(block - cluster->data()); }
inline int cluster_rank() { return place_in_turns() % cluster_size; }

inline void cluster_barrier() {
  current->state = AT_CLUSTER;
  pause();
}
// Lets other blocks of the launch go on, which must run in one cluster.
inline void poll() {
  current->state = POLLING;
  pause();
}
inline void cluster_arrive() {
  if (std::exchange(current->arrived, true)) fail("a thread arrives twice at a cluster barrier");
  if (block->seed % 2 == 0) cluster_barrier();
}
inline void cluster_wait() {
  if (!std::exchange(current->arrived, false)) fail("a thread waits at a cluster barrier before it arrives");
  if (block->seed % 2 == 1) cluster_barrier();
}

inline Block& peer_block(int rank) {
  if (rank < 0 || rank >= cluster_size) fail("a block outside the cluster");
  return (*cluster)[place_in_turns() - cluster_rank() + rank];
}
// Where an address of this block's shared memory is in block `rank` of the cluster.
inline unsigned char* peer_place(const void* own, int rank) {
  Block& other = peer_block(rank);
  auto* at = static_cast<const unsigned char*>(own);
  if (&other == block) return const_cast<unsigned char*>(at);
  auto* dynamic = reinterpret_cast<const unsigned char*>(block->smem.data());
  bool is_static = at >= __start_shared_memory && at < __stop_shared_memory;
  if (!is_static && (at < dynamic || at >= dynamic + block->smem.size() * sizeof(uint4)))
    fail("an address outside shared memory");
  return is_static ? other.statics.data() + (at - __start_shared_memory)
                   : reinterpret_cast<unsigned char*>(other.smem.data()) + (at - dynamic);
}
template <class T>
T peer(const T* own, int rank) {
  T v;
  memcpy(&v, peer_place(own, rank), sizeof v);
  return v;
}
// Bytes that blocks of the cluster have given to this one, and that it expects.
struct Given {
  bool open;
  size_t bytes, expected;
};
template <class T>
void give(T* own, int rank, const T& v, Given* given) {
  if (peer_block(rank).alive == 0) fail("a write to a block that has ended");
  auto* counted = reinterpret_cast<Given*>(peer_place(given, rank));
  if (counted->open != true) fail("an inbox that is not open");
  memcpy(peer_place(own, rank), &v, sizeof v);
  counted->bytes += sizeof v;
}
// Until all blocks of the cluster are here, and as much was given to this one as it expects.
inline void await(const Given& given) {
  cluster_barrier();
  if (given.bytes != given.expected)
    fail(std::to_string(given.bytes) + " bytes were given, not " + std::to_string(given.expected));
}

// Memory that kernels write. in_flight: one that may still run when this launch begins does.
struct Watched {
  unsigned char* at;
  size_t bytes;
  bool in_flight;
  std::vector<unsigned char> real;
};
inline std::vector<Watched> watched;
inline bool hidden = false, hasty = false;

inline void hide() {
  for (Watched& w : watched) {
    w.real.assign(w.at, w.at + w.bytes);
    if (w.in_flight) memset(w.at, POISON, w.bytes);
  }
  hidden = !watched.empty();
}
// Whether nothing was written before.
inline bool reveal() {
  hidden = false;
  bool untouched = true;
  for (Watched& w : watched) {
    for (size_t i = 0; i < w.bytes; i++) untouched &= w.at[i] == (w.in_flight ? POISON : w.real[i]);
    memcpy(w.at, w.real.data(), w.bytes);
  }
  return untouched;
}
inline void launch_next() { hasty |= !current->waited; }
inline void grid_wait() {
  current->waited = true;
  if (hidden) cluster_barrier();
}

inline void fiber_main() {
  block->run();
  if (!watched.empty() && !current->waited) fail("a thread ends before grid_wait");
  if (current->arrived) fail("a thread ends between cluster_arrive and cluster_wait");
  current->state = ENDED;
  block->alive--;
  release_if_all_wait(*block);
  pause();
}

__attribute__((no_sanitize("address"))) inline void poison_shared() {
  for (volatile unsigned char* p = __start_shared_memory; p < __stop_shared_memory; p++) *p = POISON;
}
// A block that has ended leaves nothing that its peers could read.
__attribute__((no_sanitize("address"))) inline void save_shared(Block& b) {
  for (size_t i = 0; i < b.statics.size(); i++)
    b.statics[i] =
        b.alive ? static_cast<volatile unsigned char*>(__start_shared_memory)[i] : POISON;
}
__attribute__((no_sanitize("address"))) inline void load_shared(const Block& b) {
  for (size_t i = 0; i < b.statics.size(); i++)
    static_cast<volatile unsigned char*>(__start_shared_memory)[i] = b.statics[i];
}

inline void start_block(Block& b, unsigned char* stacks, unsigned seed) {
  int count = static_cast<int>(b.fibers.size());
  __asan_unpoison_memory_region(stacks, STACK_BYTES * count);
  if (!b.smem.empty())
    memset(static_cast<void*>(b.smem.data()), POISON, b.smem.size() * sizeof(uint4));
  b.alive = count, b.seed = seed;
  std::fill_n(b.waiting, BARRIERS, 0), std::fill_n(b.expected, BARRIERS, 0);
  for (int i = 0; i < count; i++) {
    Fiber& f = b.fibers[i] = Fiber();
    int x = b.size.x, y = b.size.y;
    f.thread = uint3{unsigned(i % x), unsigned(i / x % y), unsigned(i / (x * y))};
    f.lane = i % 32, f.warp = i / 32;
    void** top = reinterpret_cast<void**>(stacks + STACK_BYTES * (i + 1));
    *--top = nullptr;                                  // aligned as after a call
    *--top = reinterpret_cast<void*>(fiber_main);      // where cpu_switch returns to
    for (int k = 0; k < 6; k++) *--top = nullptr;      // the registers it restores
    f.stack_pointer = top;
  }
}

inline bool polls(const Block& b) {
  return std::any_of(b.fibers.begin(), b.fibers.end(), [](const Fiber& f) { return f.state == POLLING; });
}

// Runs a block until all its threads have ended or wait for the cluster, or for what another block writes.
inline void run_block(Block& b, Random& random, unsigned seed) {
  int count = static_cast<int>(b.fibers.size()), warps = (count + 31) / 32;
  block = &b;
  auto run_warp = [&](int w) {
    bool ran = false;
    for (int lane : random.order(std::min(32, count - 32 * w), seed)) {
      Fiber& f = b.fibers[32 * w + lane];
      if (f.state != READY || !b.error.empty()) continue;
      ran = true, current = &f;
      cpu_switch(&b.scheduler, f.stack_pointer);
      current = nullptr;
    }
    return ran;
  };
  while (b.alive && b.error.empty()) {
    bool ran = false;
    for (int w : random.order(warps, seed))
      while (run_warp(w)) {
        ran = true;
        if (seed > 1 && random.below(4) == 0) break;
      }
    if (ran || !b.error.empty()) continue;
    int at_cluster = 0;
    for (const Fiber& f : b.fibers) at_cluster += f.state == AT_CLUSTER;
    if (at_cluster == b.alive) return;
    if (!b.copies.empty()) land(b.copies.front().barrier);
    else if (polls(b)) return;
    else fail("deadlock");
  }
  if (!b.copies.empty() && b.error.empty()) fail("a bulk copy that nobody waited for");
}

// Products of two bf16 or fp16, of which the GPU keeps subnormal results whatever it is compiled with.
template <class Pair>
inline Pair multiply_pair(Pair a, Pair b) {
  unsigned before = _mm_getcsr();
  _mm_setcsr(before & ~_MM_FLUSH_ZERO_ON);
  Pair product = __hmul2(a, b);
  _mm_setcsr(before);
  return product;
}

struct FlushSubnormals {
  unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | _MM_FLUSH_ZERO_ON); }
  ~FlushSubnormals() { _mm_setcsr(before); }
};
// Runs blocks in turns; returns an error text.
inline std::string run_in_turns(std::vector<Block>& blocks, unsigned char* stacks, Random& random,
                               unsigned seed) {
  cluster = &blocks;
  poison_shared();
  for (Block& b : blocks) {
    start_block(b, stacks, seed);
    stacks += STACK_BYTES * b.fibers.size();
    if (blocks.size() > 1) b.statics.assign(__stop_shared_memory - __start_shared_memory, POISON);
  }
  hide();
  int polled = 0;  // turns in a row in which every living block polled
  for (bool alive = true; alive;) {
    alive = false;
    bool all_poll = true;
    for (int i : random.order(static_cast<int>(blocks.size()), seed)) {
      load_shared(blocks[i]);
      run_block(blocks[i], random, seed);
      save_shared(blocks[i]);
      if (!blocks[i].error.empty()) return blocks[i].error;
      alive |= blocks[i].alive > 0;
      all_poll &= !blocks[i].alive || polls(blocks[i]);
    }
    polled = all_poll ? polled + 1 : 0;
    if (polled > 100) return "blocks poll for what nobody writes";
    if (hidden && !reveal()) return "a write before grid_wait";
    for (Block& b : blocks)
      for (Fiber& f : b.fibers)
        if (f.state == AT_CLUSTER || f.state == POLLING) f.state = READY;
  }
  return "";
}

template <class T>
constexpr char kind() {
  if (std::is_pointer_v<T>) return 'P';
  return std::is_same_v<T, int> ? 'i' : std::is_same_v<T, float> ? 'f' : '?';
}

// sizes: grid x, y, z, block x, y, z. arguments[i] points at argument i, kinds[i] is its type: P, i or f.
// Clusters are of so many blocks along x, and so many blocks run in turns. Returns an error text or null.
template <class... A, size_t... I>
const char* launch(void (*kernel)(A...), int in_turns, int blocks_a_cluster, const unsigned* sizes, size_t shared,
                   void** arguments, const char* kinds, unsigned seed, std::index_sequence<I...>) {
  static std::string error;
  const char wanted[] = {kind<A>()..., 0};
  if (strcmp(wanted, kinds)) {
    error = std::string("takes arguments of types ") + wanted + ", was given " + kinds;
    return error.c_str();
  }
  if (sizes[0] % in_turns || in_turns % blocks_a_cluster) return "the grid is not a multiple of the cluster";
  cluster_size = blocks_a_cluster;
#if defined(__SANITIZE_ADDRESS__)
  size_t used = (shared + 15) / 16, guard = 0;
#else
  size_t used = (shared + 15) / 16, guard = GUARD;
#endif
  size_t threads = sizes[3] * sizes[4] * sizes[5];
  std::vector<Block> blocks(in_turns);
  for (Block& b : blocks) {
    b.grid = dim3(sizes[0], sizes[1], sizes[2]), b.size = dim3(sizes[3], sizes[4], sizes[5]);
    b.run = [&] { kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...); };
    b.smem.resize(used + guard);
    b.fibers.resize(threads);
  }
  std::unique_ptr<unsigned char, decltype(&free)> stacks(
      static_cast<unsigned char*>(aligned_alloc(64, STACK_BYTES * threads * blocks.size())), free);
  Random random{seed};
  error.clear();
  hasty = false;
  for (int i : random.order(sizes[0] * sizes[1] * sizes[2] / in_turns, seed)) {
    for (int r = 0; r < in_turns; r++) {
      unsigned at = i * in_turns + r, x = sizes[0], y = sizes[1];
      blocks[r].index = uint3{at % x, at / x % y, at / (x * y)};
    }
    error = run_in_turns(blocks, stacks.get(), random, seed);
    for (Block& b : blocks) {
      auto* behind = reinterpret_cast<unsigned char*>(b.smem.data() + used);
      block = &b;
      for (size_t g = 0; g < guard * sizeof(uint4) && error.empty(); g++)
        if (behind[g] != POISON) fail("a write past the dynamic shared memory"), error = b.error;
    }
    if (!error.empty()) break;
  }
  return error.empty() ? nullptr : error.c_str();
}

template <class... A>
const char* launch(void (*kernel)(A...), int in_turns, int blocks_a_cluster, const unsigned* sizes, size_t shared,
                   void** arguments, const char* kinds, unsigned seed) {
  const FlushSubnormals here;
  return launch(kernel, in_turns, blocks_a_cluster, sizes, shared, arguments, kinds, seed,
                std::index_sequence_for<A...>{});
}

}  // namespace cpu

extern "C" {
// Of the launches that follow; count 0 ends it.
void cpu_watch(unsigned char** at, const size_t* bytes, const unsigned char* in_flight, int count) {
  cpu::watched.clear();
  for (int i = 0; i < count; i++) cpu::watched.push_back({at[i], bytes[i], in_flight[i] != 0, {}});
}
// Whether a thread of the last launch let the next kernel begin before it had waited itself.
int cpu_was_hasty() { return cpu::hasty; }
}

// cpu_NAME, which runs a kernel in blocks of their own, in clusters of CLUSTER, or all blocks in turns.
#define CPU_KERNEL(name) CPU_KERNEL_OF(name, 1, 1)
#define CPU_CLUSTER_KERNEL(name) CPU_KERNEL_OF(name, CLUSTER, CLUSTER)
#define CPU_GRID_KERNEL(name) CPU_KERNEL_OF(name, sizes[0], 1)
#define CPU_KERNEL_OF(name, in_turns, blocks_a_cluster)                                         \
  extern "C" const char* cpu_##name(const unsigned* sizes, size_t shared, void** arguments,     \
                                    const char* kinds, unsigned seed) {                         \
    return cpu::launch(name, in_turns, blocks_a_cluster, sizes, shared, arguments, kinds, seed); \
  }

#define threadIdx (cpu::current->thread)
#define blockIdx (cpu::block->index)
#define blockDim (cpu::block->size)
#define gridDim (cpu::block->grid)

#define __syncthreads() cpu::barrier(__LINE__)
inline void __syncwarp(unsigned mask = ~0u) {
  cpu::warp_op(mask, 0, [](auto, int) { return 0; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  return cpu::warp_op(mask, v, [=](auto of, int l) { return of((l & -width) | (from & (width - 1))); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  return cpu::warp_op(mask, v, [=](auto of, int l) { return of((l ^ bits) < (l | (width - 1)) + 1 ? l ^ bits : l); });
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  return cpu::warp_op(mask, v, [=](auto of, int l) { return of((l & (width - 1)) + int(by) < width ? l + by : l); });
}
template <class F>
unsigned reduce(unsigned mask, unsigned v, F pick) {
  return cpu::warp_op(mask, v, [=](auto of, int self) {
    unsigned result = of(self);
    for (int l = 0; l < 32; l++)
      if (mask >> l & 1) result = pick(result, of(l));
    return result;
  });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return reduce(mask, v, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return reduce(mask, v, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return cpu::warp_op(mask, p != 0, [=](auto of, int) {
    unsigned votes = 0;
    for (int l = 0; l < 32; l++) votes |= unsigned((mask >> l & 1) && of(l)) << l;
    return votes;
  });
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }

// Fibers share one OS thread and do not stop in here.
template <class T>
T atomicAdd(T* p, T v) { return std::exchange(*p, T(*p + v)); }
template <class T>
T atomicMax(T* p, T v) { return std::exchange(*p, *p < v ? v : *p); }
template <class T>
T atomicOr(T* p, T v) { return std::exchange(*p, *p | v); }
template <class T>
T atomicExch(T* p, T v) { return std::exchange(*p, v); }

template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldg(const T* p) { return *p; }

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }
template <class To, class From>
To bits_of(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned v) { return bits_of<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_of<unsigned>(v); }
inline float __int_as_float(int v) { return bits_of<float>(v); }
inline int __float_as_int(float v) { return bits_of<int>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (by & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned pick) {
  uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(both >> (pick >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline float __expf(float v) { return expf(v); }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
#define __hmul2(a, b) cpu::multiply_pair(a, b)
