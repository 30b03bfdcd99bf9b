// What the prefill kernels share: the problem, which weight row an MMA row stands for, and how a tile is written.
//
//   plain  out[row, n] = sum_k w[e, n, k] x[row, k] + bias[e, n], written to the rows' original places
//   GLU    out[row, n] = silu(gate[row, n]) * up[row, n], two such products, written in sorted order with n
//          permuted as the next matmul reads it: nothing is gathered, sorted or permuted between the two
//
// Weights are the A operand (out^T = W x^T). A block has two panels of 16 weight rows a warp: gate and up in GLU,
// neighbours else. A warp owns 16 rows of each panel and every token of the tile, so no weight is dequantised twice,
// and gate and up of an output meet in one thread. Which weight row an MMA row stands for is free; it is chosen so
// that after the transposition a thread holds 16 (GLU: 8) contiguous bytes of output.
#pragma once

#include "quant.cuh"

struct Problem {
  const u16* x;                   // [x_rows, k_pad], K permuted
  const unsigned char *w, *w_up;  // [experts, n, k * bits / 8]; GLU: w is the gate
  const u16 *scales, *scales_up;  // [experts, n, k / group]
  const u16 *biases, *biases_up;  // the same
  const u16 *bias, *bias_up;      // [experts, n], read if has_bias
  const int4* tiles;              // route.cu
  const int* row_ids;             // [rows]
  u16* out;                       // plain: [rows, n]; GLU: [rows, out_width]
  int experts, n, k, k_pad;
  int x_div;  // a sorted row's input is x[row_ids[row] / x_div]; 0: x[row]
  int has_bias;
  int scatter;              // plain: a sorted row goes to row_ids[row]; 0: to row
  int out_width, out_bits;  // GLU: padded width, and the bits whose K permutation `out` is written in

  // Output columns, and the row of x that belongs to a sorted row.
  DEVICE int width(bool glu) const { return glu ? out_width : n; }
  DEVICE int x_row(int sorted) const { return x_div ? ptx::load(row_ids + sorted) / x_div : sorted; }
};

// Where MMA row i of 8-row block b stands among the 8 * kRun rows that interleave: once transposed, lane t of a
// quad holds rows i = 2 t, 2 t + 1 of every block, and these must be neighbours in memory.
template <int kRun>
DEVICE int interleaved_row(int b, int i) {
  return 2 * kRun * (i / 2) + 2 * b + i % 2;
}

// A block's work: a tile of tokens of one expert against two panels of weight rows.
template <class T, bool kGlu, int kWarps>
struct Tile {
  static constexpr int kPanel = 16 * kWarps, kRows = 2 * kPanel;
  static constexpr int kColumns = kGlu ? kPanel : kRows;  // output features of a block
  static constexpr int kRun = kGlu ? 2 : 4;               // 8-row blocks whose rows interleave

  const Problem& p;
  const int4 tile;  // expert, first sorted row, rows
  const int n0;     // first output feature (plain) or first permuted position (GLU)
  const int warp, lane;

  // Weight row that row r of the block holds. In GLU both panels hold the same features.
  DEVICE int weight_row(int r) const { return kGlu ? logical_k(n0 + r % kPanel, p.out_bits) : n0 + r; }

  // Row of the block that MMA row i of half `half` of the warp's m16 block of a panel stands for.
  DEVICE int block_row(int panel, int half, int i) const {
    if constexpr (kGlu) return panel * kPanel + warp * 16 + interleaved_row<kRun>(half, i);
    return warp * 32 + interleaved_row<kRun>(2 * panel + half, i);
  }

  // Bias of the row that a lane accumulates in one half of a panel's m16 block.
  DEVICE float load_bias(int panel, int half) const {
    const int row = weight_row(block_row(panel, half, lane / 4));
    if (!p.has_bias || row >= p.n) return 0.0f;
    const u16* bias = kGlu && panel == 1 ? p.bias_up : p.bias;
    return T::to_float(ptx::ldg16(bias + static_cast<i64>(tile.x) * p.n + row));
  }

  // sum(panel, j, c): element c of the warp's MMA fragment of 8-token block j, of which there are `blocks`.
  template <int kMostBlocks, class Sum>
  DEVICE void store(int blocks, const Sum& sum) const {
    const int column = n0 + warp * 8 * kRun + 2 * kRun * (lane % 4);
    float bias[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i / 2][i % 2] = load_bias(i / 2, i % 2);
#pragma unroll
    for (int j = 0; j < kMostBlocks; ++j) {
      if (j >= blocks) return;
      u32 pairs[kRun];  // of two tokens of a row; transposed, of two rows of a token
#pragma unroll
      for (int b = 0; b < kRun; ++b) {
        const auto value = [&](int panel, int c) { return sum(panel, j, b % 2 * 2 + c) + bias[panel][b % 2]; };
        const u32 packed = kGlu ? T::pack(swiglu(value(0, 0), value(1, 0)), swiglu(value(0, 1), value(1, 1)))
                                : T::pack(value(b / 2, 0), value(b / 2, 1));
        pairs[b] = ptx::movmatrix_trans(packed);
      }
      const int token = 8 * j + lane / 4, sorted = tile.y + token;
      if (token >= tile.z || column >= p.width(kGlu)) continue;
      const i64 row = !kGlu && p.scatter ? ptx::load(p.row_ids + sorted) : sorted;
      u16* out = p.out + row * p.width(kGlu) + column;
      if constexpr (kGlu) {
        ptx::store(reinterpret_cast<uint2*>(out), make_uint2(pairs[0], pairs[1]));
      } else {
        ptx::store(reinterpret_cast<uint4*>(out), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
    }
  }

  // Rows whose expert id was out of range; GLU's are never read.
  DEVICE void store_zeros() const {
    if constexpr (!kGlu) {
      for (int i = 32 * warp + lane; i < tile.z * (kRows / 8); i += 32 * kWarps) {
        const int column = n0 + i % (kRows / 8) * 8, sorted = tile.y + i / (kRows / 8);
        if (column >= p.n) continue;
        const i64 row = p.scatter ? ptx::load(p.row_ids + sorted) : sorted;
        ptx::store(reinterpret_cast<uint4*>(p.out + row * p.n + column), make_uint4(0, 0, 0, 0));
      }
    }
  }
};
