// Router logits -> top-k experts and their weights, one warp a token.
//
//   score                of an expert: its part of the softmax over all experts, or the sigmoid of its logit
//   choice               score + the expert's bias, if there is one; the logit where its order is the same
//   groups               all but the best top_groups lose: the choice of their experts becomes `dropped`. Experts of a
//                        group are neighbours; a group is as good as its best choice, or as the sum of its best two
//   ids[token, j]        the expert of the j-th largest choice; of equal ones the lower index; NaN counts as the largest
//   weights[token, j]    score * scale, if `normalise` over (sum of the top-k's scores + eps)
//   counters[i] = 0      for whoever counts its blocks next (decode.cu)
#include "ptx.cuh"

enum : int {
  kWarps = 4,
  kThreads = 32 * kWarps,
  kMost = 16,  // experts of a lane: lane + 32 i
};
enum Numbers : int { kNone, kFp32, kBf16, kFp16 };

// Whether no lane has an i-th expert, nor further ones. Asked of some i only: loops are unrolled, and are left there.
DEVICE bool past(int i, int experts) { return i % 4 == 0 && 32 * i >= experts; }

DEVICE u32 bits_at(const void* array, int kind, i64 i) {
  return kind == kFp32 ? ptx::load(static_cast<const u32*>(array) + i) : ptx::ldg16(static_cast<const u16*>(array) + i);
}

DEVICE float number(u32 bits, int kind) {
  const float half = kind == kBf16 ? ptx::bf16_to_float(bits) : ptx::fp16_to_float(bits);
  return kind == kFp32 ? __uint_as_float(bits) : half;
}

// A lane's `count` of numbers, 32 apart, and zeros. All are under way before the first is needed.
DEVICE void load_numbers(float (&numbers)[kMost], const void* array, int kind, i64 first, int count) {
  u32 bits[kMost] = {};
  if (kind == kFp32) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) bits[i] = i < count ? bits_at(array, kFp32, first + 32 * i) : 0;
  } else if (kind != kNone) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) bits[i] = i < count ? bits_at(array, kBf16, first + 32 * i) : 0;
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) numbers[i] = number(bits[i], kind);
}

// Larger values have larger keys, zeros of either sign the same; a NaN's is the largest, and 0 is nobody's.
DEVICE u32 order_key(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return value == value ? bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u) : 0xFFFFFFFFu;
}

DEVICE float value_of(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);  // the largest key is a NaN again
}

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, i);
  return v;
}

// How good the group of experts [begin, begin + size) is: the sum of its `best` best choices.
DEVICE float group_value(const u32 (&keys)[kMost], int experts, int lane, u32 begin, u32 size, int best) {
  u32 first = 0, second = 0;  // of this lane
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (past(i, experts)) break;
    const u32 key = static_cast<u32>(lane + 32 * i) - begin < size ? keys[i] : 0;
    second = max(second, min(first, key));
    first = max(first, key);
  }
  const u32 largest = ptx::redux_max(first);
  if (best == 1) return value_of(largest);
  const u32 holders = __ballot_sync(0xFFFFFFFFu, first == largest);
  const bool taken = first == largest && holders << (31 - lane) == 0x80000000u;  // by the first of the holders
  return value_of(largest) + value_of(ptx::redux_max(taken ? second : first));
}

DEVICE void limit_groups(u32 (&keys)[kMost], int lane, int experts, int groups, int top_groups, int best, u32 dropped) {
  const u32 size = static_cast<u32>(experts / groups);
  u32 mine = 0;  // key of group `lane`
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    const float value = group_value(keys, experts, lane, group * size, size, best);
    if (lane == group) mine = order_key(value);
  }
#pragma unroll 1
  for (int n = 0; n < top_groups; ++n) {
    const u32 largest = ptx::redux_max(mine);
    const int winner = static_cast<int>(ptx::redux_min(mine == largest ? lane : 32));
    if (lane == winner) mine = 0;
  }
  u32 losers = __ballot_sync(0xFFFFFFFFu, mine != 0);
#pragma unroll 1
  for (u32 begin = 0; losers; begin += size, losers >>= 1) {
    if (!(losers & 1)) continue;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (past(i, experts)) break;
      if (static_cast<u32>(lane + 32 * i) - begin < size) keys[i] = dropped;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    MOE_ENTRY(const void* logits, const void* bias, int* ids, float* weights, int* counters, int tokens, int experts,
              int top_k, int softmax, int bias_kind, int groups, int top_groups, int best, int dropped, int normalise,
              int eps, int scale, int n_counters) {
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n_counters; i += kThreads) ptx::store(counters + i, 0);
  }
  const int token = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (token >= tokens) return;

  const i64 row = static_cast<i64>(token) * experts;
  const int count = (experts - lane + 31) / 32;  // experts of this lane
  float values[kMost], biases[kMost];
  load_numbers(values, logits, MOE_LOGITS, row + lane, count);
  load_numbers(biases, bias, bias_kind, lane, count);

  u32 keys[kMost] = {}, largest_key = 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (past(i, experts)) break;
    keys[i] = i < count ? order_key(values[i]) : 0;
    largest_key = max(largest_key, keys[i]);
  }
  const float largest = value_of(ptx::redux_max(largest_key));
  // e^(logit - largest), whose part of `whole` is the softmax, or e^-logit, of which the sigmoid is made. Accurate,
  // unlike ex2.approx: a choice between experts may hang on it.
  const float sign = softmax ? 1 : -1, shift = softmax ? largest : 0;
  float whole = 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (past(i, experts)) break;
    values[i] = expf(sign * values[i] - shift);
    if (i < count) whole += values[i];
  }
  whole = softmax ? warp_sum(whole) : 1;
  if (bias_kind != kNone || best > 1) {  // else the order of the logits is that of the choices
    const float part = 1 / whole;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (past(i, experts)) break;
      const float score = softmax ? values[i] * part : ptx::rcp_approx(1 + values[i]);
      if (i < count) keys[i] = order_key(score + biases[i]);
    }
  }
  if (groups > 1) limit_groups(keys, lane, experts, groups, top_groups, best, order_key(__uint_as_float(dropped)));

  int chosen = 0;  // lane j: the j-th expert
#pragma unroll 1
  for (int j = 0; j < top_k; ++j) {
    u32 key = 0;
    int expert = experts;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (past(i, experts)) break;
      if (keys[i] > key) key = keys[i], expert = lane + 32 * i;
    }
    const u32 best_key = ptx::redux_max(key);
    expert = static_cast<int>(ptx::redux_min(key == best_key ? expert : experts));
    if (lane == j) chosen = expert;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (past(i, experts)) break;
      if (expert == lane + 32 * i) keys[i] = 0;
    }
  }

  float own = 0;
  if (lane < top_k) {
    own = expf(sign * number(bits_at(logits, MOE_LOGITS, row + chosen), MOE_LOGITS) - shift);
    if (!softmax) own = 1 / (1 + own);
  }
  const float sum = warp_sum(own);
  if (lane < top_k) {
    ptx::store(ids + token * top_k + lane, chosen);
    const float share = own / (normalise ? sum + __uint_as_float(eps) * whole : whole);
    ptx::store(weights + token * top_k + lane, share * __uint_as_float(scale));
  }
}
