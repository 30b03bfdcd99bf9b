// Router logits -> top-k experts and their weights, one warp a token.
//
//   ids[token, j]      the j-th largest logit's expert; of equal ones the lower index; NaN counts as the largest
//   weights[token, j]  e^logit / sum of e^logit, over the top-k (kOverAll == 0) or over all experts, in fp32
//   counters[i] = 0    for whoever counts its blocks next (decode.cu)
//
// A softmax whose top-k is normalised again is the softmax of the top-k.
#include "quant.cuh"

enum : int {
  kWarps = 4,
  kThreads = 32 * kWarps,
  kMost = 16,  // logits of a lane: 512 experts
};

using T = MOE_DTYPE;

// Larger logits have larger keys; 0 is nobody's.
DEVICE u32 order_key(float logit) {
  const u32 bits = __float_as_uint(logit);
  if (logit != logit) return 0xFFFFFFFFu;
  if (logit == 0) return 0x80000000u;  // of either sign
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float logit_of(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);  // the largest key is a NaN again
}

DEVICE float exp_above(float logit, float largest) { return ptx::exp2_approx(1.4426950408889634f * (logit - largest)); }

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, i);
  return v;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    MOE_ENTRY(const u16* logits, int* ids, float* weights, int* counters, int tokens, int experts, int top_k,
              int over_all, int n_counters) {
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n_counters; i += kThreads) ptx::store(counters + i, 0);
  }
  const int token = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (token >= tokens) return;

  u32 keys[kMost];  // of experts lane + 32 i
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int expert = lane + 32 * i;
    keys[i] =
        expert < experts ? order_key(T::to_float(ptx::ldg16(logits + static_cast<i64>(token) * experts + expert))) : 0;
  }

  int chosen = 0;      // lane j: the j-th expert
  u32 chosen_key = 0;  // and its logit's key
  float all = 0;       // sum of e^(logit - largest) of this lane's logits
  u32 largest_key = 0;
#pragma unroll 1
  for (int j = 0; j < top_k; ++j) {
    u32 key = 0;
    int expert = experts;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (keys[i] > key) key = keys[i], expert = lane + 32 * i;
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      const u32 other_key = __shfl_xor_sync(0xFFFFFFFFu, key, i);
      const int other = __shfl_xor_sync(0xFFFFFFFFu, expert, i);
      if (other_key > key || (other_key == key && other < expert)) key = other_key, expert = other;
    }
    if (j == 0) {
      largest_key = key;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (keys[i]) all += exp_above(logit_of(keys[i]), logit_of(key));
      }
    }
    if (lane == j) chosen = expert, chosen_key = key;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (expert == lane + 32 * i) keys[i] = 0;
    }
  }
  const float own = lane < top_k ? exp_above(logit_of(chosen_key), logit_of(largest_key)) : 0.0f;
  const float sum = warp_sum(over_all ? all : own);
  if (lane < top_k) {
    ptx::store(ids + token * top_k + lane, chosen);
    ptx::store(weights + token * top_k + lane, own / sum);
  }
}
