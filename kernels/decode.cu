// Quantized matmul for few rows: every weight that has a row is read once for up to kColumns rows.
//
//   dense  out[row, n] = sum_k w[n, k] x[row, k] + bias[n]
//   plain  out[row, n] = sum_k w[e, n, k] x[row / x_div, k] + bias[e, n], e = ids[row]
//   GLU    out[row, n] = silu(gate[row, n]) * up[row, n], two such products
//
// Weights are the A operand (out^T = W x^T) in tiles of 16 rows; GLU: gate and up in turn. The four warps of a block
// split K in four, whatever the number of rows: the bits of a row depend neither on its neighbours nor on how many
// there are. A warp streams its part of the weights through a ring of its own, twice 32 bytes of each weight row (a span)
// a stage, and meets the others only to add up. Activations come from L1 or L2 straight into registers, ahead of time.
//
// The MMAs see integers: q + T::kOffset. A span's sum gets its scale, and its bias with the sum of the span's x (one
// more MMA, with ones for weights), in fp32. That is fewer instructions than dequantising, and rounds less.
//
// Routed: nothing is sorted. Each block looks through the ids itself: its expert is `slot` if there are slots for all
// experts, else that of row `slot`, unless an earlier row has it. The last expert stands for ids out of range.
#include "quant.cuh"

enum : int { kWarps = 4, kThreads = 32 * kWarps, kParts = kWarps };
enum : int {
  kSpanBytes = 32,  // of a weight row: what is multiplied at once
  kIds = 8,         // that a lane has under way
  kPair = 2,        // spans of a stage of the ring
  kRowsAhead = 8,   // rows that are combined at once
};

template <class T, int kBits_, int kGroup_, bool kRouted_, bool kGlu_, int kBlocks_, int kTiles_, int kStages_>
struct Config {
  using Type = T;
  // An enumeration has no storage: NVRTC would put a constant of each name into the machine code.
  enum : int {
    kRouted = kRouted_,
    kGlu = kGlu_,
    kBits = kBits_,
    kGroup = kGroup_,
    kBlocks = kBlocks_,
    kTiles = kTiles_,
    kMatrices = kGlu ? 2 : 1,
    kStages = kStages_,
    kSpan = kSpanBytes * 8 / kBits,             // elements of K
    kGroups = kSpan > kGroup ? 2 : 1,           // that a span touches
    kUnit = kSpan / kGroups,                    // elements of K that always lie in it together
    kSteps = kUnit / 16,                        // MMA steps of each
    kFit = 32 * kGroup / kSpan / kTiles,        // spans whose scales find room,
    kBatch = kFit < 16 ? kFit : 16,             // and how many are read together
    kLaneGroups = kBatch * kSpan / kGroup / 4,  // whose scales a lane reads, a batch
    kScaleWords = (kLaneGroups + 1) / 2,
    kScalePitch = 128 + (kLaneGroups < 4 ? 32 / kLaneGroups : 8),  // bytes of a group's 16 rows: quads write apart
    kAhead = kBlocks > 1 || (kGroups == 2 && kTiles > 2) ? 1 : 2,  // spans that x is loaded ahead
    kPieces = kSpan / 32,                                          // 16-byte pieces of x that a lane needs a span
    kColumns = 8 * kBlocks,                                        // rows of x at once
    kWarpRows = 16 * kTiles / (kGlu ? 2 : 1),                      // output features of a warp
    kTileBytes = 16 * kSpanBytes,
    kSpanPitch = kTiles * kTileBytes + 64,  // what a row's lanes copy lies in different banks
    kStageBytes = kPair * kSpanPitch,
    kRingBytes = kStages * kStageBytes,
    kPitch = 16 * kTiles + 4,           // floats between columns: two lanes, two banks
    kSumBytes = kColumns * kPitch * 4,  // a warp's sums
    kScaleBytes = kTiles * 4 * kLaneGroups * kScalePitch,
    kScaleOffset = kWarps * kRingBytes,
    kSumOffset = kScaleOffset + kWarps * kScaleBytes,
    kListOffset = kSumOffset + kWarps * kSumBytes,
    kSharedBytes = kListOffset + (kRouted ? kWarps * kColumns * 4 : 0),
  };

  static_assert(kSpan <= 2 * kGroup, "a span touches at most two groups");
  static_assert(kLaneGroups >= 1 && kBatch % kPair == 0, "a lane reads whole groups, a batch has whole pairs");
  static_assert(kTiles % 2 == 0, "gate and up come in pairs, and tiles are multiplied two at a time");
};

struct Problem {
  const u16* x;                   // [rows / x_div, k]; dense: [rows, k]
  const unsigned char *w, *w_up;  // [experts, n, k * bits / 8]; GLU: w is the gate
  const u16 *scales, *scales_up;  // [experts, n, k / group]
  const u16 *biases, *biases_up;  // the same
  const u16 *bias, *bias_up;      // [experts, n], read if has_bias
  const int* ids;                 // routed: [rows]
  u16* out;                       // [rows, n]
  int rows, n, k, has_bias;
  int experts, x_div;
  // Plain, if `top_k`: combined[token, n] = sum_j token_weights[token, j] out[token * top_k + j, n], by the last block of
  // each strip of output features, which `finished` tells: a count of blocks for each strip, 0 before.
  const float* token_weights;  // [rows / top_k, top_k]
  int* finished;
  u16* combined;
  int top_k;
  int split;        // warps that share the parts of K: 1 or all
  int per_sm, sms;  // dense: blocks that each multiprocessor gets to share the tiles evenly. 0: all blocks are full
};

// What a block does for one expert (or for the one dense matrix).
template <class C>
struct Block {
  using T = typename C::Type;
  using Sums = float[C::kTiles][C::kBlocks][4];                 // MMA fragments
  using Tokens = uint4[C::kBlocks][C::kPieces];                 // a lane's x of one span
  using Fragments = u32[C::kGroups][C::kSteps][C::kBlocks][2];  // the same as B operands

  const Problem& p;
  const int expert;
  const int n0;     // first output feature of the block
  const int tiles;  // of a warp that are in use
  const ptx::Smem smem;
  const int warp, lane;

  DEVICE ptx::Smem ring() const { return smem + warp * C::kRingBytes; }
  DEVICE ptx::Smem list() const { return smem + C::kListOffset + warp * C::kColumns * 4; }

  // The warp's place among those that have rows of their own.
  DEVICE int group() const { return p.split == 1 ? warp : 0; }

  // Weight row of row i of tile t. Rows past the end of the matrix repeat the last, and their sums are not stored.
  DEVICE int weight_row(int t, int i) const {
    return min(n0 + group() * C::kWarpRows + 16 * (C::kGlu ? t / 2 : t) + i, p.n - 1);
  }
  // Output features of a warp.
  DEVICE int warp_rows() const { return 16 * tiles / (C::kGlu ? 2 : 1); }

  DEVICE static bool is_up(int t) { return C::kGlu && t % 2; }

  // The ids of rows begin + 32 j + lane as experts, all loads under way at once; past the end -1.
  DEVICE static void load_ids(const Problem& p, int begin, int (&found)[kIds]) {
#pragma unroll
    for (int j = 0; j < kIds; ++j) {
      const int row = begin + 32 * j + static_cast<int>(threadIdx.x % 32);
      found[j] = row < p.rows ? clamped(p, ptx::load(p.ids + row)) : -1;
    }
  }

  // Lists the expert's rows `first` and following, up to kColumns; returns how many rows it has in all. `found`: the
  // first ids.
  DEVICE int find_rows(int first, int (&found)[kIds]) const {
    int count = 0;
#pragma unroll 1
    for (int begin = 0; begin < p.rows; begin += 32 * kIds) {
      if (begin || first) load_ids(p, begin, found);
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        if (begin + 32 * j >= p.rows) break;
        const u32 votes = __ballot_sync(0xFFFFFFFFu, found[j] == expert);
        const int place = count + __popc(votes & ((1u << lane) - 1)) - first;
        if (found[j] == expert && place >= 0 && place < C::kColumns) {
          ptx::sts32(list() + place * 4, begin + 32 * j + lane);
        }
        count += __popc(votes);
      }
    }
    __syncwarp();
    return count;
  }

  // An id as an expert: all that are out of range are the last.
  DEVICE static int clamped(const Problem& p, int id) {
    return static_cast<int>(min(static_cast<u32>(id), static_cast<u32>(p.experts)));
  }

  DEVICE int row_of(int column) const {
    return C::kRouted ? static_cast<int>(ptx::lds32(list() + column * 4)) : column;
  }

  DEVICE const u16* x_of(int column) const {
    const int row = row_of(column);
    return p.x + static_cast<i64>(C::kRouted ? row / p.x_div : row) * p.k;
  }

  // Two spans of each tile: lane l copies 16 bytes of row l / 4 and of the row 8 below. The
  // halves of a span that touches two groups lie apart, so that reading a word of every row hits every bank once.
  DEVICE void copy_weights(const unsigned char* (&from)[C::kMatrices], const u32 (&apart)[C::kTiles], int row_bytes,
                           bool valid, ptx::Smem stage) const {
    const int in_span = C::kGroups == 2 ? lane % 2 * 256 + lane / 4 * 16 : lane / 4 * 32 + lane % 2 * 16;
    const ptx::Smem to = stage + lane % 4 / 2 * C::kSpanPitch + in_span;
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
      if (t == tiles) break;
      const unsigned char* tile = from[is_up(t)] + apart[t];
      ptx::cp_async16(to + t * C::kTileBytes, tile, valid);
      const int below = weight_row(t, 8) - weight_row(t, 0) == 8 ? 8 * row_bytes : 0;  // all eight rows exist, or none
      ptx::cp_async16(to + t * C::kTileBytes + (C::kGroups == 2 ? 128 : 256), tile + below, valid);
    }
#pragma unroll
    for (int m = 0; m < C::kMatrices; ++m) from[m] += kPair * kSpanBytes;
  }

  // A lane's x of the span at k: the elements of its words, from where `x` points at k = 0. Columns past the last row
  // repeat one, and units past the end of K the last: these meet scales of zero.
  DEVICE void load_tokens(const u16* const (&x)[C::kBlocks], int k, Tokens& tokens) const {
    const u32 first = min(k, p.k - C::kUnit), second = min(k + C::kUnit, p.k - C::kUnit);
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
      const auto* from = reinterpret_cast<const uint4*>(x[b] + first);
      tokens[b][0] = ptx::load(from);
      if constexpr (C::kPieces == 2) {
        tokens[b][1] = ptx::load(C::kGroups == 2 ? reinterpret_cast<const uint4*>(x[b] + second) : from + 1);
      }
    }
  }

  // The pairs of x that stand against a word's pairs of weights: 4 bits: elements r and r + 4; 8 bits: u and u + 2.
  DEVICE static void pair_up(const Tokens& tokens, Fragments& b) {
#pragma unroll
    for (int j = 0; j < C::kBlocks; ++j) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const uint4 v = tokens[j][C::kBits == 4 ? word : 0];
        constexpr int kPairs = C::kBits == 4 ? 2 : 1;  // MMA steps a word
#pragma unroll
        for (int e = 0; e < kPairs; ++e) {
          const int s = kPairs * word + e;
          const u32 lo = C::kBits == 4 ? (e ? v.y : v.x) : (word ? v.z : v.x);
          const u32 hi = C::kBits == 4 ? (e ? v.w : v.z) : (word ? v.w : v.y);
          b[s / C::kSteps][s % C::kSteps][j][0] = ptx::prmt(lo, hi, 0x5410);
          b[s / C::kSteps][s % C::kSteps][j][1] = ptx::prmt(lo, hi, 0x7632);
        }
      }
    }
  }

  DEVICE ptx::Smem scales_of(int t, int group) const {
    return smem + C::kScaleOffset + warp * C::kScaleBytes + (t * 4 * C::kLaneGroups + group) * C::kScalePitch;
  }

  // Scales and biases of a batch, kLaneGroups groups of two rows a tile each.
  using Scales = u32[2 * C::kTiles][2][C::kScaleWords];

  // Whether a lane reads its groups at once: their number divides a row's, so that its alignment is no larger.
  DEVICE bool whole_groups() const { return p.k / C::kGroup % C::kLaneGroups == 0; }

  DEVICE i64 first_group(int t, int row) const {
    return (static_cast<i64>(expert) * p.n + weight_row(t, row)) * (p.k / C::kGroup);
  }

  // The first half of `store_scales`: what can be on its way early.
  DEVICE void load_scales(int span, Scales& values) const {
    const int group = span * C::kSpan / C::kGroup + lane % 4 * C::kLaneGroups;
    if (!whole_groups()) return;
#pragma unroll
    for (int i = 0; i < 2 * C::kTiles; ++i) {
      const int t = i / 2;
      if (t == tiles) break;
      const i64 at = first_group(t, lane / 4 + i % 2 * 8) + group;
      if (group < p.k / C::kGroup) {
        load_groups((is_up(t) ? p.scales_up : p.scales) + at, values[i][0]);
        load_groups((is_up(t) ? p.biases_up : p.biases) + at, values[i][1]);
      } else {
#pragma unroll
        for (int w = 0; w < C::kScaleWords; ++w) values[i][0][w] = values[i][1][w] = 0;
      }
    }
  }

  // Puts a batch of scales and biases, these with the offset of the weights taken out, where all lanes find them; past
  // the end of K zeros.
  DEVICE void store_scales(int span, const Scales& values) const {
    __syncwarp();  // all have read the batch before
    if (whole_groups()) {
#pragma unroll
      for (int i = 0; i < 2 * C::kTiles; ++i) {
        if (i / 2 == tiles) break;
        const ptx::Smem to = scales_of(i / 2, lane % 4 * C::kLaneGroups) + (lane / 4 + i % 2 * 8) * 8;
#pragma unroll
        for (int g = 0; g < C::kLaneGroups; ++g) {
          store_scale(to + g * C::kScalePitch, values[i][0][g / 2] >> (g % 2 * 16),
                      values[i][1][g / 2] >> (g % 2 * 16));
        }
      }
    } else {
      const int groups = p.k / C::kGroup, first = span * C::kSpan / C::kGroup;
#pragma unroll 1
      for (int i = lane; i < 64 * tiles * C::kLaneGroups; i += 32) {
        const int row = i % 16, group = i / 16 % (4 * C::kLaneGroups), t = i / (64 * C::kLaneGroups);
        const i64 at = first_group(t, row) + min(first + group, groups - 1);
        const u32 scale = ptx::ldg16((is_up(t) ? p.scales_up : p.scales) + at);
        const u32 bias = ptx::ldg16((is_up(t) ? p.biases_up : p.biases) + at);
        const bool inside = first + group < groups;
        store_scale(scales_of(t, group) + row * 8, inside ? scale : 0, inside ? bias : 0);
      }
    }
  }

  DEVICE static void store_scale(ptx::Smem to, u32 scale_bits, u32 bias_bits) {
    const float scale = T::to_float(static_cast<u16>(scale_bits)), bias = T::to_float(static_cast<u16>(bias_bits));
    const float least = bias - T::template kOffset<C::kBits> * scale;
    ptx::sts64(to, make_uint2(__float_as_uint(scale), __float_as_uint(least)));
  }

  DEVICE static void load_groups(const u16* from, u32 (&to)[C::kScaleWords]) {
    if constexpr (C::kLaneGroups == 8) {
      const uint4 v = ptx::load(reinterpret_cast<const uint4*>(from));
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (C::kLaneGroups == 4) {
      const uint2 v = ptx::load(reinterpret_cast<const uint2*>(from));
      to[0] = v.x, to[1] = v.y;
    } else if constexpr (C::kLaneGroups == 2) {
      to[0] = ptx::load(reinterpret_cast<const u32*>(from));
    } else {
      to[0] = ptx::ldg16(from);
    }
  }

  // One span: x against the tiles at `weights`, whose scales begin at `scales`; kTogether tiles at a time, so that their
  // MMAs need not wait for each other.
  template <int kTogether>
  DEVICE void multiply(const Fragments& b, ptx::Smem weights, ptx::Smem scales, Sums& sums) const {
    float total[C::kGroups][C::kBlocks][4] = {};  // of x; every row is the same
    const u32 ones[4] = {T::ones(), T::ones(), T::ones(), T::ones()};
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
        for (int j = 0; j < C::kBlocks; ++j) T::mma(total[g][j], ones, b[g][s][j][0], b[g][s][j][1]);
      }
    }
#pragma unroll
    for (int first = 0; first < C::kTiles; first += kTogether) {
      if (!C::kRouted && first == tiles) break;
      u32 words[kTogether][2][2];  // half of the tile's rows, word
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const ptx::Smem tile = weights + (first + t) * C::kTileBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (C::kGroups == 2) {
            words[t][half][0] = ptx::lds32(tile + half * 128);
            words[t][half][1] = ptx::lds32(tile + half * 128 + 256);
          } else {
            const uint2 both = ptx::lds64(tile + half * 256);
            words[t][half][0] = both.x, words[t][half][1] = both.y;
          }
        }
      }
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        float products[kTogether][C::kBlocks][4] = {};
#pragma unroll
        for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
          for (int t = 0; t < kTogether; ++t) {
            constexpr int kWordSteps = C::kBits == 4 ? 2 : 1;
            const int step = g * C::kSteps + s, e = step % kWordSteps;
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              a[i] = T::template offset_pair<C::kBits>(words[t][i % 2][step / kWordSteps], 2 * e + i / 2);
            }
#pragma unroll
            for (int j = 0; j < C::kBlocks; ++j) T::mma(products[t][j], a, b[g][s][j][0], b[g][s][j][1]);
          }
        }
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint2 both = ptx::lds64(scales + ((first + t) * 4 * C::kLaneGroups + g) * C::kScalePitch + half * 64);
            const float scale = __uint_as_float(both.x), least = __uint_as_float(both.y);
#pragma unroll
            for (int j = 0; j < C::kBlocks; ++j) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                float& to = sums[first + t][j][2 * half + c];
                to = fmaf(scale, products[t][j][2 * half + c], fmaf(least, total[g][j][c], to));
              }
            }
          }
        }
      }
    }
  }

  // This warp's parts of K; the sum of each is added to what lies in shared memory.
  DEVICE void multiply(int count) const {
    const int row_bytes = p.k / 8 * C::kBits, pairs = (row_bytes + 2 * kSpanBytes - 1) / (2 * kSpanBytes);
    const int part = ((pairs + 1) / 2 + kParts - 1) / kParts * 2;  // four spans, a lane's aligned scales, stay together
    const int begin = p.split == 1 ? 0 : min(warp * part, pairs);
    const int end = p.split == 1 ? pairs : min(begin + part, pairs);

    const unsigned char* from[C::kMatrices];  // this lane's next 16 bytes of the first tile, of each matrix,
    u32 apart[C::kTiles];                     // and from there to the other tiles
    const int first_byte = begin * kPair * kSpanBytes + lane % 4 * 16, first_row = weight_row(0, lane / 4);
    int bytes_left = min(end * kPair * kSpanBytes, row_bytes) - first_byte;
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) apart[t] = static_cast<u32>((weight_row(t, lane / 4) - first_row) * row_bytes);
#pragma unroll
    for (int m = 0; m < C::kMatrices; ++m) {
      from[m] = (m ? p.w_up : p.w) + (static_cast<i64>(expert) * p.n + first_row) * row_bytes + first_byte;
    }
    Scales first_scales;
    load_scales(begin * kPair, first_scales);
    ptx::Smem read = ring(), write = ring();
    const ptx::Smem end_of_ring = ring() + C::kRingBytes;
    const auto fetch = [&] {
      copy_weights(from, apart, row_bytes, bytes_left > 0, write);
      bytes_left -= kPair * kSpanBytes;
      ptx::cp_async_commit();
      write = write + C::kStageBytes == end_of_ring ? ring() : write + C::kStageBytes;
    };
#pragma unroll 1
    for (int i = 0; i < C::kStages - 1; ++i) fetch();

    const u16* x[C::kBlocks];
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
      x[b] = x_of(min(8 * b + lane / 4, count - 1)) + lane % 4 * (C::kUnit / 4);
    }
    Tokens tokens[C::kAhead];
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) load_tokens(x, (begin * kPair + i) * C::kSpan, tokens[i]);

    Sums sums = {};
    store_scales(begin * kPair, first_scales);
    int in_part = part, in_batch = C::kBatch;
    ptx::Smem scales = scales_of(0, 0) + lane / 4 * 8;
#pragma unroll 1
    for (int pair = begin; pair < end; ++pair) {
      if (in_batch == 0) {
        Scales values;
        load_scales(pair * kPair, values);
        store_scales(pair * kPair, values);
        scales = scales_of(0, 0) + lane / 4 * 8, in_batch = C::kBatch;
      }
      ptx::cp_async_wait<C::kStages - 2>();
      __syncwarp();  // the pair has landed for all lanes, and all have read the one whose place is filled now
      fetch();
#pragma unroll(C::kAhead)
      for (int i = 0; i < kPair; ++i) {
        Fragments b;
        pair_up(tokens[i % C::kAhead], b);
        load_tokens(x, (pair * kPair + i + C::kAhead) * C::kSpan, tokens[i % C::kAhead]);
        const int groups = i * C::kSpan / C::kGroup;  // two spans or more of a group: see below
        const ptx::Smem weights = read + i * C::kSpanPitch + lane * (C::kGroups == 2 ? 4 : 8);
        if (C::kBlocks == 1 && (C::kRouted || tiles % 2 == 0)) {
          multiply<2>(b, weights, scales + groups * C::kScalePitch, sums);
        } else {
          multiply<1>(b, weights, scales + groups * C::kScalePitch, sums);
        }
      }
      in_batch -= kPair;
      if constexpr (kPair * C::kSpan >= C::kGroup) {
        scales += kPair * C::kSpan / C::kGroup * C::kScalePitch;
      } else if (in_batch % (C::kGroup / C::kSpan) == 0) {
        scales += C::kScalePitch;
      }
      read = read + C::kStageBytes == end_of_ring ? ring() : read + C::kStageBytes;
      if (--in_part == 0 || pair + 1 == end) {
        in_part = part;
        add_part(sums);
      }
    }
    ptx::cp_async_wait<0>();  // zeros, perhaps, that would land on the next rows' weights
  }

  DEVICE ptx::Smem sum_of(int w, int column, int row) const {
    return smem + C::kSumOffset + w * C::kSumBytes + (column * C::kPitch + row) * 4;
  }

  DEVICE void set_zero() const {
#pragma unroll
    for (int i = lane; i < C::kSumBytes / 16; i += 32) {
      ptx::sts128(smem + C::kSumOffset + warp * C::kSumBytes + i * 16, make_uint4(0, 0, 0, 0));
    }
  }

  DEVICE void add_part(Sums& sums) const {
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < C::kBlocks; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const ptx::Smem to = sum_of(warp, 8 * j + lane % 4 * 2 + c % 2, 16 * t + c / 2 * 8 + lane / 4);
          ptx::sts32(to, __float_as_uint(__uint_as_float(ptx::lds32(to)) + sums[t][j][c]));
          sums[t][j][c] = 0;
        }
      }
    }
  }

  // Adds up the parts in the order of K, and writes [rows, n].
  DEVICE void store(int count) const {
    constexpr int kPairs = C::kWarpRows / 2;
    const int groups = p.split == 1 ? kWarps : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * groups * kPairs; i += kThreads) {
      const int group = i / kPairs & (groups - 1), column = p.split == 1 ? i / (kPairs * kWarps) : i / kPairs;
      const int own = i % kPairs * 2, row = C::kGlu ? own / 16 * 32 + own % 16 : own;
      const int feature = group * C::kWarpRows + own;
      if (own >= warp_rows() || n0 + feature >= p.n) continue;
      float pair[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float value = total(group, column, row + h) + bias(p.bias, feature + h);
        pair[h] = value;
        if constexpr (C::kGlu) {
          pair[h] = swiglu(value, total(group, column, row + 16 + h) + bias(p.bias_up, feature + h));
        }
      }
      store_pair(column, feature, T::pack(pair[0], pair[1]));
    }
  }

  DEVICE void store_pair(int column, int feature, u32 pair) const {
    ptx::store(reinterpret_cast<u32*>(p.out + static_cast<i64>(row_of(column)) * p.n + n0 + feature), pair);
  }

  DEVICE float total(int first, int column, int row) const {
    if (p.split == 1) return __uint_as_float(ptx::lds32(sum_of(first, column, row)));
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kParts; ++w) sum += __uint_as_float(ptx::lds32(sum_of(w, column, row)));
    return sum;
  }

  DEVICE float bias(const u16* values, int feature) const {
    return p.has_bias ? T::to_float(ptx::ldg16(values + static_cast<i64>(expert) * p.n + n0 + feature)) : 0.0f;
  }

  // An output, step by step.
  DEVICE float dot(bool up, int column, int feature) const {
    const i64 row = static_cast<i64>(expert) * p.n + n0 + feature;
    const u16* x = x_of(column);
    const unsigned char* w = (up ? p.w_up : p.w) + row * (p.k / 8 * C::kBits);
    const i64 groups = row * (p.k / C::kGroup);
    float sum = bias(up ? p.bias_up : p.bias, feature);
#pragma unroll 1
    for (int k = 0; k < p.k; ++k) {
      const u32 q = C::kBits == 8 ? ptx::load(w + k) : ptx::load(w + k / 2) >> (k % 2 * 4) & 15;
      const float scale = T::to_float(ptx::ldg16((up ? p.scales_up : p.scales) + groups + k / C::kGroup));
      const float least = T::to_float(ptx::ldg16((up ? p.biases_up : p.biases) + groups + k / C::kGroup));
      sum = fmaf(fmaf(static_cast<float>(q), scale, least), T::to_float(ptx::ldg16(x + k)), sum);
    }
    return sum;
  }

  // For an x that begins at no multiple of 16 bytes, as a slice of an array may.
  DEVICE void run_slowly(int count) const {
    const int features = warp_rows() * (p.split == 1 ? kWarps : 1);
#pragma unroll 1
    for (int i = threadIdx.x; i < count * features; i += kThreads) {
      const int column = i / features, feature = i % features;
      if (n0 + feature >= p.n) continue;
      float value = 0;
#pragma unroll 1
      for (int up = 0; up <= C::kGlu; ++up) {
        const float sum = dot(up, column, feature);
        value = up ? swiglu(value, sum) : sum;
      }
      ptx::store(p.out + static_cast<i64>(row_of(column)) * p.n + n0 + feature, static_cast<u16>(T::pack(value, 0)));
    }
  }

  DEVICE void run(int count) const {
    if (reinterpret_cast<u64>(p.x) % 16) return run_slowly(count);
    set_zero();
    multiply(count);
    __syncthreads();
    store(count);
  }

  DEVICE void store_zeros(int count) const {
    const int pairs = C::kWarpRows / 2 * (p.split == 1 ? kWarps : 1);
#pragma unroll 1
    for (int column = 0; column < count; ++column) {
      for (int i = threadIdx.x; i < pairs && n0 + 2 * i < p.n; i += kThreads) store_pair(column, 2 * i, 0);
    }
  }
};

// All blocks of a strip of output features come here when they are done with their experts; the last one combines.
template <class C>
DEVICE void combine(const Problem& p, ptx::Smem flag, int strip, int features) {
  using T = typename C::Type;
  __threadfence();  // what this thread has written can be seen before the count
  __syncthreads();
  if (threadIdx.x == 0) ptx::sts32(flag, atomicAdd(p.finished + strip, 1) == min(p.rows, p.experts + 1) - 1);
  __syncthreads();
  if (ptx::lds32(flag) == 0) return;
  __threadfence();
  const int pieces = features / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.rows / p.top_k * pieces; i += kThreads) {
    const int token = i / pieces, feature = strip * features + i % pieces * 8, end = (token + 1) * p.top_k;
    if (feature >= p.n) continue;
    float sums[8] = {};
#pragma unroll 1
    for (int row = token * p.top_k; row < end; row += kRowsAhead) {
      uint4 outs[kRowsAhead];
      float weights[kRowsAhead];
#pragma unroll
      for (int j = 0; j < kRowsAhead; ++j) {
        const int at = min(row + j, end - 1);
        outs[j] = ptx::load_written(reinterpret_cast<const uint4*>(p.out + static_cast<i64>(at) * p.n + feature));
        weights[j] = ptx::load(p.token_weights + at);
      }
#pragma unroll
      for (int j = 0; j < kRowsAhead; ++j) {
        const u32 words[4] = {outs[j].x, outs[j].y, outs[j].z, outs[j].w};
#pragma unroll
        for (int f = 0; f < 8 && row + j < end; ++f) {
          sums[f] = fmaf(weights[j], T::to_float(static_cast<u16>(words[f / 2] >> (f % 2 * 16))), sums[f]);
        }
      }
    }
    const uint4 out = make_uint4(T::pack(sums[0], sums[1]), T::pack(sums[2], sums[3]), T::pack(sums[4], sums[5]),
                                 T::pack(sums[6], sums[7]));
    ptx::store(reinterpret_cast<uint4*>(p.combined + static_cast<i64>(token) * p.n + feature), out);
  }
}

template <class C>
DEVICE void decode(const Problem& p, const void* shared) {
  const int rows = C::kWarpRows * (p.split == 1 ? kWarps : 1), n_blocks = (p.n + rows - 1) / rows;
  const int slot = blockIdx.x / n_blocks;
  int expert = 0, n0 = static_cast<int>(blockIdx.x % n_blocks) * rows, tiles = C::kTiles, ids[kIds] = {};
  if constexpr (C::kRouted) {
    Block<C>::load_ids(p, 0, ids);
    expert = p.rows <= p.experts ? Block<C>::clamped(p, ptx::load(p.ids + slot)) : slot;
  } else if (p.per_sm) {  // blocks that lie an SM count apart share an SM: they are neighbours, so that SMs are even
    const u32 all = (p.n + 15) / 16, units = p.per_sm * p.sms;
    const u32 unit = blockIdx.x % p.sms * p.per_sm + blockIdx.x / p.sms, first = unit * all / units;
    n0 = static_cast<int>(16 * first), tiles = static_cast<int>((unit + 1) * all / units - first);
    if (tiles == 0) return;
  }
  const Block<C> block{p,
                       expert,
                       n0,
                       tiles,
                       ptx::smem_address(shared),
                       static_cast<int>(threadIdx.x) / 32,
                       static_cast<int>(threadIdx.x) % 32};
  if constexpr (C::kRouted) {
#pragma unroll 1
    for (int first = 0, count = 1; first < count; first += C::kColumns) {
      if (first) __syncthreads();  // the sums have been read, and the rings may be filled again
      count = block.find_rows(first, ids);
      if (count == 0 || (first == 0 && p.rows <= p.experts && block.row_of(0) != slot)) break;
      const int here = min(count - first, +C::kColumns);
      expert < p.experts ? block.run(here) : block.store_zeros(here);
    }
    if (p.top_k) combine<C>(p, block.smem, n0 / rows, rows);
  } else {
    block.run(p.rows);
  }
}

using Variant = Config<MOE_DTYPE, MOE_BITS, MOE_GROUP, MOE_ROUTED, MOE_GLU, MOE_BLOCKS, MOE_TILES, MOE_STAGES>;
static_assert(Variant::kSharedBytes == MOE_SHARED_BYTES, "the launcher and the kernel agree on shared memory");

extern "C" __global__ void __launch_bounds__(kThreads, MOE_BLOCKS_PER_SM)
    MOE_ENTRY(const u16* x, const unsigned char* w, const u16* scales, const u16* biases, const u16* bias,
#if MOE_GLU
              const unsigned char* w_up, const u16* scales_up, const u16* biases_up, const u16* bias_up,
#endif
#if MOE_ROUTED
              const int* ids,
#endif
#if MOE_ROUTED && !MOE_GLU
              const float* token_weights, int* finished,
#endif
              u16* out,
#if MOE_ROUTED && !MOE_GLU
              u16* combined,
#endif
              int rows, int n, int k, int has_bias, int split,
#if MOE_ROUTED && !MOE_GLU
              int experts, int x_div, int top_k
#elif MOE_ROUTED
              int experts, int x_div
#else
              int per_sm, int sms
#endif
    ) {
  Problem p{};
  p.x = x, p.w = w, p.scales = scales, p.biases = biases, p.bias = bias, p.out = out;
  p.rows = rows, p.n = n, p.k = k, p.has_bias = has_bias, p.split = split;
#if MOE_GLU
  p.w_up = w_up, p.scales_up = scales_up, p.biases_up = biases_up, p.bias_up = bias_up;
#endif
#if MOE_ROUTED
  p.ids = ids, p.experts = experts, p.x_div = x_div;
#else
  p.per_sm = per_sm, p.sms = sms;
#endif
#if MOE_ROUTED && !MOE_GLU
  p.token_weights = token_weights, p.finished = finished, p.combined = combined, p.top_k = top_k;
#endif
  extern __shared__ __align__(256) unsigned char shared[];
  decode<Variant>(p, shared);
}
