// CUDA's built-ins for a host build, and the machine under them: a block's threads are fibers on one core.
//
// A thread runs until it needs others: a barrier, or a warp operation, which is executed once all 32 lanes have brought
// their operands. Which warp goes on next is drawn from a seeded generator, so that a missing barrier changes results.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

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
inline int __popc(unsigned v) { return std::popcount(v); }

extern uint3 threadIdx, blockIdx;
extern thread_local unsigned char shared[];

namespace emu {

// Ends the run: what is wrong, with the kernel, block and thread that did it.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A rendezvous of the 32 lanes. `execute` sees every lane's operand, in lane order, and leaves results in them.
void warp_operation(const char* name, void* operand, void (*execute)(void* const* operands));

void barrier();

// `bytes` of shared memory at `address`, checked: inside the block's, aligned, and for reads written before.
enum class Access { kRead, kWrite };
unsigned char* shared_bytes(unsigned address, unsigned bytes, Access access);

// Asynchronous copies of the running thread. They land when a wait asks for them, or at once (the other mode).
void copy_async(unsigned destination, const void* source, unsigned bytes, bool valid);
void copy_commit();
void copy_wait(int pending);

// Requests of a warp to banks and sectors, put together from what its lanes do between two rendezvous.
enum class Unit { kShared, kGlobal };
void note(Unit unit, std::uintptr_t address, unsigned bytes);

// `least`: what the same requests would take without a bank conflict, and with every sector used in full. A thread's
// fma2 are counted one by one, a warp's mma as one.
struct Counters {
  std::uint64_t mma = 0, fma2 = 0;
  std::uint64_t shared_wavefronts = 0, shared_least = 0;
  std::uint64_t global_bytes = 0, global_sectors = 0, global_least = 0;
};
extern Counters counters;

}  // namespace emu

inline void __syncthreads() { emu::barrier(); }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  if (mask != 0xFFFFFFFFu) emu::fail("a shuffle of part of a warp is not modelled");
  struct Operand {
    T value;
    int lane_mask;
  } operand{value, lane_mask};
  emu::warp_operation("shfl.xor", &operand, [](void* const* operands) {
    T values[32];
    for (int l = 0; l < 32; ++l) values[l] = static_cast<Operand*>(operands[l])->value;
    for (int l = 0; l < 32; ++l) {
      Operand& o = *static_cast<Operand*>(operands[l]);
      o.value = values[l ^ o.lane_mask];
    }
  });
  return operand.value;
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
