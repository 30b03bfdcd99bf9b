// CUDA's built-ins for a host build, and the machine under them: a block's threads are fibers on one core.
//
// A thread runs until it needs others: a barrier, or an operation of its warp or warpgroup, which is executed once all
// have brought their operands. Which warp goes on next is drawn from a seeded generator, so that a missing barrier
// changes results.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // of the one OS thread: common to all fibers, at block scope as well

struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
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

template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline int __popc(unsigned v) { return std::popcount(v); }

extern uint3 threadIdx, blockIdx;
extern thread_local unsigned char shared[];

namespace emu {

// Ends the run: what is wrong, with the kernel, block and thread that did it.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A rendezvous of a warp's 32 lanes, or of a warpgroup's 128 threads. `execute` sees every operand, in the order of the
// threads, and leaves results in them.
void rendezvous(const char* name, unsigned size, void* operand, void (*execute)(void* const* operands));
inline void warp_operation(const char* name, void* operand, void (*execute)(void* const* operands)) {
  rendezvous(name, 32, operand, execute);
}

// The same with nothing to execute.
inline void meet(const char* name, unsigned size) {
  rendezvous(name, size, nullptr, [](void* const*) {});
}

// `threads` 0: all of the block that have not ended.
void barrier(unsigned id, unsigned threads, bool wait);

void mbarrier_init(unsigned address, unsigned arrivals);
void mbarrier_arrive(unsigned address, unsigned expected_bytes);
void mbarrier_wait(unsigned address, unsigned parity);

// `bytes` of shared memory at `address`, checked: inside the block's, aligned, and for reads written before. The
// asynchronous proxy must not meet what the others wrote since the last proxy fence, whoever's that was.
enum class Access { kRead, kWrite, kAsyncRead, kAsyncWrite };
unsigned char* shared_bytes(unsigned address, unsigned bytes, Access access);
void proxy_fence();

// Work that goes on by itself. It takes effect when a wait asks for it, or at once (the other mode).
struct Queue {
  std::deque<std::function<void()>> effects;
  std::deque<std::size_t> groups;  // how many had been started when each was committed
  std::size_t started = 0;

  void start(std::function<void()> effect);
  void commit() { groups.push_back(started); }
  void wait(std::size_t pending);
  void finish(std::size_t count);  // the first `count` that were ever started
};
Queue& copies();   // cp.async, of the running thread
Queue& matmuls();  // wgmma, of its warp

void copy_async(unsigned destination, const void* source, unsigned bytes, bool valid);
// Nobody waits for these two: as late as possible is when all threads wait for something.
void copy_arrive(unsigned barrier);
void copy_bulk(unsigned destination, const void* source, unsigned bytes, unsigned barrier);

// Requests of a warp to banks and sectors, put together from what its lanes do between two rendezvous.
enum class Unit { kShared, kGlobalRead, kGlobalWrite };
void note(Unit unit, std::uintptr_t address, unsigned bytes);
// The same for an access to global memory, whose alignment it checks.
void note_global(Unit unit, const void* address, unsigned bytes);

// `least`: what the same requests would take without a bank conflict, and with every sector used in full. A thread's
// fma2 are counted one by one, a warp's mma as one, and a wgmma as the mma.m16n8k16 that it stands for.
struct Counters {
  std::uint64_t mma = 0, fma2 = 0;
  std::uint64_t shared_wavefronts = 0, shared_least = 0;
  struct Global {
    std::uint64_t bytes = 0, sectors = 0, least = 0;
  } read, written;
};
extern Counters counters;

}  // namespace emu

inline void __syncthreads() { emu::barrier(0, 0, true); }

inline void __syncwarp() { emu::meet("syncwarp", 32); }

namespace emu {

template <class T>
T shuffle(const char* name, unsigned mask, T value, int source) {
  if (mask != 0xFFFFFFFFu) fail("a shuffle of part of a warp is not modelled");
  struct Operand {
    T value;
    int source;
  } operand{value, source};
  warp_operation(name, &operand, [](void* const* operands) {
    T values[32];
    for (int l = 0; l < 32; ++l) values[l] = static_cast<Operand*>(operands[l])->value;
    for (int l = 0; l < 32; ++l) {
      Operand& o = *static_cast<Operand*>(operands[l]);
      o.value = values[o.source];
    }
  });
  return operand.value;
}
inline int lane() { return static_cast<int>(threadIdx.x % 32); }

}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emu::shuffle("shfl.idx", mask, value, source & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return emu::shuffle("shfl.xor", mask, value, (emu::lane() ^ lane_mask) & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta) {
  return emu::shuffle("shfl.up", mask, value, emu::lane() - (emu::lane() >= delta ? delta : 0));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta) {
  return emu::shuffle("shfl.down", mask, value, emu::lane() + (emu::lane() + delta < 32 ? delta : 0));
}

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  if (mask != 0xFFFFFFFFu) emu::fail("a vote of part of a warp is not modelled");
  unsigned operand = predicate;
  emu::warp_operation("vote.ballot", &operand, [](void* const* operands) {
    unsigned votes = 0;
    for (int l = 0; l < 32; ++l) votes |= *static_cast<unsigned*>(operands[l]) << l;
    for (int l = 0; l < 32; ++l) *static_cast<unsigned*>(operands[l]) = votes;
  });
  return operand;
}
inline int __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) == 0xFFFFFFFFu; }

template <class T>
T atomicAdd(T* p, T value) {
  emu::note_global(emu::Unit::kGlobalWrite, p, sizeof(T));
  const T old = *p;
  *p = old + value;
  return old;
}
