"""Small kernels that show one instruction or one fault; they stand where a variant does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from emulator import Emulator, Fault, build_all
from numerics import array

RUNS = [(seed, late) for seed in range(6) for late in (True, False)]


@dataclass(frozen=True)
class Sketch:
    """A kernel's body, which has its thread in `t`, shared memory from `smem` on, and `parameters`."""

    body: str
    threads: int = 64
    shared_bytes: int = 1024
    id: str = "sketch"
    parameters: str = "const u16* in, u16* out"
    header: str = "ptx.cuh"
    source: str = "sketch.cu"

    @property
    def defines(self) -> dict[str, str]:
        return {"MOE_ENTRY": self.id}

    @property
    def sources(self) -> dict[str, str]:
        text = f"""#include "{self.header}"
extern "C" __global__ void __launch_bounds__({self.threads}, 1) MOE_ENTRY({self.parameters}, int n) {{
  extern __shared__ __align__(1024) unsigned char shared[];
  const ptx::Smem smem = ptx::smem_address(shared);
  const u32 t = threadIdx.x;
  (void)smem, (void)t, (void)in, (void)out, (void)n;
{self.body}
}}
"""
        return {self.source: text}

    def but(self, old: str, new: str) -> "Sketch":
        """The same with one change."""
        assert self.body.count(old) == 1
        return replace(self, body=self.body.replace(old, new))


def outcomes(sketch: Sketch, inputs: Sequence[mx.array], output: tuple[tuple[int, ...], mx.Dtype], n: int) -> set[str]:
    """What a launch leaves, or how it fails, under several schedules."""
    build_all([sketch], sketch.sources, sanitize=False)
    found = set()
    for seed, late in RUNS:
        try:
            (out,) = Emulator(seed, late, sources=sketch.sources).launch(sketch, inputs, [output], [n], blocks=1)
            found.add(array(out).tobytes().hex())
        except Fault as fault:
            found.add(str(fault))
    return found
