"""Single operations: MLX's own, ours and a dense bf16 product of the same FLOPs, on the same data in one run.

Suite `grouped`: one expert projection over routed rows. Ours is everything from token order to token order (routing
and permutation included); MLX's is `gather_qmm` alone on rows already gathered and sorted, as its layers call it.
Each output is checked against NumPy before it is timed.

    python scripts/bench_ops.py --json scripts/results/grouped.json
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cases import Case  # noqa: E402
from numerics import array, grouped, rel_rms  # noqa: E402

from mlx_moe_fast import bench, ops, variants  # noqa: E402
from mlx_moe_fast.dispatch import choose_tile  # noqa: E402
from mlx_moe_fast.problem import Quantization  # noqa: E402

Q = Quantization
QWEN3 = (2048, 768)  # hidden and expert features of Qwen3-30B-A3B
CASES = {
    "grouped": [
        Case(2048, 8, *QWEN3, 64, Q(4, 64)),
        Case(2048, 8, *QWEN3, 128, Q(4, 64)),
        Case(1024, 8, *QWEN3, 128, Q(4, 64)),
        Case(512, 8, *QWEN3, 128, Q(4, 64)),
        Case(256, 8, *QWEN3, 128, Q(4, 64)),
        Case(64, 8, *QWEN3, 128, Q(4, 64)),
        Case(16, 8, *QWEN3, 128, Q(4, 64)),
        Case(2048, 8, *QWEN3, 64, Q(4, 32)),
        Case(2048, 8, *QWEN3, 64, Q(4, 128)),
        Case(2048, 8, *QWEN3, 64, Q(8, 64)),
        Case(2048, 2, 4096, 14336, 8, Q(4, 64)),  # Mixtral 8x7B
        Case(2048, 4, 2880, 2880, 32, Q(4, 64)),  # gpt-oss-20b's shape
        Case(2048, 10, 2048, 512, 512, Q(4, 64)),  # Qwen3-Next-80B
    ]
}
SAMPLE_SECONDS = 0.03  # of work behind one sample, so that the clock and the launch gap do not count
CHECKED_ROWS = 192


def timed(function: Callable[[], mx.array]) -> Callable[[], float]:
    """A function that returns microseconds of one evaluation of `function`, averaged over as many as a sample needs."""
    mx.eval(function())
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(function())
    mx.synchronize()
    count = int(np.clip(SAMPLE_SECONDS / (time.perf_counter() - start), 1, 50))

    def sample() -> float:
        start = time.perf_counter()
        mx.eval([function() for _ in range(count)])
        mx.synchronize()
        return (time.perf_counter() - start) / count * 1e6

    return sample


def measure(case: Case, repeats: int, tiles: list[variants.Tile]) -> list[bench.Row]:
    """Rows of one case: ours with each tile, and dense bf16."""
    x, ids, weights, _, _ = case.arrays()
    flat = ids.flatten()
    order = mx.argsort(flat)
    x_sorted, sorted_ids = x[order // case.top_k][:, None], flat[order]
    dense = weights.scales[0, :1, :1] * mx.random.normal((case.hidden, case.features)).astype(x.dtype)
    rows_dense = x[order // case.top_k]
    mx.eval(x_sorted, sorted_ids, dense, rows_dense, x, ids, weights.arrays)

    def stock() -> mx.array:
        q = case.quantization
        return mx.gather_qmm(
            x_sorted, weights.weight, weights.scales, weights.biases, rhs_indices=sorted_ids, transpose=True,
            group_size=q.group_size, bits=q.bits, sorted_indices=True,
        )  # fmt: skip

    def ours(tile: variants.Tile) -> Callable[[], mx.array]:
        return lambda: ops.grouped_qmm(x, flat, weights, tile)

    sample = np.random.default_rng(0).choice(case.rows, min(case.rows, CHECKED_ROWS), replace=False)
    reference = grouped(array(x)[sample // case.top_k], array(flat)[sample], weights)
    unsort = np.argsort(array(order))
    stock_error = rel_rms(array(stock()[mx.array(unsort[sample])]).reshape(reference.shape), reference)
    errors = [rel_rms(array(ours(tile)()[mx.array(sample)]), reference) for tile in tiles]

    functions = [timed(f) for f in (stock, lambda: rows_dense @ dense, *map(ours, tiles))]
    stock_time, dense_time, *times = bench.interleave(functions, repeats)
    flops = 2.0 * case.rows * case.hidden * case.features

    def row(variant: str, timing: bench.Timing, **fields) -> bench.Row:
        return bench.Row(
            "grouped", str(case), variant, timing.median, timing.p20, timing.p80, flops / timing.median / 1e6,
            stock_median_us=stock_time.median, speedup=stock_time.median / timing.median, **fields,
        )  # fmt: skip

    rows = [
        row(variants.of(weights.projection, False, tile).id, timing, rel_rms=error, stock_rel_rms=stock_error,
            verified=error <= 2 * stock_error)
        for tile, timing, error in zip(tiles, times, errors, strict=True)
    ]  # fmt: skip
    return [*rows, row("dense-bf16", dense_time)]


def ceiling(repeats: int, n: int = 8192) -> float:
    """TFLOP/s of a bf16 n x n x n product through MLX."""
    a, b = (mx.random.normal((n, n)).astype(mx.bfloat16) for _ in range(2))
    return 2 * n**3 / bench.interleave([timed(lambda: a @ b)], repeats)[0].median / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=CASES, default="grouped")
    parser.add_argument("--case", action="append", help="only cases whose name contains this; may be repeated")
    parser.add_argument("--tiles", action="store_true", help="measure every tile height, not only the chosen one")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        sys.exit(
            "bench_ops measures CUDA kernels: it needs an NVIDIA GPU and MLX's CUDA build (extra cuda12 or cuda13)"
        )

    cases = [c for c in CASES[args.suite] if not args.case or any(part in str(c) for part in args.case)]
    if not cases:
        sys.exit("no case matches; there are:\n" + "\n".join(map(str, CASES[args.suite])))
    peak = ceiling(args.repeats)
    print(f"bf16 8192x8192x8192 through MLX: {peak:.0f} TFLOP/s", file=sys.stderr)
    rows = []
    for case in cases:
        chosen = choose_tile(case.rows, case.experts).tile
        tiles = list(variants.TILES.values()) if args.tiles else [chosen]
        for row in measure(case, args.repeats, tiles):
            rows.append(row)
            share, gain = row.tflops / peak, row.speedup
            mark = {True: "verified", False: "WRONG", None: ""}[row.verified]
            error = f"rel_rms {row.rel_rms:.1e} (MLX {row.stock_rel_rms:.1e})" if row.rel_rms is not None else ""
            print(
                f"{row.case} {row.variant}: {row.median_us:.1f} us [{row.p20_us:.1f}, {row.p80_us:.1f}], "
                f"{row.tflops:.1f} TFLOP/s, {share:.0%} of the ceiling, {gain:.1f}x MLX {error} {mark}",
                flush=True,
            )
    if args.json:
        bench.write_results(args.json, rows, " ".join(["python", "scripts/bench_ops.py", *sys.argv[1:]]))
    if any(row.verified is False for row in rows):
        sys.exit("a kernel's error is more than twice MLX's")


if __name__ == "__main__":
    main()
