// The wrappers of kernels/ptx.cuh once more, for a host build: the same names, arguments and results.
#pragma once

#include "cuda.h"

#define DEVICE inline

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace ptx {

using namespace emu;
using Smem = u32;

DEVICE Smem smem_address(const void* generic) {
  return static_cast<Smem>(static_cast<const unsigned char*>(generic) - shared);
}

template <class T>
DEVICE T load(const T* p) {
  note(kGlobal, aligned(p, sizeof(T)), sizeof(T));
  return *p;
}
template <class T>
DEVICE void store(T* p, const T& v) {
  aligned(p, sizeof(T));
  *p = v;
}
template <class T>
T load_shared(Smem a) {
  T v;
  note(kShared, a, sizeof(T));
  std::memcpy(&v, shared_bytes(a, sizeof(T), kRead), sizeof(T));
  return v;
}
template <class T>
void store_shared(Smem a, const T& v) {
  note(kShared, a, sizeof(T));
  std::memcpy(shared_bytes(a, sizeof(T), kWrite), &v, sizeof(T));
}

DEVICE u32 lds32(Smem a) { return load_shared<u32>(a); }
DEVICE uint2 lds64(Smem a) { return load_shared<uint2>(a); }
DEVICE uint4 lds128(Smem a) { return load_shared<uint4>(a); }
DEVICE void sts32(Smem a, u32 v) { store_shared(a, v); }
DEVICE void sts64(Smem a, uint2 v) { store_shared(a, v); }
DEVICE void sts128(Smem a, uint4 v) { store_shared(a, v); }
DEVICE u16 ldg16(const u16* p) { return load(p); }
DEVICE uint4 load_written(const uint4* p) { return load(p); }

DEVICE void cp_async16(Smem dst, const void* src, bool valid = true) { copy_async(dst, src, 16, valid); }
DEVICE void cp_async_commit() { emu::commit(kCopies); }
template <int kPending>
DEVICE void cp_async_wait() {
  emu::wait(kCopies, kPending);
}
DEVICE void bar_sync(u32 id, u32 threads) { emu::barrier(id, threads, true); }
DEVICE void bar_arrive(u32 id, u32 threads) { emu::barrier(id, threads, false); }

DEVICE u64 globaltimer() {
  static u64 now = 0;
  return ++now;
}

// Lane l gets word l % 4 of row l / 4 of each matrix; lane 8 m + r has read row r of matrix m.
DEVICE uint4 ldmatrix_x4(Smem row) {
  const auto* rows = gather("ldmatrix.x4", std::bit_cast<std::array<u32, 4>>(lds128(row)));
  const auto word = [&](int matrix) { return rows[8 * matrix + lane() / 4][lane() % 4]; };
  return make_uint4(word(0), word(1), word(2), word(3));
}

DEVICE u32 redux_max(u32 v) {
  const u32* lanes = gather("redux.max", v);
  for (int l = 0; l < 32; ++l) v = max(v, lanes[l]);
  return v;
}
DEVICE u32 redux_min(u32 v) {
  const u32* lanes = gather("redux.min", v);
  for (int l = 0; l < 32; ++l) v = min(v, lanes[l]);
  return v;
}

DEVICE u32 movmatrix_trans(u32 a) {
  const u32* words = gather("movmatrix.trans", a);
  const int row = lane() / 4, column = lane() % 4 * 2;
  const auto element = [&](int i, int j) { return words[4 * i + j / 2] >> j % 2 * 16 & 0xFFFF; };
  return element(column, row) | element(column + 1, row) << 16;
}

DEVICE float bf16_to_float(u16 h) { return __uint_as_float(static_cast<u32>(h) << 16); }

DEVICE float fp16_to_float(u16 h) {
  const u32 sign = (h & 0x8000u) << 16, magnitude = (h & 0x7FFFu) << 13;
  if ((h & 0x7C00) == 0x7C00) return __uint_as_float(sign | 0x7F800000 | magnitude);
  return __uint_as_float(sign | magnitude) * 0x1p112f;  // fp32's exponents begin so much lower
}

// The 16-bit float with `kMantissa` stored bits and that exponent bias nearest to v, ties to even.
template <int kMantissa, u64 kBias>
u16 round_to_16(double v) {
  if (v != v) return 0x7FFF;
  // Times 2^(kBias - 1023) a double's exponent field is that of the 16-bit float, in subnormals too.
  const u64 bits = std::bit_cast<u64>(v * std::bit_cast<double>(kBias << 52)), magnitude = bits << 1 >> 1;
  constexpr int kDropped = 52 - kMantissa;
  const u64 half = (u64{1} << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
  return static_cast<u16>(bits >> 63 << 15 | min((magnitude + half) >> kDropped, (2 * kBias + 1) << kMantissa));
}
DEVICE u16 to_bf16(double v) { return round_to_16<7, 127>(v); }
DEVICE u16 to_fp16(double v) { return round_to_16<10, 15>(v); }

template <float (*kToFloat)(u16), int kWords>
void unpack(const u32 (&words)[kWords], float (&values)[2 * kWords]) {
  for (int i = 0; i < 2 * kWords; ++i) values[i] = kToFloat(static_cast<u16>(words[i / 2] >> i % 2 * 16));
}

template <float (*kToFloat)(u16)>
void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Fragments mine{{}, {}, d};
  unpack<kToFloat>(a, mine.a);
  unpack<kToFloat>({b0, b1}, mine.b);
  multiply_add(gather("mma.m16n8k16", mine), lane());
}
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma<bf16_to_float>(d, a, b0, b1); }
DEVICE void mma_fp16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma<fp16_to_float>(d, a, b0, b1); }

DEVICE float exp2_approx(float x) { return __builtin_exp2f(x); }
DEVICE float rcp_approx(float x) { return 1.0f / x; }
DEVICE u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) d |= static_cast<u32>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return d;
}

DEVICE u32 pack_bf16x2(float lo, float hi) { return to_bf16(lo) | static_cast<u32>(to_bf16(hi)) << 16; }
DEVICE u32 pack_fp16x2(float lo, float hi) { return to_fp16(lo) | static_cast<u32>(to_fp16(hi)) << 16; }

template <float (*kToFloat)(u16), u16 (*kRound)(double)>
u32 fma2(u32 a, u32 b, u32 c) {
  ++counters.fma2;
  const auto half = [](u32 v, int h) { return double{kToFloat(static_cast<u16>(v >> h))}; };
  const auto fma = [=](int h) { return u32{kRound(half(a, h) * half(b, h) + half(c, h))} << h; };
  return fma(0) | fma(16);
}
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) { return fma2<bf16_to_float, to_bf16>(a, b, c); }
DEVICE u32 fma_fp16x2(u32 a, u32 b, u32 c) { return fma2<fp16_to_float, to_fp16>(a, b, c); }

}  // namespace ptx
