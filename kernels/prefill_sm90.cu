// Grouped quantized matmul for many rows on wgmma (prefill.cuh): 256 weight rows by up to 128 tokens a block.
//
// Two warpgroups multiply. Each warp streams its own 32 weight rows through a ring of its own, one K block (64 bytes
// of a row, quant.cuh) a stage: a lane copies the very bytes that it dequantises, into the registers that wgmma takes
// A from, while the step before runs. A third warpgroup gathers rows of x into a ring that all share, swizzled as wgmma
// reads it; mbarriers tell when a stage is full and when it is empty.
//
// As many blocks as the GPU runs at once share the units of work (a tile of tokens, 256 weight rows) in turn; while
// one unit ends the loads of the next are under way. Units that run together share a token tile; its expert's weights
// come from L2 for the next one. A tile with few rows runs narrower wgmmas, down to 16 tokens.
#include "prefill.cuh"
#include "ptx_sm90.cuh"

enum : int {
  kWarps = 8,                         // that multiply
  kLoaders = 128,                     // threads that gather x: the first warpgroup
  kThreads = kLoaders + 32 * kWarps,  //
  kTileM = 128,
  kPanelBytes = 128,  // of a token's K block: what the swizzle goes over
};

template <class T, int kBits_, int kGroup_, bool kGlu_, int kStages_, int kRing_>
struct Config {
  using Type = T;
  enum : int {
    kBits = kBits_,
    kGroup = kGroup_,
    kGlu = kGlu_,
    kStages = kStages_,  // of x
    kRing = kRing_,      // stages of a warp's weights
    kTileK = KBlock<kBits>::kSize,
    kSteps = KBlock<kBits>::kSteps,
    kPanelTokens = kTileM * kPanelBytes,
    kStageBytes = kTileK * 2 * kTileM,
    kWarpBytes = 32 * KBlock<kBits>::kBytes,  // of a K block
    kRingOffset = kStages * kStageBytes,
    kBarrierOffset = kRingOffset + kWarps * kRing * kWarpBytes,
    kSharedBytes = kBarrierOffset + kStages * 16,
    kLoaderRegisters = kBits == 4 ? 40 : 24,  // a loader has the more rows, the wider a token's K block is
    kMultiplierRegisters = kBits == 4 ? 232 : 240,
  };
  static_assert(kRing >= 2 && kStages >= 3, "copies run ahead, and a stage is released one step after it was read");
  static_assert(kSharedBytes <= 227 * 1024, "what sm_90 gives a block");
  static_assert(kLoaders * kLoaderRegisters + 32 * kWarps * kMultiplierRegisters <= 65536 / kThreads / 8 * 8 * kThreads,
                "what a block starts with");
};

template <int N>
DEVICE void wgmma(Bf16, float (&d)[N / 2], const u32 (&a)[4], u64 b) {
  ptx::wgmma_bf16<N>(d, a, b);
}
template <int N>
DEVICE void wgmma(Fp16, float (&d)[N / 2], const u32 (&a)[4], u64 b) {
  ptx::wgmma_fp16<N>(d, a, b);
}

// A stage of a ring and the parity of the mbarrier phase in which it is filled.
template <int kStages>
struct Turn {
  int stage = 0;
  u32 parity = 0;

  DEVICE void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <class C>
struct Barriers {
  ptx::Smem smem;

  DEVICE ptx::Smem full(int stage) const { return smem + C::kBarrierOffset + stage * 16; }
  DEVICE ptx::Smem empty(int stage) const { return full(stage) + 8; }

  DEVICE void init() const {
    for (int s = 0; s < C::kStages; ++s) {
      ptx::mbarrier_init(full(s), kLoaders / 32);
      ptx::mbarrier_init(empty(s), kWarps);
    }
  }
};

// Number u: tile slot u / n_blocks, and there the weight rows u % n_blocks.
struct Unit {
  int number;
  int4 tile;  // without rows: there are no more units
  int n0;
};

// Units are dealt to blocks in turn.
template <class C>
struct Units {
  using Base = Tile<typename C::Type, C::kGlu, kWarps>;

  const Problem& p;
  const int slots;

  // A block's next unit that has work, from number u on; `skip` is told of tiles whose expert does not exist.
  template <class Skip>
  DEVICE Unit find(int u, const Skip& skip) const {
    const int n_blocks = (p.width(C::kGlu) + Base::kColumns - 1) / Base::kColumns;
#pragma unroll 1
    for (; u < slots * n_blocks; u += static_cast<int>(gridDim.x)) {
      const int4 tile = ptx::load(p.tiles + u / n_blocks);
      const int n0 = u % n_blocks * Base::kColumns;
      if (tile.z == 0) continue;
      if (tile.x != p.experts) return {u, tile, n0};
      skip(tile, n0);
    }
    return {u, make_int4(0, 0, 0, 0), 0};
  }

  template <class Skip>
  DEVICE Unit first(const Skip& skip) const {
    return find(static_cast<int>(blockIdx.x), skip);
  }

  template <class Skip>
  DEVICE Unit after(const Unit& unit, const Skip& skip) const {
    return find(unit.number + static_cast<int>(gridDim.x), skip);
  }
};

// Tokens that a tile's wgmmas take: its rows, rounded up.
DEVICE int tokens_of(const int4& tile) { return tile.z > 64 ? 128 : tile.z > 32 ? 64 : tile.z > 16 ? 32 : 16; }

// The warpgroup that gathers x.
template <class C>
struct Loader {
  enum : int {
    kChunks = C::kTileK / 8,        // 16-byte pieces of a token's K block
    kRowStep = kLoaders / kChunks,  // tokens that the warpgroup copies at once
    kRowsPerThread = kTileM / kRowStep,
  };
  static_assert(kRowStep % 8 == 0, "a thread's rows share one swizzle");

  const Problem& p;
  const Barriers<C> barriers;

  // The copies of all but the last kPending stages have landed: tells those who wait for one of these.
  template <int kPending>
  DEVICE void publish(int stage) const {
    ptx::cp_async_wait<kPending>();
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barriers.full(stage));
  }

  DEVICE void run(const Units<C>& units) const {
    const auto nothing = [](const int4&, int) {};
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, r0 = static_cast<int>(threadIdx.x) / kChunks;
    const ptx::Smem to = barriers.smem + chunk / 8 * C::kPanelTokens + r0 * kPanelBytes + (chunk % 8 ^ r0 % 8) * 16;
    Turn<C::kStages> turn;
    int before = -1;  // the stage whose copies were started before those of `turn`
    for (Unit unit = units.first(nothing); unit.tile.z; unit = units.after(unit, nothing)) {
      const int rows = tokens_of(unit.tile) / kRowStep;
      u32 from[kRowsPerThread];  // rows of x in units of 16 bytes. Those past the end of the tile repeat the last
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int row = i < rows ? p.x_row(unit.tile.y + min(r0 + i * kRowStep, unit.tile.z - 1)) : 0;
        from[i] = static_cast<u32>(row) * static_cast<u32>(p.k_pad / 8);
      }
      const uint4* x = reinterpret_cast<const uint4*>(p.x) + chunk;
#pragma unroll 1
      for (int k = 0; k < p.k_pad; k += C::kTileK, x += kChunks) {
        ptx::mbarrier_wait(barriers.empty(turn.stage), turn.parity ^ 1);
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
          if (i == rows) break;
          ptx::cp_async16(to + turn.stage * C::kStageBytes + i * kRowStep * kPanelBytes, x + from[i]);
        }
        ptx::cp_async_commit();
        if (before >= 0) publish<1>(before);
        before = turn.stage;
        turn.next();
      }
    }
    if (before >= 0) publish<0>(before);
  }
};

// One of the warps that multiply.
template <class C>
struct Multiplier {
  using T = typename C::Type;
  using Base = Tile<T, C::kGlu, kWarps>;

  const Problem& p;
  const Barriers<C> barriers;
  const int warp, lane;

  // Where a lane's weight rows lie: one of each panel and half.
  struct Rows {
    i64 first;  // of all experts' rows
    int left;   // how many rows its expert has from there
  };

  DEVICE Rows rows_of(const Unit& unit) const {
    if (unit.tile.z == 0) return {0, 0};
    const Base tile{p, unit.tile, unit.n0, warp, lane};
    const int row = tile.weight_row(tile.block_row(0, 0, lane / 4));
    return {static_cast<i64>(unit.tile.x) * p.n + row, p.n - row};
  }

  // From a lane's first row to that of a panel and half; GLU's panels are two matrices.
  DEVICE int distance(int panel, int half) const {
    if constexpr (C::kGlu) return half * (p.out_bits == 4 ? 32 : 16);
    return interleaved_row<Base::kRun>(2 * panel + half, 0);
  }

  DEVICE ptx::Smem ring(int stage) const {
    return barriers.smem + C::kRingOffset + (warp * C::kRing + stage) * C::kWarpBytes + lane * 16;
  }

  // Starts the copies of this lane's 16 bytes of each row in K block kb.
  DEVICE void fetch(Rows rows, int kb, int stage) const {
    const int row_bytes = p.k / 8 * C::kBits, byte = kb * KBlock<C::kBits>::kBytes + lane % 4 * 16;
    const i64 first = rows.first * row_bytes + byte;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int panel = i / 2, distance = this->distance(panel, i % 2);
      ptx::cp_async16(ring(stage) + i * 512, (C::kGlu && panel ? p.w_up : p.w) + first + distance * row_bytes,
                      byte < row_bytes && distance < rows.left);
    }
    ptx::cp_async_commit();
  }

  struct Scales {
    u16 scale[4], bias[4];  // of panel i / 2, half i % 2
  };

  // Those of the group that this lane's elements of K block kb belong to; past the end of a matrix zeros.
  DEVICE Scales load_scales(Rows rows, int kb) const {
    const int groups = p.k / C::kGroup, group = (kb * C::kTileK + lane % 4 * (C::kTileK / 4)) / C::kGroup;
    const i64 first = rows.first * groups + group;
    Scales s;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int panel = i / 2, distance = this->distance(panel, i % 2);
      const bool valid = group < groups && distance < rows.left;
      const i64 at = first + distance * groups;
      s.scale[i] = valid ? ptx::ldg16((C::kGlu && panel ? p.scales_up : p.scales) + at) : 0;
      s.bias[i] = valid ? ptx::ldg16((C::kGlu && panel ? p.biases_up : p.biases) + at) : 0;
    }
    return s;
  }

  // What goes on from one unit to the next.
  struct Stream {
    Turn<C::kStages> tokens;
    int stage;      // of the ring, whose weights are next
    Scales scales;  // of these
  };

  // K blocks whose weights are under way: as many as the ring holds, but for a very short K.
  DEVICE int ahead() const { return min(C::kRing - 1, p.k_pad / C::kTileK); }

  DEVICE static int wrapped(int stage) { return stage >= C::kRing ? stage - C::kRing : stage; }

  // One unit with wgmmas of kTokens tokens. Its first weights are under way, and those of `next` are when it ends.
  template <int kTokens>
  DEVICE void multiply(const Unit& unit, Rows rows, Rows next, Stream& stream) const {
    const int k_blocks = p.k_pad / C::kTileK, ahead = this->ahead();
    float acc[2][kTokens / 2] = {};  // of each panel, fragments of eight tokens
    int before = 0;                  // the stage of x that was read before
#pragma unroll 1
    for (int kb = 0; kb < k_blocks; ++kb) {
      ahead == C::kRing - 1 ? ptx::cp_async_wait<C::kRing - 2>() : ptx::cp_async_wait<0>();
      uint4 words[4];
      u32 scale[4], bias[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = ptx::lds128(ring(stream.stage) + i * 512);
        scale[i] = stream.scales.scale[i] * 0x10001u, bias[i] = stream.scales.bias[i] * 0x10001u;
      }
      const bool ends = kb + ahead >= k_blocks;
      const bool last = kb + 1 == k_blocks;
      fetch(ends ? next : rows, ends ? kb + ahead - k_blocks : kb + ahead, wrapped(stream.stage + ahead));
      stream.scales = load_scales(last ? next : rows, last ? 0 : kb + 1);
      stream.stage = wrapped(stream.stage + 1);

      ptx::mbarrier_wait(barriers.full(stream.tokens.stage), stream.tokens.parity);
      const u64 tokens = ptx::wgmma_descriptor(barriers.smem + stream.tokens.stage * C::kStageBytes, ptx::Swizzle::k128,
                                               8 * kPanelBytes);
      u32 a[2][2][4];  // of two steps, the panels' fragments
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        auto& now = a[step % 2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int panel = i / 4, u = i / 2 % 2, half = i % 2, row = 2 * panel + half;
          now[panel][2 * u + half] = dequantize<T, C::kBits>(words[row], step, u, scale[row], bias[row]);
        }
        ptx::wgmma_pin(now[0]);
        ptx::wgmma_pin(now[1]);
        ptx::wgmma_fence();
        const u64 b = tokens + (step / 4 * C::kPanelTokens + step % 4 * 32) / 16;
        wgmma<kTokens>(T{}, acc[0], now[0], b);
        wgmma<kTokens>(T{}, acc[1], now[1], b);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // the step before: its A may be written again,
        if (step == 0 && kb && lane == 0)
          ptx::mbarrier_arrive(barriers.empty(before));  // and its x, if that was the last
      }
      before = stream.tokens.stage;
      stream.tokens.next();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc[0]);
    ptx::wgmma_pin(acc[1]);
    if (lane == 0) ptx::mbarrier_arrive(barriers.empty(before));
    const Base tile{p, unit.tile, unit.n0, warp, lane};
    tile.template store<kTokens / 8>(kTokens / 8, [&](int panel, int j, int c) { return acc[panel][4 * j + c]; });
  }

  DEVICE void run(const Units<C>& units) const {
    const auto zeros = [&](const int4& tile, int n0) { Base{p, tile, n0, warp, lane}.store_zeros(); };
    Unit unit = units.first(zeros);
    Rows rows = rows_of(unit);
    Stream stream{{}, 0, load_scales(rows, 0)};
#pragma unroll 1
    for (int kb = 0; kb < ahead(); ++kb) fetch(rows, kb, kb);
#pragma unroll 1
    while (unit.tile.z) {
      const Unit after = units.after(unit, zeros);
      const Rows next = rows_of(after);
      switch (tokens_of(unit.tile)) {
        case 16:
          multiply<16>(unit, rows, next, stream);
          break;
        case 32:
          multiply<32>(unit, rows, next, stream);
          break;
        case 64:
          multiply<64>(unit, rows, next, stream);
          break;
        default:
          multiply<128>(unit, rows, next, stream);
      }
      unit = after, rows = next;
    }
    ptx::cp_async_wait<0>();
  }
};

template <class C>
DEVICE void prefill(const Problem& p, int slots, const void* shared) {
  const Barriers<C> barriers{ptx::smem_address(shared)};
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  const Units<C> units{p, slots};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kLoaders) {
    ptx::setmaxnreg_dec<C::kLoaderRegisters>();
    Loader<C>{p, barriers}.run(units);
  } else {
    ptx::setmaxnreg_inc<C::kMultiplierRegisters>();
    Multiplier<C>{p, barriers, (thread - kLoaders) / 32, thread % 32}.run(units);
  }
}

using Variant = Config<MOE_DTYPE, MOE_BITS, MOE_GROUP, MOE_GLU, MOE_STAGES, MOE_RING>;
static_assert(Variant::kSharedBytes == MOE_SHARED_BYTES, "the launcher and the kernel agree on shared memory");

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    MOE_ENTRY(const u16* x, const unsigned char* w, const u16* scales, const u16* biases, const u16* bias,
#if MOE_GLU
              const unsigned char* w_up, const u16* scales_up, const u16* biases_up, const u16* bias_up,
#endif
              const int4* tiles, const int* row_ids, u16* out, int experts, int n, int k, int k_pad, int x_div,
              int has_bias,
#if MOE_GLU
              int out_width, int out_bits, int slots) {
  const Problem p{x,   w,       w_up, scales, scales_up, biases, biases_up, bias, bias_up,   tiles,   row_ids,
                  out, experts, n,    k,      k_pad,     x_div,  has_bias,  0,    out_width, out_bits};
#else
              int scatter, int slots) {
  const Problem p{x,   w,       w, scales, scales, biases, biases,   bias,    bias, tiles, row_ids,
                  out, experts, n, k,      k_pad,  x_div,  has_bias, scatter, 0,    0};
#endif
  extern __shared__ __align__(1024) unsigned char shared[];
  prefill<Variant>(p, slots, shared);
}
