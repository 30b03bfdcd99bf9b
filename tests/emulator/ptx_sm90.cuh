// The wrappers of kernels/ptx_sm90.cuh once more, for a host build.
#pragma once

#include <functional>
#include <string>

#include "ptx.cuh"

namespace emu {
void start_matmul(std::function<void()> effect);
}  // namespace emu

namespace ptx {

DEVICE void mbarrier_init(Smem barrier, u32 arrivals) { emu::mbarrier_init(barrier, arrivals); }
DEVICE void mbarrier_arrive(Smem barrier) { emu::mbarrier_arrive(barrier, 1, 0); }
DEVICE void mbarrier_arrive_expect(Smem barrier, u32 bytes) { emu::mbarrier_arrive(barrier, 1, bytes); }
DEVICE void mbarrier_wait(Smem barrier, u32 parity) { emu::mbarrier_wait(barrier, parity); }
DEVICE void cp_async_arrive(Smem barrier) { copy_arrive(barrier); }

DEVICE void fence_proxy_async() { proxy_fence(); }
DEVICE void cp_async_bulk(Smem dst, const void* src, u32 bytes, Smem barrier) { copy_bulk(dst, src, bytes, barrier); }

// Lane 8 m + r writes row r of matrix m, whose words lanes 4 r .. 4 r + 3 have.
DEVICE void stmatrix_x4(Smem row, uint4 v) {
  const auto* words = gather("stmatrix.x4", std::bit_cast<std::array<u32, 4>>(v));
  const auto word = [&](int i) { return words[4 * (lane() % 8) + i][lane() / 8]; };
  sts128(row, make_uint4(word(0), word(1), word(2), word(3)));
}

// How many registers there are is the compiler's affair.
template <int kRegisters>
DEVICE void setmaxnreg_inc() {
  rendezvous("setmaxnreg.inc", 128);
}
template <int kRegisters>
DEVICE void setmaxnreg_dec() {
  rendezvous("setmaxnreg.dec", 128);
}

enum class Swizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

DEVICE u64 wgmma_descriptor(Smem b, Swizzle swizzle, u32 stride, u32 leading = 16) {
  if ((b | stride | leading) % 16)
    fail("a descriptor's address or distance is misaligned: %u, %u, %u", b, stride, leading);
  return static_cast<u64>(b >> 4) | static_cast<u64>(leading >> 4) << 16 | static_cast<u64>(stride >> 4) << 32 |
         static_cast<u64>(swizzle) << 62;
}

// Where the 16-byte chunk of row n lies that has elements 8 chunk .. 8 chunk + 7 of K.
DEVICE Smem chunk_of_b(u64 descriptor, u32 n, u32 chunk) {
  const auto field = [=](int bit) { return static_cast<u32>(descriptor >> bit & 0x3FFF) << 4; };
  const u32 mode = static_cast<u32>(descriptor >> 62), width = mode ? 256 >> mode : 16;
  if (mode && field(0) % (8 * width) >= width)
    fail("wgmma wants rows of %u bytes aligned to %u, not at %u", width, 8 * width, field(0));
  const Smem address = field(0) + n / 8 * field(32) + n % 8 * width + chunk * (mode ? 16 : field(16));
  return address ^ (address >> 3 & (width - 16));
}

// For each warp N / 8 mma.m16n8k16. B is read and D is written when the wait of a warp asks for it. A's registers are
// read at once, so writing them too early is not found; nor are a missing wgmma_fence or wgmma_pin, and B's bank
// conflicts are not counted.
template <int N, float (*kToFloat)(u16)>
void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  Fragments mine{{}, {}, d};
  unpack<kToFloat>(a, mine.a);
  // All threads of the warpgroup want the same, or are in different operations.
  const std::string name = "wgmma.m64n" + std::to_string(N) + "k16 with descriptor " + std::to_string(b) +
                           (accumulate ? ", accumulating" : "");
  const Fragments* warp = gather<128>(name.c_str(), mine) + threadIdx.x / 32 % 4 * 32;
  if (lane() != 0) return;
  std::array<Fragments, 32> lanes;
  std::copy_n(warp, 32, lanes.begin());
  start_matmul([=]() mutable {
    for (u32 n = 0; n < N; n += 8) {
      for (u32 l = 0; l < 32; ++l) {
        u32 words[2];
        for (u32 chunk = 0; chunk < 2; ++chunk) {
          const Smem from = chunk_of_b(b, n + l / 4, chunk) + l % 4 * 4;
          std::memcpy(&words[chunk], shared_bytes(from, 4, kAsyncRead), 4);
        }
        unpack<kToFloat>(words, lanes[l].b);
        if (!accumulate) std::fill_n(lanes[l].d, 4, 0.0f);
      }
      for (int l = 0; l < 32; ++l) multiply_add(lanes.data(), l);
      for (Fragments& f : lanes) f.d += 4;
    }
  });
}
template <int N>
DEVICE void wgmma_bf16(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate = true) {
  wgmma<N, bf16_to_float>(d, a, b, accumulate);
}
template <int N>
DEVICE void wgmma_fp16(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate = true) {
  wgmma<N, fp16_to_float>(d, a, b, accumulate);
}

DEVICE void wgmma_fence() { rendezvous("wgmma.fence", 32); }
DEVICE void wgmma_commit() {
  rendezvous("wgmma.commit_group", 32);
  if (lane() == 0) emu::commit(kMatmuls);
}
template <int kPending>
DEVICE void wgmma_wait() {
  rendezvous("wgmma.wait_group", 32);
  emu::wait(kMatmuls, kPending);
}
template <int kCount>
DEVICE void wgmma_pin(float (&registers)[kCount]) {}
template <int kCount>
DEVICE void wgmma_pin(u32 (&registers)[kCount]) {}

}  // namespace ptx
