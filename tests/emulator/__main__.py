"""Runs one variant on the shapes around its tile: is it right, and how far is what it does from the least possible?"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import mlx.core as mx
from cases import Case, around
from checks import run
from numerics import array

from mlx_moe_fast import ops, variants

from . import Emulator


def ratios(c: dict[str, int], case: Case, glu: bool) -> list[tuple[int, float]]:
    """Counts, and over the least: MMAs of 8 rows, each weight of an expert that has rows dequantised once, no bank
    conflict, every byte of a sector used."""
    rows = Counter(i for i in array(case.arrays()[1]).flatten().tolist() if 0 <= i < case.experts)
    matrix = case.features * case.hidden * (2 if glu else 1)
    mma = sum(-(-r // 8) * 8 for r in rows.values()) * matrix / (16 * 8 * 16)
    least = {"mma": mma, "fma2": len(rows) * matrix}  # two fma2 make two weights
    least |= {"shared_wavefronts": c["shared_least"], "global_sectors": c["global_least"]}
    return [(c[name], c[name] / floor) for name, floor in least.items()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator", description=__doc__)
    parser.add_argument("variant", help="the id of a prefill variant, or its end: glu_affine4g64_bf16_m64")
    parser.add_argument("--case", type=int, metavar="N", help="only this one of the shapes")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which warps and blocks run (0)")
    parser.add_argument("--eager", action="store_true", help="asynchronous copies land at once, not when waited for")
    parser.add_argument("--sanitize", action="store_true", help="with g++'s address and undefined-behaviour sanitizers")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave unoptimised programs and their problems here")
    args = parser.parse_args()
    found = [v for v in variants.all_variants() if isinstance(v, variants.Prefill) and v.id.endswith(args.variant)]
    if len(found) != 1:
        parser.error(f"{args.variant!r} ends the ids of {len(found)} variants: see mlx_moe_fast/variants.py")
    (variant,) = found
    mx.set_default_device(mx.cpu)
    runner, failed = Emulator(args.seed, not args.eager, args.sanitize, keep=args.keep), False
    ops.launch = runner.launch
    print(f"{'count, over the least':58}{'MMAs':>16}{'weights':>16}{'wavefronts':>16}{'sectors':>16}")
    for i, case in enumerate(around(variant.tile.m, variant.quantization, variant.dtype)):
        if args.case not in (None, i):
            continue
        try:
            run(case, variant.glu, variant.tile)
            counted = ratios(dict(runner.counters)[variant.id], case, variant.glu)
            print(f"{f'{i} {case}':55} ok" + "".join(f"{count:>10} x{ratio:<4.2f}" for count, ratio in counted))
        except AssertionError as error:
            failed = True
            print(f"{i} {case}: {error}")
    return int(failed)


sys.exit(main())
