// CUDA's built-ins for a host build, and the machine under them: a block's threads are fibers on one core.
//
// A thread runs until it needs others: at a barrier, or in an operation of its warp or warpgroup, which goes on once
// all have brought their operands. Which warp goes on next is drawn from a seeded generator, so that a missing barrier
// changes results. Kernels are compiled with no more than this header, and many of them: it includes little.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // of the one OS thread: common to all fibers, at block scope as well

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

constexpr auto min(auto a, auto b) { return b < a ? b : a; }
constexpr auto max(auto a, auto b) { return a < b ? b : a; }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline int __popc(unsigned v) { return std::popcount(v); }

extern struct Index {
  unsigned x;
} threadIdx, blockIdx, gridDim;
extern thread_local unsigned char shared[];

namespace emu {

inline int lane() { return static_cast<int>(threadIdx.x % 32); }

// Ends the run: what is wrong, with the kernel, block and thread that did it.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A rendezvous of a warp's 32 lanes, or of a warpgroup's 128 threads: what each brought, in the order of the threads.
// It is there until the next rendezvous of the same threads.
constexpr std::size_t kMaxOperand = 64;
const void* rendezvous(const char* name, unsigned size, const void* operand = "", std::size_t bytes = 0);
template <unsigned kSize = 32, class T>
const T* gather(const char* name, const T& operand, unsigned mask = 0xFFFFFFFFu) {
  static_assert(sizeof(T) <= kMaxOperand && alignof(T) <= 16);
  if (mask != 0xFFFFFFFFu) fail("%s of part of a warp is not modelled", name);
  return static_cast<const T*>(rendezvous(name, kSize, &operand, sizeof(T)));
}

// `threads` 0: all of the block that have not ended.
void barrier(unsigned id, unsigned threads, bool wait);

void mbarrier_init(unsigned address, unsigned arrivals);
void mbarrier_arrive(unsigned address, unsigned arrivals, std::int64_t expected_bytes);
void mbarrier_wait(unsigned address, unsigned parity);

// `bytes` of shared memory at `address`, checked: inside the block's, aligned, and for reads written before. The
// asynchronous proxy must not meet what the others wrote since the last proxy fence, whoever's that was.
enum Purpose { kRead, kWrite, kAsyncRead, kAsyncWrite };
unsigned char* shared_bytes(unsigned address, unsigned bytes, Purpose purpose);
void proxy_fence();

void copy_async(unsigned destination, const void* source, unsigned bytes, bool valid);
// Nobody waits for these two: as late as possible is when all threads wait for something.
void copy_arrive(unsigned barrier);
void copy_bulk(unsigned destination, const void* source, unsigned bytes, unsigned barrier);

// Work that goes on by itself takes effect when a wait asks for it, or at once (the other mode). A queue is cp.async of
// the running thread, or wgmma of its warp.
enum Queue { kCopies, kMatmuls };
void commit(Queue queue);
void wait(Queue queue, std::size_t pending);

// What a lane has of A[16,16], B[16,8] and D[16,8], to which it adds its part of their product. The products of values
// are exact in fp32; their sum is rounded once here, while hardware rounds inside in its own way.
struct Fragments {
  float a[8], b[4], *d;
};
void multiply_add(const Fragments* lanes, int lane);

// Requests of a warp to banks and sectors, put together from what its lanes do between two rendezvous. `least`: what
// the same requests would take without a bank conflict, and with every sector used in full.
enum Unit { kShared, kGlobal };
void note(Unit unit, std::uintptr_t address, unsigned bytes);

// A thread's fma2 are counted one by one, a warp's mma as one, and a wgmma as the mma.m16n8k16 that it stands for.
struct Counters {
  std::uint64_t mma, fma2, shared_wavefronts, shared_least, global_bytes, global_sectors, global_least;
};
extern Counters counters;

// Where global memory is accessed.
inline std::uintptr_t aligned(const void* pointer, unsigned bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % bytes) fail("%u bytes of global memory at a misaligned address", bytes);
  return address;
}

// The value of lane `source`, of the lane itself if there is no such lane.
auto shuffle(const char* name, unsigned mask, auto v, int source) {
  return gather(name, v, mask)[source < 0 || source > 31 ? lane() : source];
}

}  // namespace emu

inline void __syncthreads() { emu::barrier(0, 0, true); }
inline void __threadfence() {}  // blocks run one after the other
inline void __syncwarp() { emu::rendezvous("syncwarp", 32); }

auto __shfl_sync(unsigned mask, auto v, int source) { return emu::shuffle("shfl.idx", mask, v, source & 31); }
auto __shfl_xor_sync(unsigned mask, auto v, int bits) { return emu::shuffle("shfl.xor", mask, v, emu::lane() ^ bits); }
auto __shfl_up_sync(unsigned mask, auto v, int by) { return emu::shuffle("shfl.up", mask, v, emu::lane() - by); }
auto __shfl_down_sync(unsigned mask, auto v, int by) { return emu::shuffle("shfl.down", mask, v, emu::lane() + by); }

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  const bool* lanes = emu::gather("vote.ballot", predicate, mask);
  unsigned votes = 0;
  for (int l = 0; l < 32; ++l) votes |= unsigned{lanes[l]} << l;
  return votes;
}
inline int __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) == 0xFFFFFFFFu; }

template <class T>
T atomicAdd(T* p, T value) {
  emu::aligned(p, sizeof(T));
  return std::exchange(*p, *p + value);
}
