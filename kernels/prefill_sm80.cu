// Grouped quantized matmul for many rows on mma.sync and cp.async (prefill.cuh): 128 weight rows by up to kTileM tokens
// a block, one K block (64 bytes of a weight row, quant.cuh) a pipeline stage.
//
// blockIdx.x = tile * n_blocks + n_block: blocks that run together share a token tile; its expert's weights come
// from L2 for the next one. A tile with few rows runs fewer MMAs, down to 16 tokens.
#include "prefill.cuh"

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileN = 128, kPanel = kTileN / 2;

template <class T, int kBits_, int kGroup_, bool kGlu_, int kTileM_, int kStages_>
struct Config {
  using Type = T;
  static constexpr int kBits = kBits_, kGroup = kGroup_, kTileM = kTileM_, kStages = kStages_;
  static constexpr bool kGlu = kGlu_;

  static constexpr int kTileK = KBlock<kBits>::kSize, kSteps = KBlock<kBits>::kSteps;
  static constexpr int kBlocksM = kTileM / 16;
  static constexpr int kWords = MOE_UNROLL_WORDS, kUnroll = kWords * 8 / kBits;  // MMA steps of a round
  static constexpr int kGroups = kTileK > kGroup ? kTileK / kGroup : 1;          // scale groups of a stage

  // Two rows of padding put the groups of a K block into different banks.
  static constexpr int kScalePitch = (kTileN + 2) * 8, kScaleBytes = kGroups * kScalePitch;
  static constexpr int kWeightBytes = kTileN * KBlock<kBits>::kBytes, kTokenPitch = kTileK * 2;
  static constexpr int kRowStep = kThreads * 16 / kTokenPitch;  // tokens that the block copies at once
  static constexpr int kRowsPerThread = kTileM / kRowStep;
  static constexpr int kStageBytes = kWeightBytes + kTileM * kTokenPitch;
  static constexpr int kScaleOffset = kStages * kStageBytes;
  static constexpr int kRowOffset = kScaleOffset + 2 * kScaleBytes;
  static constexpr int kSharedBytes = kRowOffset + kTileM * 4;

  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "a lane has four words of a K block");
  static_assert(kThreads == kTileN, "a thread stages the scales of one weight row");
  static_assert(kTileM >= 16 && (kTileM & (kTileM - 1)) == 0, "a tile is halved down to 16 tokens");
  static_assert(kStageBytes % 256 == 0 && kWeightBytes % 256 == 0, "the swizzle is an xor into a token's address");
  static_assert(kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_12x give a block 99 KB");
};

// Drops the first kCount words.
template <int kCount>
DEVICE void next_words(uint4& w) {
  if constexpr (kCount == 1) w = make_uint4(w.y, w.z, w.w, 0);
  if constexpr (kCount == 2) w = make_uint4(w.z, w.w, 0, 0);
}

template <class C>
struct Block : Tile<typename C::Type, C::kGlu, kWarps> {
  using T = typename C::Type;
  using Base = Tile<T, C::kGlu, kWarps>;
  using Accumulators = float[2][2 * C::kBlocksM][4];  // panel, 8-token block, MMA fragment
  using Base::block_row, Base::lane, Base::p, Base::tile, Base::weight_row;

  const ptx::Smem smem;

  // Where each token of the tile lies in x, a loading thread's rows side by side. Rows past the end repeat the last.
  DEVICE void fill_row_table() const {
    for (int i = threadIdx.x; i < C::kTileM; i += kThreads) {
      const int row = tile.y + min(i % C::kRowsPerThread * C::kRowStep + i / C::kRowsPerThread, tile.z - 1);
      ptx::sts32(smem + C::kRowOffset + i * 4, p.x_row(row));
    }
  }

  // A K block is 64 bytes of every weight row, four threads a row. `w`, `w_up`: this thread's 16 bytes in its
  // first row; `rows`: how many rows the expert has from there; `more`: whether a weight row reaches so far.
  DEVICE void load_weights(const unsigned char* w, const unsigned char* w_up, int rows, bool more,
                           ptx::Smem stage) const {
    const i64 row_bytes = p.k / 8 * C::kBits;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A thread's next piece is 32 shared rows on, which in the permuted order of GLU is 8 weight rows.
      const int step = C::kGlu ? i % 2 * 8 : i * 32;
      ptx::cp_async16(stage + (threadIdx.x + i * kThreads) * 16, (C::kGlu && i >= 2 ? w_up : w) + step * row_bytes,
                      more && step < rows);
    }
  }

  // As many tokens as the tile has, rounded up. Chunks are swizzled by row, so that the eight rows that ldmatrix
  // reads at once lie in different banks.
  DEVICE void load_tokens(int kb, ptx::Smem stage, int tokens) const {
    constexpr int kChunks = C::kTokenPitch / 16, kBatch = C::kRowsPerThread < 4 ? C::kRowsPerThread : 4;
    static_assert(C::kRowStep % 8 == 0, "a thread's rows share one swizzle");
    const int chunk = threadIdx.x % kChunks, r0 = threadIdx.x / kChunks;
    const u16* x = p.x + kb * C::kTileK + chunk * 8;
    const ptx::Smem dst = stage + C::kWeightBytes + r0 * C::kTokenPitch + (chunk ^ (r0 & 7)) * 16;
    const ptx::Smem table = smem + C::kRowOffset + r0 * C::kRowsPerThread * 4;
#pragma unroll
    for (int i = 0; i < C::kRowsPerThread; i += kBatch) {
      if (i * C::kRowStep >= tokens) return;
      u32 rows[kBatch];
      if constexpr (kBatch == 4) {
        const uint4 four = ptx::lds128(table + i * 4);
        rows[0] = four.x, rows[1] = four.y, rows[2] = four.z, rows[3] = four.w;
      } else {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) rows[j] = ptx::lds32(table + j * 4);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        ptx::cp_async16(dst + (i + j) * C::kRowStep * C::kTokenPitch,
                        x + static_cast<u64>(rows[j]) * static_cast<u32>(p.k_pad));
      }
    }
  }

  // One weight row a thread: its scales and biases of K block kb, as they lie in memory.
  DEVICE void load_scales(int kb, i64 row_offset, u16 (&scale)[C::kGroups], u16 (&bias)[C::kGroups]) const {
    const bool up = C::kGlu && threadIdx.x >= kPanel;
    const u16 *scales = up ? p.scales_up : p.scales, *biases = up ? p.biases_up : p.biases;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const int group = kb * C::kTileK / C::kGroup + g;
      const bool valid = row_offset >= 0 && group < p.k / C::kGroup;
      scale[g] = valid ? ptx::ldg16(scales + row_offset + group) : 0;
      bias[g] = valid ? ptx::ldg16(biases + row_offset + group) : 0;
    }
  }

  // Doubled, so that a reader needs no more than the load.
  DEVICE void store_scales(int slot, const u16 (&scale)[C::kGroups], const u16 (&bias)[C::kGroups]) const {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      ptx::sts64(smem + C::kScaleOffset + slot * C::kScaleBytes + g * C::kScalePitch + threadIdx.x * 8,
                 make_uint2(scale[g] * 0x10001u, bias[g] * 0x10001u));
    }
  }

  // What a lane needs of its weight rows in one K block: 16 bytes, and the scale and bias of their group.
  struct Quantized {
    uint4 words[2][2];  // panel, half
    uint2 scale[2][2];
  };

  DEVICE Quantized load_quantized(ptx::Smem weights, ptx::Smem scales) const {
    Quantized q;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int panel = i / 2, half = i % 2, row = block_row(panel, half, 0) - block_row(0, 0, 0);
      q.words[panel][half] = ptx::lds128(weights + row * KBlock<C::kBits>::kBytes);
      q.scale[panel][half] = ptx::lds64(scales + row * 8);
    }
    return q;
  }

  // One K block of 16 * kActive tokens; `tokens` is this lane's address in the stage.
  template <int kActive>
  DEVICE void multiply(Quantized& q, ptx::Smem tokens, Accumulators& acc) const {
#pragma unroll 1
    for (int round = 0; round < C::kSteps / C::kUnroll; ++round) {
#pragma unroll
      for (int step = 0; step < C::kUnroll; ++step) {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int panel = i / 4, u = i / 2 % 2, half = i % 2;
          const uint2 sb = q.scale[panel][half];
          a[panel][2 * u + half] = dequantize<T, C::kBits>(q.words[panel][half], step, u, sb.x, sb.y);
        }
#pragma unroll
        for (int j = 0; j < kActive; ++j) {
          const uint4 b = ptx::ldmatrix_x4((tokens ^ (step * 32)) + j * 16 * C::kTokenPitch);
#pragma unroll
          for (int panel = 0; panel < 2; ++panel) {
            T::mma(acc[panel][2 * j], a[panel], b.x, b.y);
            T::mma(acc[panel][2 * j + 1], a[panel], b.z, b.w);
          }
        }
      }
      tokens ^= (round ^ (round + 1)) * (C::kUnroll * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) next_words<C::kWords>(q.words[i / 2][i % 2]);
    }
  }

  DEVICE void run() const {
    int active = 1;  // 16-token blocks that hold tokens, rounded up to a power of two
    while (16 * active < tile.z) active *= 2;

    const int row_bytes = p.k / 8 * C::kBits, weight_row0 = weight_row(threadIdx.x / 4);
    const i64 expert_row = static_cast<i64>(tile.x) * p.n;
    const i64 first_byte = (expert_row + weight_row0) * row_bytes + threadIdx.x % 4 * 16;
    int bytes_left = row_bytes - static_cast<int>(threadIdx.x % 4) * 16;
    const unsigned char *w = p.w + first_byte, *w_up = p.w_up + first_byte;
    const int scale_row = weight_row(threadIdx.x);
    const i64 scale_offset = scale_row < p.n ? (expert_row + scale_row) * (p.k / C::kGroup) : -1;
    fill_row_table();
    __syncthreads();

    const int k_blocks = p.k_pad / C::kTileK;
    u16 scale[C::kGroups], bias[C::kGroups];
    load_scales(0, scale_offset, scale, bias);
    store_scales(0, scale, bias);

    const int t = lane % 4, row = block_row(0, 0, lane / 4);
    const ptx::Smem lane_weights = row * KBlock<C::kBits>::kBytes + t * 16;
    const ptx::Smem lane_scales = smem + C::kScaleOffset + t * (C::kTileK / 4) / C::kGroup * C::kScalePitch + row * 8;
    const ptx::Smem lane_tokens =
        C::kWeightBytes + (lane / 16 * 8 + lane % 8) * C::kTokenPitch + ((lane / 8 % 2) ^ (lane & 7)) * 16;
    const ptx::Smem end = smem + C::kStages * C::kStageBytes;
    ptx::Smem read = smem, write = smem;
    Accumulators acc = {};
#pragma unroll 1
    for (int kb = 1 - C::kStages; kb < k_blocks; ++kb) {  // the first rounds only fill the pipeline
      Quantized q;
      if (kb >= 0) {
        ptx::cp_async_wait<C::kStages - 2>();
        __syncthreads();  // stage kb has landed for all, and all have left stage kb - 1, which is refilled now
        q = load_quantized(read + lane_weights, lane_scales + (kb & 1) * C::kScaleBytes);
      }
      if (kb + C::kStages - 1 < k_blocks) {
        load_weights(w, w_up, p.n - weight_row0, bytes_left > 0, write);
        load_tokens(kb + C::kStages - 1, write, 16 * active);
        w += 64, w_up += 64, bytes_left -= 64;
      }
      ptx::cp_async_commit();
      write = write + C::kStageBytes == end ? smem : write + C::kStageBytes;
      if (kb < 0) continue;

      const bool more = kb + 1 < k_blocks;
      if (more) load_scales(kb + 1, scale_offset, scale, bias);
      if (active == C::kBlocksM) {
        multiply<C::kBlocksM>(q, read + lane_tokens, acc);
      } else if (active == 1) {
        multiply<1>(q, read + lane_tokens, acc);
      } else if (C::kBlocksM > 2 && active == 2) {
        multiply<C::kBlocksM == 1 ? 1 : 2>(q, read + lane_tokens, acc);
      } else if (C::kBlocksM > 4) {
        multiply<C::kBlocksM == 1 ? 1 : C::kBlocksM / 2>(q, read + lane_tokens, acc);
      }
      if (more) store_scales((kb + 1) & 1, scale, bias);
      read = read + C::kStageBytes == end ? smem : read + C::kStageBytes;
    }
    this->template store<2 * C::kBlocksM>(2 * active, [&](int panel, int j, int c) { return acc[panel][j][c]; });
  }
};

template <class C>
DEVICE void prefill(const Problem& p, const void* shared) {
  const int n_blocks = (p.width(C::kGlu) + Block<C>::kColumns - 1) / Block<C>::kColumns;
  const int4 tile = ptx::load(p.tiles + blockIdx.x / n_blocks);
  if (tile.z == 0) return;
  const int n0 = static_cast<int>(blockIdx.x % n_blocks) * Block<C>::kColumns;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Block<C> block{{p, tile, n0, warp, lane}, ptx::smem_address(shared)};
  tile.x == p.experts ? block.store_zeros() : block.run();
}

using Variant = Config<MOE_DTYPE, MOE_BITS, MOE_GROUP, MOE_GLU, MOE_TILE_M, MOE_STAGES>;
static_assert(Variant::kSharedBytes == MOE_SHARED_BYTES, "the launcher and the kernel agree on shared memory");

extern "C" __global__ void __launch_bounds__(kThreads, MOE_BLOCKS_PER_SM)
    MOE_ENTRY(const u16* x, const unsigned char* w, const u16* scales, const u16* biases, const u16* bias,
#if MOE_GLU
              const unsigned char* w_up, const u16* scales_up, const u16* biases_up, const u16* bias_up,
#endif
              const int4* tiles, const int* row_ids, u16* out, int experts, int n, int k, int k_pad, int x_div,
              int has_bias,
#if MOE_GLU
              int out_width, int out_bits) {
  const Problem p{x,   w,       w_up, scales, scales_up, biases, biases_up, bias, bias_up,   tiles,   row_ids,
                  out, experts, n,    k,      k_pad,     x_div,  has_bias,  0,    out_width, out_bits};
#else
              int scatter) {
  const Problem p{x,   w,       w, scales, scales, biases, biases,   bias,    bias, tiles, row_ids,
                  out, experts, n, k,      k_pad,  x_div,  has_bias, scatter, 0,    0};
#endif
  extern __shared__ __align__(256) unsigned char shared[];
  prefill<Variant>(p, shared);
}
