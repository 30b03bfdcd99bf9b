"""Every declared variant compiles for every supported architecture, and fits it. Needs no GPU."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_moe_fast import jit
from mlx_moe_fast.variants import all_variants

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a")
REGISTERS = 65_536  # of an SM, on all of them


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_spilling(arch):
    variants = all_variants(arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC lets other threads run
        compiled = list(pool.map(lambda variant: jit.compile(variant, arch), variants))
    misfits = []
    for variant, (cubin, resources) in zip(variants, compiled, strict=True):
        blocks = variant.defines.get("MOE_BLOCKS_PER_SM", 1)
        assert f".text.{variant.id}\0".encode() in cubin
        assert resources.registers > 0, "the compiler's report was not understood"
        if resources.spilled_bytes or resources.registers * variant.threads * blocks > REGISTERS:
            misfits.append(f"{variant.id}: {resources}, {blocks} blocks an SM")
    assert not misfits, "\n".join(misfits)
