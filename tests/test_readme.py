"""README's tables of reasons and variables are what the code holds."""

from pathlib import Path

import pytest

from mlx_moe_fast import blocks, envs, variants
from mlx_moe_fast.dispatch import ROWS_PER_EXPERT, TALLEST
from mlx_moe_fast.eligibility import HELP
from mlx_moe_fast.problem import Quantization

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("reason", HELP, ids=str)
def test_reasons(reason):
    assert f"| `{reason.value}` | {HELP[reason]} |\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("variable", envs.ALL, ids=lambda v: v.name)
def test_variables(variable):
    assert f"| `{variable.name}` | {variable.help} |\n" in (ROOT / "README.md").read_text()


def test_tiles():
    """kernels/README.md: tile, stages, blocks, shared memory, rows an expert."""
    lines = (ROOT / "kernels" / "README.md").read_text().splitlines()
    start = {
        m: before + 1 for (before, _), m in zip(ROWS_PER_EXPERT, [m for _, m in ROWS_PER_EXPERT[1:]], strict=False)
    }
    start |= {ROWS_PER_EXPERT[0][1]: 0, TALLEST: ROWS_PER_EXPERT[-1][0] + 1}
    for tile in variants.TILES.values():
        shared = round(variants.Prefill(Quantization(4, 64), "bf16", False, tile).shared_bytes / 1024)
        assert f"| {tile.m} | {tile.stages} | {tile.blocks_per_sm} | {shared} KB | {start[tile.m]} |" in lines


@pytest.mark.parametrize("name", blocks.FORMS)
def test_blocks(name):
    assert f"| `{name}` |" in (ROOT / "docs" / "batched-decode.md").read_text()
