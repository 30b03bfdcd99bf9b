// MLX's affine packing -> MMA operand fragments.
//
// MLX packs element k of a row into bits [bits * (k % pack), ...) of 32-bit word k / pack, pack = 32 / bits; a
// weight is q * scale + bias with one (scale, bias) per `group` elements. Nothing is repacked. Instead K is
// permuted inside a block, the same way for weights and activations, which leaves every dot product as it is:
//
//   A block is 64 bytes of a weight row (128 elements at 4 bits, 64 at 8 bits). Lane t of a quad owns its 16-byte
//   quarter t: one 128-bit load gives it words 0..3. An MMA step s over 16 physical positions wants, from lane t,
//   positions 2t + h and 2t + 8 + h (h = 0, 1), that is 16 s + 8 u + 2 t + h for u = 0, 1, and these are
//     4 bits: logical 32 t + 8 (s / 2) + 2 (s % 2) + u + 4 h   = nibbles r and r + 4 of word s / 2, r = 2 (s % 2) + u
//     8 bits: logical 16 t + 4 s + u + 2 h                     = bytes u and u + 2 of word s
//   so a pair is (word >> bits * r) & mask: no shuffle. A lane's elements are consecutive in logical K, so
//   it needs one scale per row and block for every group size from 32 up.
#pragma once

#include "ptx.cuh"

template <int kBits>
struct KBlock {
  static constexpr int kBytes = 64;
  static constexpr int kSize = kBytes * 8 / kBits;  // elements of K
  static constexpr int kSteps = kSize / 16;         // MMA steps
};

// The logical element at physical position p >= 0, both in units of K.
template <int kBits>
DEVICE int logical_k(u32 p) {
  constexpr u32 kSize = KBlock<kBits>::kSize;
  const u32 block = p / kSize * kSize, s = p % kSize / 16, u = p / 8 % 2, t = p / 2 % 4, h = p % 2;
  if constexpr (kBits == 4) return static_cast<int>(block + 32 * t + 8 * (s / 2) + 2 * (s % 2) + u + 4 * h);
  return static_cast<int>(block + 16 * t + 4 * s + u + 2 * h);
}

DEVICE int logical_k(u32 p, int bits) { return bits == 4 ? logical_k<4>(p) : logical_k<8>(p); }

struct Bf16 {
  static DEVICE u32 ones() { return 0x3F803F80u; }
  template <int kBits>
  static constexpr float kOffset = kBits == 4 ? 128.0f : 0.0f;  // what `offset_pair` adds

  static DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { ptx::mma_bf16(d, a, b0, b1); }
  static DEVICE u32 fma2(u32 a, u32 b, u32 c) { return ptx::fma_bf16x2(a, b, c); }
  static DEVICE u32 pack(float lo, float hi) { return ptx::pack_bf16x2(lo, hi); }
  static DEVICE float to_float(u16 h) { return ptx::bf16_to_float(h); }

  // Exact integers as bf16x2. 0x4300 is 128 with an ulp of 1, so or-ing an integer below 128 in adds it.
  static DEVICE u32 int4_pair(u32 word, int r) {
    const u32 biased = ptx::and_or(word >> (4 * r), 0x000F000Fu, 0x43004300u);
    return fma2(biased, 0x3F803F80u, 0xC300C300u);  // - 128
  }
  static DEVICE u32 int8_pair(u32 word, int u) {
    const u32 v = word >> (8 * u);
    const u32 biased = ptx::and_or(v, 0x007F007Fu, 0x43004300u);
    const u32 excess = (~v & 0x00800080u) * 0x86u;  // bf16 128 where bit 7 is clear, else 0
    return fma2(excess, 0xBF80BF80u, biased);
  }

  // The pair of int4_pair or int8_pair plus kOffset, with fewer instructions.
  template <int kBits>
  static DEVICE u32 offset_pair(u32 word, int i) {
    if constexpr (kBits == 4) return ptx::and_or(word >> (4 * i), 0x000F000Fu, 0x43004300u);
    return int8_pair(word, i);
  }
};

struct Fp16 {
  static DEVICE u32 ones() { return 0x3C003C00u; }
  template <int kBits>
  static constexpr float kOffset = 1024.0f;

  static DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { ptx::mma_fp16(d, a, b0, b1); }
  static DEVICE u32 fma2(u32 a, u32 b, u32 c) { return ptx::fma_fp16x2(a, b, c); }
  static DEVICE u32 pack(float lo, float hi) { return ptx::pack_fp16x2(lo, hi); }
  static DEVICE float to_float(u16 h) { return ptx::fp16_to_float(h); }

  // 0x6400 is 1024 with an ulp of 1; an odd nibble is left in place and counts 16 times.
  static DEVICE u32 int4_pair(u32 word, int r) {
    const u32 v = word >> (4 * (r & 2));
    if (r & 1) return fma2(ptx::and_or(v, 0x00F000F0u, 0x64006400u), 0x2C002C00u, 0xD400D400u);  // / 16 - 64
    return fma2(ptx::and_or(v, 0x000F000Fu, 0x64006400u), 0x3C003C00u, 0xE400E400u);             // - 1024
  }
  static DEVICE u32 int8_pair(u32 word, int u) { return fma2(offset_pair<8>(word, u), 0x3C003C00u, 0xE400E400u); }

  template <int kBits>
  static DEVICE u32 offset_pair(u32 word, int i) {
    if constexpr (kBits == 4) return ptx::and_or(word >> (4 * i), 0x000F000Fu, 0x64006400u);
    return ptx::prmt(word, 0x64646464u, i ? 0x4341u : 0x4240u);
  }
};

// Weights of MMA step s (positions 8 u .. 8 u + 7 of it) from a lane's four words: one rounding, in the fma.
template <class T, int kBits>
DEVICE u32 dequantize(const uint4& words, int s, int u, u32 scale2, u32 bias2) {
  const int j = kBits == 4 ? s / 2 : s;
  const u32 word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
  const u32 q = kBits == 4 ? T::int4_pair(word, 2 * (s % 2) + u) : T::int8_pair(word, u);
  return T::fma2(q, scale2, bias2);
}

// silu(gate) * up.
DEVICE float swiglu(float gate, float up) {
  return gate * ptx::rcp_approx(1.0f + ptx::exp2_approx(-1.4426950408889634f * gate)) * up;
}
