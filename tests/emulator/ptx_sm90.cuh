// The wrappers of kernels/ptx_sm90.cuh once more, for a host build.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "ptx.cuh"

namespace ptx {

DEVICE void mbarrier_init(Smem barrier, u32 arrivals) { emu::mbarrier_init(barrier, arrivals); }
DEVICE void mbarrier_arrive(Smem barrier) { emu::mbarrier_arrive(barrier, 0); }
DEVICE void mbarrier_arrive_expect(Smem barrier, u32 bytes) { emu::mbarrier_arrive(barrier, bytes); }
DEVICE void mbarrier_wait(Smem barrier, u32 parity) { emu::mbarrier_wait(barrier, parity); }
DEVICE void cp_async_arrive(Smem barrier) { emu::copy_arrive(barrier); }

DEVICE void fence_proxy_async() { emu::proxy_fence(); }
DEVICE void cp_async_bulk(Smem dst, const void* src, u32 bytes, Smem barrier) {
  emu::copy_bulk(dst, src, bytes, barrier);
}

DEVICE void stmatrix_x4(Smem row, uint4 v) {
  struct Operand {
    Smem row;
    u32 values[4];
  } operand{row, {v.x, v.y, v.z, v.w}};
  emu::note(emu::Unit::kShared, row, 16);
  emu::warp_operation("stmatrix.x4", &operand, [](void* const* operands) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int lane = 0; lane < 32; ++lane) {
        const Smem to = static_cast<Operand*>(operands[8 * matrix + lane / 4])->row;
        unsigned char* bytes = emu::shared_bytes(to, 16, emu::Access::kWrite);
        std::memcpy(bytes + lane % 4 * 4, &static_cast<Operand*>(operands[lane])->values[matrix], 4);
      }
    }
  });
}

// How many registers there are is the compiler's affair.
template <int kRegisters>
DEVICE void setmaxnreg_inc() {
  emu::meet("setmaxnreg.inc", 128);
}
template <int kRegisters>
DEVICE void setmaxnreg_dec() {
  emu::meet("setmaxnreg.dec", 128);
}

enum class Swizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

DEVICE u64 wgmma_descriptor(Smem b, Swizzle swizzle, u32 stride, u32 leading = 16) {
  if ((b | stride | leading) % 16)
    emu::fail("a descriptor's address or distance is misaligned: %u, %u, %u", b, stride, leading);
  return static_cast<u64>(b >> 4) | static_cast<u64>(leading >> 4) << 16 | static_cast<u64>(stride >> 4) << 32 |
         static_cast<u64>(swizzle) << 62;
}

// Where the 16-byte chunk of row n lies that has elements 8 chunk .. 8 chunk + 7 of K.
DEVICE Smem chunk_of_b(u64 descriptor, u32 n, u32 chunk) {
  const auto field = [=](int bit) { return static_cast<u32>(descriptor >> bit & 0x3FFF) << 4; };
  const u32 mode = static_cast<u32>(descriptor >> 62), width = mode ? 256 >> mode : 16;
  if (mode && field(0) % (8 * width) >= width)
    emu::fail("wgmma wants rows of %u bytes aligned to %u, not at %u", width, 8 * width, field(0));
  const Smem address = field(0) + n / 8 * field(32) + n % 8 * width + chunk * (mode ? 16 : field(16));
  return address ^ (address >> 3 & (width - 16));
}

// B is read and D is written when the wait of a warp asks for it. A's registers are read at once, so writing them too
// early is not found; nor are a missing wgmma_fence or wgmma_pin, and B's bank conflicts are not counted.
template <int N, float (*kToFloat)(u16)>
void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  struct Operand {
    emu::Queue* queue;
    float* d;
    u32 a[4];
    u64 b;
    bool accumulate;
  } operand{&emu::matmuls(), d, {a[0], a[1], a[2], a[3]}, b, accumulate};
  static const std::string name = "wgmma.m64n" + std::to_string(N) + "k16";
  emu::rendezvous(name.c_str(), 128, &operand, [](void* const* operands) {
    const Operand& first = *static_cast<Operand*>(operands[0]);
    for (int w = 0; w < 4; ++w) {
      std::array<Operand, 32> lanes;
      for (int l = 0; l < 32; ++l) {
        lanes[l] = *static_cast<Operand*>(operands[32 * w + l]);
        if (lanes[l].b != first.b || lanes[l].accumulate != first.accumulate)
          emu::fail("the threads of a warpgroup want different wgmma");
      }
      lanes[0].queue->start([lanes] {
        emu::counters.mma += N / 8;
        float a[16][16], b[16][N];
        for (int l = 0; l < 32; ++l) unpack_a<kToFloat>(lanes[l].a, l, a);
        for (int n = 0; n < N; ++n) {
          for (int k = 0; k < 16; k += 8) {
            u16 chunk[8];
            std::memcpy(chunk, emu::shared_bytes(chunk_of_b(lanes[0].b, n, k / 8), 16, emu::Access::kAsyncRead), 16);
            for (int i = 0; i < 8; ++i) b[k + i][n] = kToFloat(chunk[i]);
          }
        }
        for (int l = 0; l < 32; ++l) {
          if (!lanes[l].accumulate) std::fill_n(lanes[l].d, N / 2, 0.0f);
          multiply_add(a, b, l, lanes[l].d);
        }
      });
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

DEVICE void wgmma_fence() { emu::meet("wgmma.fence", 32); }
DEVICE void wgmma_commit() {
  emu::warp_operation("wgmma.commit_group", nullptr, [](void* const*) { emu::matmuls().commit(); });
}
template <int kPending>
DEVICE void wgmma_wait() {
  emu::warp_operation("wgmma.wait_group", nullptr, [](void* const*) { emu::matmuls().wait(kPending); });
}
template <int kCount>
DEVICE void wgmma_pin(float (&registers)[kCount]) {}
template <int kCount>
DEVICE void wgmma_pin(u32 (&registers)[kCount]) {}

}  // namespace ptx
