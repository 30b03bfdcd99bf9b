"""Writes the table of counters in kernels/README.md: what each tile height issues, read off the emulator.

python scripts/kernel_counters.py [--check]
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cases import Case  # noqa: E402
from emulator import Emulator  # noqa: E402

from mlx_moe_fast import ops, variants  # noqa: E402
from mlx_moe_fast.problem import Quantization  # noqa: E402

PAGE = ROOT / "kernels" / "README.md"
BLOCK = re.compile(r"(<!-- counters -->\n).*?(<!-- /counters -->)", re.S)
HEAD = """\
| tile | MMAs | weights dequantised | MMAs a fragment | shared-memory wavefronts | bytes read | 32-byte sectors |
|--:|--:|--:|--:|--:|--:|--:|
"""
# 256 rows of one expert, two blocks of weight rows, four K blocks: every tile height is full.
CASE = Case(256, 1, 512, 256, 1, Quantization(4, 64))


def table() -> str:
    """A line a tile height; each column is a count over the least possible, but for MMAs a fragment."""
    x, ids, weights, _, _ = CASE.arrays()
    p = weights.projection
    stored = sum(a.nbytes for a in (weights.weight, weights.scales, weights.biases))
    least_bytes = stored + CASE.rows * CASE.hidden * 2
    lines = []
    for tile in variants.TILES.values():
        emulator = Emulator()
        stock, ops.launch = ops.launch, emulator.launch
        try:
            ops.grouped_qmm(x, ids.flatten(), weights, tile)
        finally:
            ops.launch = stock
        c = next(counted for name, counted in emulator.counters if name == variants.of(p, False, tile).id)
        fragments = c["fma2"] / 2 / 4 / 32  # two fma a pair, four pairs a lane, 32 lanes
        columns = [
            c["mma"] / (CASE.rows * p.n * p.k / (16 * 8 * 16)),
            c["fma2"] / (p.experts * p.n * p.k),  # two fma a pair of weights
            c["mma"] / fragments,
            c["shared_wavefronts"] / c["shared_least"],
            c["global_bytes"] / least_bytes,
            c["global_sectors"] / c["global_least"],
        ]
        lines.append(f"| {tile.m} | " + " | ".join(f"{v:.2f}" for v in columns) + " |\n")
    return HEAD + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page differs")
    check = parser.parse_args().check
    old = PAGE.read_text()
    new = BLOCK.sub(lambda match: match[1] + table() + match[2], old)
    if check and new != old:
        sys.exit(f"error: {PAGE} differs; run scripts/kernel_counters.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
