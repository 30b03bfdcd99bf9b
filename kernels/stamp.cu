// Copies x, then time[0] = the clock: what kernels between two stamps took, where each needs the result of the one before.
#include "ptx.cuh"

extern "C" __global__ void MOE_ENTRY(const u16* x, u16* out, u64* time, int n) {
  for (int i = threadIdx.x; i < n; i += MOE_THREADS) ptx::store(out + i, ptx::load(x + i));
  ptx::bar_sync(0, MOE_THREADS);
  if (threadIdx.x == 0) ptx::store(time, ptx::globaltimer());
}
