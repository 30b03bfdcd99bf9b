// Hopper's instructions, as in ptx.cuh: mbarriers, bulk copies, wgmma. A kernel that includes this is for sm_90a.
#pragma once

#include "ptx.cuh"

namespace ptx {

// ---- mbarriers: 8 aligned bytes of shared memory. Phase i has parity i % 2, the first one is 0. ----

// A phase ends with as many arrivals, once the bytes that it expects are there.
DEVICE void mbarrier_init(Smem barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void mbarrier_arrive(Smem barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void mbarrier_arrive_expect(Smem barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives once all earlier cp.async of this thread have landed. The barrier counts it as an arrival like others.
DEVICE void cp_async_arrive(Smem barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until the phase of this parity has ended: parity 1 of a new barrier has.
DEVICE void mbarrier_wait(Smem barrier, u32 parity) {
  u32 ended;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!ended);
}

// ---- the asynchronous proxy, through which bulk copies and wgmma see shared memory ----

// Between writes to shared memory (cp.async and mbarrier_init are such) and their use by a bulk copy or wgmma.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// global -> shared, both aligned to 16 bytes and of a multiple of that; one thread's call copies all. The barrier has
// to expect the bytes.
DEVICE void cp_async_bulk(Smem dst, const void* src, u32 bytes, Smem barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(barrier)
               : "memory");
}

// ldmatrix_x4's inverse.
DEVICE void stmatrix_x4(Smem row, uint4 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Registers a thread of this warpgroup has from now on. Nobody gets more until others have given some back.
template <int kRegisters>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma: D[64,N] += A[64,16] B[16,N] by the four warps of a warpgroup, fp32 accumulation ----
//
// Warp w has rows 16 w .. 16 w + 15 of A and D. Its fragments are those of mma.m16n8k16, D's N / 8 one after the other.
// B lies in shared memory as N rows of K, in groups of eight rows. A row's piece of the group has as many bytes as the
// swizzle is wide, and the 16-byte chunks of an address are exchanged by its row: bits 4.. ^= bits 7..

enum class Swizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// Where B begins, and how far apart its parts are. Later steps of K add their distance in bytes / 16.
//   bits 0..13   address / 16. With a swizzle the group of rows is aligned to 8 times its width.
//   bits 16..29  leading / 16. No swizzle: from the first eight elements of K to the next; else unused
//   bits 32..45  stride / 16. From a group of eight rows to the next
//   bits 49..51  0: the groups are aligned
//   bits 62..63  the swizzle
DEVICE u64 wgmma_descriptor(Smem b, Swizzle swizzle, u32 stride, u32 leading = 16) {
  return static_cast<u64>((b & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// Before the first wgmma, and after registers that one uses were written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler does not see that wgmma works on: without this it may read accumulators, or write operands, before the
// wait that stands ahead of this.
template <int kCount>
DEVICE void wgmma_pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
DEVICE void wgmma_pin(u32 (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// clang-format off
#define WGMMA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D16 WGMMA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D32 WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D64 WGMMA_D32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D128 WGMMA_D64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_F8(i) WGMMA_F4(i), WGMMA_F4(i + 4)
#define WGMMA_F16(i) WGMMA_F8(i), WGMMA_F8(i + 8)
#define WGMMA_F32(i) WGMMA_F16(i), WGMMA_F16(i + 16)
#define WGMMA_F64(i) WGMMA_F32(i), WGMMA_F32(i + 32)
#define WGMMA_F128(i) WGMMA_F64(i), WGMMA_F64(i + 64)
#define WGMMA(shape, type, count, a0, a1, a2, a3, b_, p)                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" WGMMA_D##count \
               "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_ ", p, 1, 1, 0;\n}"                   \
               : WGMMA_F##count(0)                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
#define WGMMA_ANY(type)                                                                                \
  static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256, "no wgmma of this width here"); \
  if constexpr (N == 16) WGMMA("m64n16k16", type, 8, "%8", "%9", "%10", "%11", "%12", "%13");          \
  if constexpr (N == 32) WGMMA("m64n32k16", type, 16, "%16", "%17", "%18", "%19", "%20", "%21");       \
  if constexpr (N == 64) WGMMA("m64n64k16", type, 32, "%32", "%33", "%34", "%35", "%36", "%37");       \
  if constexpr (N == 128) WGMMA("m64n128k16", type, 64, "%64", "%65", "%66", "%67", "%68", "%69");     \
  if constexpr (N == 256) WGMMA("m64n256k16", type, 128, "%128", "%129", "%130", "%131", "%132", "%133")
// clang-format on

// `accumulate` false: D = A B. `b` and `accumulate` are the same in all 128 threads.
template <int N>
DEVICE void wgmma_bf16(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate = true) {
  WGMMA_ANY("bf16");
}

template <int N>
DEVICE void wgmma_fp16(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate = true) {
  WGMMA_ANY("f16");
}

}  // namespace ptx
