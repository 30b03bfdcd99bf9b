// Routing lists and permuted activations, in one launch and without a host read.
//
//   row_ids[0, rows)  positions in `ids`, sorted by expert (stable); ids outside [0, experts) come last
//   tiles[slot]       {expert, first sorted row, rows, 0} for every slot in [0, rows / tile_m + experts + 1);
//                     expert == experts marks rows whose id was out of range, rows == 0 an unused slot
//   x_perm            x with K permuted inside each block (quant.cuh) and padded with zeros to k_pad
//
// Block e < route_blocks owns expert e. It counts the ids below e and equal to e, which gives its offset without
// any other block, then writes its rows. Full tiles come first, those of expert e in the slots from offset / tile_m
// up to (offset + count) / tile_m, which are enough for them (at most one stays unused) and which no other expert
// has. What is left over of each expert follows in slot rows / tile_m + e: short tiles run last and fill the gaps.
// The remaining blocks permute x.
#include "quant.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 8;  // ids a lane has under way
static_assert(kWarps * 8 == MOE_SHARED_BYTES, "the launcher and the kernel agree on shared memory");

DEVICE int warp_sum(int v) {
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, i);
  return v;
}

// Experts of the ids begin + 32 j + lane, all loads under way at once. Out of range: `experts`; past the end: -1.
DEVICE void load_experts(const int* ids, int begin, int end, int experts, int (&found)[kBatch]) {
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = begin + 32 * j + static_cast<int>(threadIdx.x % 32);
    found[j] = i < end ? static_cast<int>(min(static_cast<u32>(ptx::load(ids + i)), static_cast<u32>(experts))) : -1;
  }
}

DEVICE void route_expert(const int* ids, int* row_ids, int4* tiles, int rows, int experts, int tile_m, ptx::Smem sums) {
  const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int segment = (rows + kThreads - 1) / kThreads * 32;  // ids a warp scans, in order
  const int begin = min(warp * segment, rows), end = min(begin + segment, rows);

  int found[kBatch], below = 0, equal = 0;
#pragma unroll 1
  for (int i = begin; i < end; i += 32 * kBatch) {
    load_experts(ids, i, end, experts, found);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      below += found[j] >= 0 && found[j] < expert;
      equal += found[j] == expert;
    }
  }
  below = warp_sum(below);
  equal = warp_sum(equal);
  if (lane == 0) ptx::sts64(sums + warp * 8, make_uint2(below, equal));
  __syncthreads();

  const uint2 other = lane < kWarps ? ptx::lds64(sums + lane * 8) : make_uint2(0, 0);
  const int offset = warp_sum(other.x), count = warp_sum(other.y);

  int next = offset + warp_sum(lane < warp ? other.y : 0);
#pragma unroll 1
  for (int i = begin; i < end; i += 32 * kBatch) {
    load_experts(ids, i, end, experts, found);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const u32 votes = __ballot_sync(0xFFFFFFFFu, found[j] == expert);
      if (found[j] == expert) ptx::store(row_ids + next + __popc(votes & ((1u << lane) - 1)), i + 32 * j + lane);
      next += __popc(votes);
    }
  }

  const int first = offset / tile_m, full = count / tile_m;
#pragma unroll 1
  for (int slot = first + threadIdx.x; slot < (offset + count) / tile_m; slot += kThreads) {
    const int i = slot - first;
    ptx::store(tiles + slot, make_int4(expert, offset + i * tile_m, i < full ? tile_m : 0, 0));
  }
  if (threadIdx.x == 0) {
    const int4 rest = make_int4(expert, offset + full * tile_m, count - full * tile_m, 0);
    ptx::store(tiles + rows / tile_m + expert, rest);
  }
}

// One 16-byte chunk of a permuted row a thread.
DEVICE void permute_rows(const u16* x, uint4* x_perm, u32 x_rows, int k, int k_pad, u32 block) {
  const u32 chunks = k_pad / 8, i = block * kThreads + threadIdx.x, row = i / chunks;
  if (row >= x_rows) return;
  const u16* in = x + static_cast<i64>(row) * k;
  const u32 p = i % chunks * 8;
  u32 packed[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int lo = logical_k<MOE_BITS>(p + 2 * t), hi = logical_k<MOE_BITS>(p + 2 * t + 1);
    packed[t] = (lo < k ? ptx::load(in + lo) : 0u) | (hi < k ? static_cast<u32>(ptx::load(in + hi)) << 16 : 0u);
  }
  ptx::store(x_perm + i, make_uint4(packed[0], packed[1], packed[2], packed[3]));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    MOE_ENTRY(const int* ids,  // [rows]
              const u16* x,    // [x_rows, k], any 16-bit type
              int* row_ids,    // [rows]
              int4* tiles,     // [rows / tile_m + experts + 1]
              uint4* x_perm,   // [x_rows, k_pad] of the same type; fewer than 2^32 chunks
              int rows, int experts, int tile_m, int route_blocks, int x_rows, int k, int k_pad) {
  extern __shared__ __align__(256) unsigned char shared[];  // a warp's two counts
  const int block = static_cast<int>(blockIdx.x);
  if (block < route_blocks) return route_expert(ids, row_ids, tiles, rows, experts, tile_m, ptx::smem_address(shared));
  permute_rows(x, x_perm, x_rows, k, k_pad, block - route_blocks);
}
