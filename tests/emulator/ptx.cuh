// The wrappers of kernels/ptx.cuh once more, for a host build: the same names, arguments and results.
#pragma once

#include "cuda.h"

#define DEVICE inline

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace ptx {

using Smem = u32;

DEVICE Smem smem_address(const void* generic) {
  return static_cast<Smem>(static_cast<const unsigned char*>(generic) - shared);
}

template <class T>
DEVICE T load(const T* p) {
  emu::note_global(emu::Unit::kGlobalRead, p, sizeof(T));
  return *p;
}

template <class T>
DEVICE void store(T* p, const T& v) {
  emu::note_global(emu::Unit::kGlobalWrite, p, sizeof(T));
  *p = v;
}

template <class T>
T load_shared(Smem a) {
  T v;
  emu::note(emu::Unit::kShared, a, sizeof(T));
  std::memcpy(&v, emu::shared_bytes(a, sizeof(T), emu::Access::kRead), sizeof(T));
  return v;
}

template <class T>
void store_shared(Smem a, const T& v) {
  emu::note(emu::Unit::kShared, a, sizeof(T));
  std::memcpy(emu::shared_bytes(a, sizeof(T), emu::Access::kWrite), &v, sizeof(T));
}

DEVICE u32 lds32(Smem a) { return load_shared<u32>(a); }
DEVICE uint2 lds64(Smem a) { return load_shared<uint2>(a); }
DEVICE uint4 lds128(Smem a) { return load_shared<uint4>(a); }
DEVICE void sts32(Smem a, u32 v) { store_shared(a, v); }
DEVICE void sts64(Smem a, uint2 v) { store_shared(a, v); }
DEVICE void sts128(Smem a, uint4 v) { store_shared(a, v); }

DEVICE u16 ldg16(const u16* p) { return load(p); }

DEVICE void cp_async16(Smem dst, const void* src, bool valid = true) { emu::copy_async(dst, src, 16, valid); }
DEVICE void cp_async_commit() { emu::copies().commit(); }
template <int kPending>
DEVICE void cp_async_wait() {
  emu::copies().wait(kPending);
}

DEVICE void bar_sync(u32 id, u32 threads) { emu::barrier(id, threads, true); }
DEVICE void bar_arrive(u32 id, u32 threads) { emu::barrier(id, threads, false); }

DEVICE u64 globaltimer() {
  static u64 now = 0;
  return ++now;
}

DEVICE uint4 ldmatrix_x4(Smem row) {
  struct Operand {
    Smem row;
    u32 result[4];
  } operand{row, {}};
  emu::note(emu::Unit::kShared, row, 16);
  emu::warp_operation("ldmatrix.x4", &operand, [](void* const* operands) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int lane = 0; lane < 32; ++lane) {
        // Lane l gets elements 2 (l % 4) and the next of row l / 4, whose address lane 8 matrix + l / 4 gave.
        const Smem from = static_cast<Operand*>(operands[8 * matrix + lane / 4])->row;
        const unsigned char* bytes = emu::shared_bytes(from, 16, emu::Access::kRead);
        std::memcpy(&static_cast<Operand*>(operands[lane])->result[matrix], bytes + lane % 4 * 4, 4);
      }
    }
  });
  return make_uint4(operand.result[0], operand.result[1], operand.result[2], operand.result[3]);
}

DEVICE u32 movmatrix_trans(u32 a) {
  emu::warp_operation("movmatrix.trans", &a, [](void* const* operands) {
    u16 matrix[8][8];
    for (int l = 0; l < 32; ++l) std::memcpy(&matrix[l / 4][l % 4 * 2], operands[l], 4);
    for (int l = 0; l < 32; ++l) {
      const int row = l / 4, column = l % 4 * 2;
      *static_cast<u32*>(operands[l]) = matrix[column][row] | static_cast<u32>(matrix[column + 1][row]) << 16;
    }
  });
  return a;
}

DEVICE float bf16_to_float(u16 h) { return __uint_as_float(static_cast<u32>(h) << 16); }

DEVICE float fp16_to_float(u16 h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float sign = h >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * std::ldexp(static_cast<float>(exponent ? mantissa | 1024 : mantissa), (exponent ? exponent : 1) - 25);
}

// The 16-bit float with `mantissa` stored bits and the given exponent range nearest to v, ties to even.
DEVICE u16 round_to_16(double v, int mantissa, int bias) {
  const u32 sign = std::signbit(v) ? 0x8000u : 0u, infinity = ((2 * bias + 1) << mantissa);
  if (std::isnan(v)) return static_cast<u16>(0x7FFF);
  if (v == 0) return static_cast<u16>(sign);
  int e = 0;
  const double magnitude = std::fabs(v);
  std::frexp(magnitude, &e);
  const int exponent = max(e - 1, 1 - bias);  // of the leading bit, or of the subnormals
  const double units = std::nearbyint(std::ldexp(magnitude, mantissa - exponent));
  const double steps = std::isinf(magnitude) ? infinity : units + (exponent + bias - 1) * std::ldexp(1.0, mantissa);
  return static_cast<u16>(sign | (steps >= infinity ? infinity : static_cast<u32>(steps)));
}
DEVICE u16 to_bf16(double v) { return round_to_16(v, 7, 127); }
DEVICE u16 to_fp16(double v) { return round_to_16(v, 10, 15); }

// A lane's fragment of A[16,16], written into it.
template <float (*kToFloat)(u16)>
void unpack_a(const u32 (&fragment)[4], int lane, float (&a)[16][16]) {
  for (int i = 0; i < 8; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, k = lane % 4 * 2 + i % 2 + i / 4 * 8;
    a[row][k] = kToFloat(static_cast<u16>(fragment[i / 2] >> i % 2 * 16));
  }
}

// A lane's fragment of D[16,N]. Products are exact in fp32; their sum is rounded once here, while hardware rounds
// inside in its own way.
template <int N>
void multiply_add(const float (&a)[16][16], const float (&b)[16][N], int lane, float* d) {
  for (int i = 0; i < N / 2; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
    d[i] = static_cast<float>(sum);
  }
}

template <float (*kToFloat)(u16)>
void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Operand {
    float* d;
    u32 a[4], b[2];
  } operand{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emu::warp_operation("mma.m16n8k16", &operand, [](void* const* operands) {
    ++emu::counters.mma;
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; ++l) {
      const Operand& o = *static_cast<Operand*>(operands[l]);
      unpack_a<kToFloat>(o.a, l, a);
      for (int h = 0; h < 2; ++h) {
        const int i = l / 4, k = l % 4 * 2 + h;
        b[k][i] = kToFloat(static_cast<u16>(o.b[0] >> 16 * h));
        b[k + 8][i] = kToFloat(static_cast<u16>(o.b[1] >> 16 * h));
      }
    }
    for (int l = 0; l < 32; ++l) multiply_add(a, b, l, static_cast<Operand*>(operands[l])->d);
  });
}
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma<bf16_to_float>(d, a, b0, b1); }
DEVICE void mma_fp16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma<fp16_to_float>(d, a, b0, b1); }

DEVICE u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }

DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) d |= static_cast<u32>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return d;
}

template <float (*kToFloat)(u16), u16 (*kRound)(double)>
u32 fma2(u32 a, u32 b, u32 c) {
  ++emu::counters.fma2;
  u32 d = 0;
  for (int h = 0; h < 32; h += 16) {
    const auto half = [h](u32 v) { return static_cast<double>(kToFloat(static_cast<u16>(v >> h))); };
    d |= static_cast<u32>(kRound(half(a) * half(b) + half(c))) << h;
  }
  return d;
}
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) { return fma2<bf16_to_float, to_bf16>(a, b, c); }
DEVICE u32 fma_fp16x2(u32 a, u32 b, u32 c) { return fma2<fp16_to_float, to_fp16>(a, b, c); }

DEVICE u32 pack_bf16x2(float lo, float hi) { return to_bf16(lo) | static_cast<u32>(to_bf16(hi)) << 16; }
DEVICE u32 pack_fp16x2(float lo, float hi) { return to_fp16(lo) | static_cast<u32>(to_fp16(hi)) << 16; }

DEVICE float exp2_approx(float x) { return std::exp2(x); }
DEVICE float rcp_approx(float x) { return 1.0f / x; }

}  // namespace ptx
