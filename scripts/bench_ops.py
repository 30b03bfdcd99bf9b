"""Single operations: MLX's own and ours, on the same data in one run; each output is checked against NumPy first.

Suite `grouped`: one expert projection over routed rows. Ours is everything from token order to token order (routing
and permutation included); MLX's is `gather_qmm` alone on rows already gathered and sorted, as its layers call it.
Beside them a dense bf16 product of the same FLOPs.

Suites `dense_decode` and `moe_decode`: one quantized matrix, and a whole expert MLP, for few rows. GPU time of one call
in a chain of calls inside one CUDA graph: each needs the result of the one before, and each reads other weights, so
that they come from memory. GB/s counts every weight, scale and bias that a call needs once.

    python scripts/bench_ops.py --json scripts/results/grouped.json
    python scripts/bench_ops.py --suite dense_decode --json scripts/results/dense_decode.json
    python scripts/bench_ops.py --suite moe_decode --json scripts/results/moe_decode.json
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

if any("decode" in argument for argument in sys.argv):
    # A chain must be one CUDA graph. MLX reads these limits once; `grouped` keeps MLX's own.
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "4000")
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000")

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.activations import swiglu  # noqa: E402
from mlx_lm.models.switch_layers import _gather_sort, _scatter_unsort  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cases import DTYPES, Case, make_ids  # noqa: E402
from numerics import array, grouped, moe_glu, rel_rms  # noqa: E402

from mlx_moe_fast import bench, device, ops, variants  # noqa: E402
from mlx_moe_fast.dispatch import FORCIBLE, Choice, choose, choose_dense  # noqa: E402
from mlx_moe_fast.launch import launch  # noqa: E402
from mlx_moe_fast.problem import Projection, Quantization  # noqa: E402
from mlx_moe_fast.variants import WGMMA, WGMMA_ARCH, Stamp, Strip  # noqa: E402

Q = Quantization


@dataclass(frozen=True)
class Dense:
    """One matrix [n, k] and m rows."""

    m: int
    n: int
    k: int
    quantization: Quantization
    dtype: str = "bf16"

    @property
    def projection(self) -> Projection:
        return Projection(1, self.n, self.k, self.quantization, self.dtype)

    def __str__(self) -> str:
        return bench.dense_case(self.m, self.n, self.k, self.quantization, self.dtype)


QWEN3 = (2048, 768)  # hidden and expert features of Qwen3-30B-A3B
MIXTRAL = (4096, 14336)
CASES: dict[str, list] = {
    "grouped": [
        Case(2048, 8, *QWEN3, 64, Q(4, 64)),
        *(Case(tokens, 8, *QWEN3, 128, Q(4, 64)) for tokens in (2048, 1024, 512, 256, 64, 16)),
        Case(2048, 8, *QWEN3, 64, Q(4, 32)),
        Case(2048, 8, *QWEN3, 64, Q(4, 128)),
        Case(2048, 8, *QWEN3, 64, Q(8, 64)),
        Case(2048, 2, *MIXTRAL, 8, Q(4, 64)),
        Case(2048, 4, 2880, 2880, 32, Q(4, 64)),  # gpt-oss-20b's shape
        Case(2048, 10, 2048, 512, 512, Q(4, 64)),  # Qwen3-Next-80B
    ],
    "dense_decode": [Dense(m, n, 4096, Q(4, 64)) for n in (14336, 4096) for m in (1, 4, 8, 16, 32)],
    "moe_decode": [
        *(Case(tokens, 8, *QWEN3, 128, Q(4, 64)) for tokens in (1, 8, 32)),
        *(Case(tokens, 2, *MIXTRAL, 8, Q(4, 64)) for tokens in (1, 8, 32)),
        Case(32, 10, 2048, 512, 512, Q(4, 64)),  # Qwen3-Next-80B
        Case(8, 4, 2880, 2880, 32, Q(4, 64)),  # gpt-oss-20b's shape
    ],
}
SAMPLE_SECONDS = 0.03  # of work behind one sample, so that the clock and the launch gap do not count
CHECKED_ROWS, CHECKED_FEATURES = 192, 256
CHECKED_WORDS = 400e6  # weights that NumPy dequantises to check an expert MLP
COLD_BYTES = 300e6  # that a chain reads: well above what an L2 holds
WEIGHT_BYTES = 6e9  # of expert layers that a chain goes through; at least two


# ---- grouped ---------------------------------------------------------------------------------------------------------


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


def measure_grouped(case: Case, repeats: int, shapes: list[Choice]) -> list[bench.Row]:
    """Rows of one case: ours with each shape, and dense bf16."""
    x, ids, weights, _, _ = case.arrays()
    flat = ids.flatten()
    order = mx.argsort(flat)
    x_sorted, sorted_ids = x[order // case.top_k][:, None], flat[order]
    dense = weights.scales[0, :1, :1] * mx.random.normal((case.hidden, case.features)).astype(x.dtype)
    rows_dense = x[order // case.top_k]
    mx.eval(x_sorted, sorted_ids, dense, rows_dense, x, ids, weights.arrays)

    def stock() -> mx.array:
        return gather(x_sorted, sorted_ids, weights, True)

    def ours(shape: Choice) -> Callable[[], mx.array]:
        return lambda: ops.grouped_qmm(x, flat, weights, shape)

    sample = np.random.default_rng(0).choice(case.rows, min(case.rows, CHECKED_ROWS), replace=False)
    reference = grouped(array(x)[sample // case.top_k], array(flat)[sample], weights)
    unsort = np.argsort(array(order))
    stock_error = rel_rms(array(stock()[mx.array(unsort[sample])]).reshape(reference.shape), reference)
    errors = [rel_rms(array(ours(shape)()[mx.array(sample)]), reference) for shape in shapes]

    functions = [timed(f) for f in (stock, lambda: rows_dense @ dense, *map(ours, shapes))]
    stock_time, dense_time, *times = bench.interleave(functions, repeats)
    flops = 2.0 * case.rows * case.hidden * case.features

    def row(variant: str, timing: bench.Timing, **fields) -> bench.Row:
        return bench.Row(
            "grouped", str(case), variant, timing.median, timing.p20, timing.p80, flops / timing.median / 1e6,
            stock_median_us=stock_time.median, speedup=stock_time.median / timing.median, **fields,
        )  # fmt: skip

    rows = [
        row(variants.of(weights.projection, False, choice.shape).id, timing, rel_rms=error, stock_rel_rms=stock_error,
            verified=error <= 2 * stock_error)
        for choice, timing, error in zip(shapes, times, errors, strict=True)
    ]  # fmt: skip
    return [*rows, row("dense-bf16", dense_time)]


# ---- decode ----------------------------------------------------------------------------------------------------------

Step = Callable[[int, mx.array], mx.array]


def gather(x: mx.array, ids: mx.array, w: ops.Weights, is_sorted: bool) -> mx.array:
    """MLX's own product of experts."""
    q = w.projection.quantization
    return mx.gather_qmm(
        x, w.weight, w.scales, w.biases, rhs_indices=ids, transpose=True, group_size=q.group_size, bits=q.bits,
        sorted_indices=is_sorted,
    )  # fmt: skip


def stock_mlp(x: mx.array, ids: mx.array, gate: ops.Weights, up: ops.Weights, down: ops.Weights) -> mx.array:
    """What mlx_lm's SwitchGLU does: x [T, H], ids [T, A] -> [T, A, H]. In a chain its sorting of ids, which wait for
    nothing, may run beside other calls; in a model it may not."""
    shape, is_sorted = ids.shape, ids.size >= 64
    x = x[:, None, None]
    if is_sorted:
        x, ids, inverse = _gather_sort(x, ids)
    hidden = swiglu(gather(x, ids, gate, is_sorted), gather(x, ids, up, is_sorted))
    out = gather(hidden, ids, down, is_sorted)
    return (_scatter_unsort(out, inverse, shape) if is_sorted else out).squeeze(-2)


def stamp(x: mx.array) -> tuple[mx.array, mx.array]:
    """x, and the GPU's clock in nanoseconds after x was there."""
    out, now = launch(Stamp(), [x], [(x.shape, x.dtype), ((1,), mx.uint64)], [x.size], blocks=1)
    return out, now


def chain(step: Step, x: mx.array, count: int) -> Callable[[], float]:
    """A function that returns microseconds of GPU time of one of `count` calls step(i, x), each of whose results, cut
    to the shape of x, is the next one's x."""

    def sample() -> float:
        y, start = stamp(x)
        for i in range(count):
            y = step(i, y).reshape(-1)[: x.size].reshape(x.shape)
        _, end = stamp(y.reshape(-1)[:1])
        mx.eval(start, end)
        return (end.item() - start.item()) / 1e3 / count

    return sample


def calls(bytes_: float) -> int:
    """Calls in a chain each of which reads so much."""
    return max(8, math.ceil(COLD_BYTES / bytes_))


def matrix_bytes(p: Projection) -> int:
    """Weights, scales and biases of one matrix, or of one expert."""
    return p.n * p.k * p.quantization.bits // 8 + 2 * 2 * p.n * p.k // p.quantization.group_size


def mlp_bytes(case: Case, draws: list[np.ndarray]) -> float:
    """Of the experts that have rows, averaged over several calls' ids."""
    first, down = case.projections
    return float(np.mean([len(np.unique(ids)) for ids in draws])) * (2 * matrix_bytes(first) + matrix_bytes(down))


def random_weights(p: Projection) -> ops.Weights:
    """As tests/cases.py makes them, but on the device."""
    q, dtype = p.quantization, DTYPES[p.dtype]
    words = mx.random.randint(-(2**31), 2**31 - 1, (p.experts, p.n, p.k * q.bits // 32), dtype=mx.int32)
    top = 2**q.bits - 1
    scales = 3.5 / top / p.k**0.5 * mx.random.uniform(0.5, 1.5, (p.experts, p.n, p.k // q.group_size))
    arrays = words.view(mx.uint32), scales.astype(dtype), (scales * (-top / 2)).astype(dtype)
    mx.eval(arrays)
    return ops.Weights(p, *arrays)


def some_features(w: ops.Weights, features: np.ndarray) -> ops.Weights:
    """Weights of these output features only."""
    arrays = (a[:, mx.array(features)] for a in (w.weight, w.scales, w.biases))
    return ops.Weights(replace(w.projection, n=len(features)), *arrays)


def decode_row(
    suite: str, case: Dense | Case, variant: str, bytes_: float, timings: list[bench.Timing], errors: list[float]
) -> bench.Row:
    """Timings and errors: MLX's and ours."""
    (stock, ours), (stock_error, error) = timings, errors
    return bench.Row(
        suite, str(case), variant, ours.median, ours.p20, ours.p80, gbps=bytes_ / ours.median / 1e3,
        stock_median_us=stock.median, speedup=stock.median / ours.median, rel_rms=error, stock_rel_rms=stock_error,
        verified=error <= 2 * stock_error,
    )  # fmt: skip


def measure_dense(case: Dense, repeats: int) -> bench.Row:
    p, q, bytes_ = case.projection, case.quantization, matrix_bytes(case.projection)
    count = calls(bytes_)
    weights = [random_weights(p) for _ in range(count)]
    matrices = [[a[0] for a in (w.weight, w.scales, w.biases)] for w in weights]
    x = mx.random.normal((case.m, case.k)).astype(DTYPES[case.dtype])
    mx.eval(x, matrices)

    def stock(i: int, x: mx.array) -> mx.array:
        return mx.quantized_matmul(x, *matrices[i], transpose=True, group_size=q.group_size, bits=q.bits)

    def ours(i: int, x: mx.array) -> mx.array:
        return ops.dense_qmm(x, weights[i])

    features = np.random.default_rng(0).choice(case.n, min(case.n, CHECKED_FEATURES), replace=False)
    reference = grouped(array(x), np.zeros(case.m, np.int32), some_features(weights[0], features))
    errors = [rel_rms(array(f(0, x))[:, features], reference) for f in (stock, ours)]
    timings = bench.interleave([chain(f, x, count) for f in (stock, ours)], repeats, warmup=2)
    strip = choose_dense(case.m, p).shape
    assert isinstance(strip, Strip)
    return decode_row("dense_decode", case, variants.dense(p, strip).id, bytes_, timings, errors)


def measure_moe(case: Case, repeats: int) -> bench.Row:
    rng, (first, down) = np.random.default_rng(case.seed), case.projections

    def draw() -> np.ndarray:
        return make_ids(rng, case.tokens, case.top_k, case.experts + 1, "distinct")  # one more stays empty

    draws = [draw()]
    count = calls(mlp_bytes(case, draws))
    draws += [draw() for _ in range(count - 1)]
    layer_bytes = case.experts * (2 * matrix_bytes(first) + matrix_bytes(down))
    layers = [
        [random_weights(p) for p in (first, first, down)]
        for _ in range(min(count, max(2, int(WEIGHT_BYTES // layer_bytes))))
    ]
    ids = [mx.array(d.astype(np.uint32)) for d in draws]  # as routers give them
    flat = [i.flatten() for i in ids]
    x = mx.random.normal((case.tokens, case.hidden)).astype(DTYPES[case.dtype])
    mx.eval(x, ids, flat)

    def stock(i: int, x: mx.array) -> mx.array:
        return stock_mlp(x, ids[i], *layers[i % len(layers)])

    def ours(i: int, x: mx.array) -> mx.array:
        return ops.moe_glu(x, flat[i], *layers[i % len(layers)])

    checked = min(case.rows, max(4, int(CHECKED_WORDS / (3 * case.hidden * case.features))))
    sample = rng.choice(case.rows, checked, replace=False)
    reference = moe_glu(array(x)[sample // case.top_k], draws[0].flatten()[sample], *layers[0])
    errors = [rel_rms(array(f(0, x)).reshape(case.rows, -1)[sample], reference) for f in (stock, ours)]
    timings = bench.interleave([chain(f, x, count) for f in (stock, ours)], repeats, warmup=2)
    shape = choose(case.rows, first, glu=True).shape
    last = choose(case.rows, down).shape if isinstance(shape, Strip) else shape
    names = f"{variants.of(first, True, shape).id} + {variants.of(down, False, last).id}"
    return decode_row("moe_decode", case, names, mlp_bytes(case, draws), timings, errors)


# ---- all -------------------------------------------------------------------------------------------------------------


def ceiling(repeats: int, n: int = 8192) -> float:
    """TFLOP/s of a bf16 n x n x n product through MLX."""
    a, b = (mx.random.normal((n, n)).astype(mx.bfloat16) for _ in range(2))
    return 2 * n**3 / bench.interleave([timed(lambda: a @ b)], repeats)[0].median / 1e6


def bandwidth(repeats: int, n: int = 2**29) -> float:
    """GB/s of a sum over 2 GB through MLX."""
    a = mx.arange(n, dtype=mx.int32)
    return a.nbytes / bench.interleave([timed(lambda: mx.sum(a))], repeats)[0].median / 1e3


def measured(suite: str, cases: list, repeats: int, tiles: bool) -> Iterator[bench.Row]:
    for case in cases:
        if suite == "dense_decode":
            yield measure_dense(case, repeats)
        elif suite == "moe_decode":
            yield measure_moe(case, repeats)
        else:
            heights = [t for t in FORCIBLE.values() if t is not WGMMA or device.arch() == WGMMA_ARCH]
            every = [Choice(tile, 1, "asked for") for tile in heights]
            chosen = choose(case.rows, case.projections[0], arch=device.arch())
            yield from measure_grouped(case, repeats, every if tiles else [chosen])


def line(row: bench.Row, peak: float) -> str:
    """A printed row; `peak` in TFLOP/s, or in GB/s for a row that has them."""
    rate, unit = (row.tflops, "TFLOP/s") if row.gbps is None else (row.gbps, "GB/s")
    mark = {True: "verified", False: "WRONG", None: ""}[row.verified]
    error = f"rel_rms {row.rel_rms:.1e} (MLX {row.stock_rel_rms:.1e})" if row.rel_rms is not None else ""
    return (
        f"{row.case} {row.variant}: {row.median_us:.1f} us [{row.p20_us:.1f}, {row.p80_us:.1f}], {rate:.1f} {unit}, "
        f"{rate / peak:.0%} of the ceiling, {row.speedup:.2f}x MLX {error} {mark}"
    ).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=CASES, default="grouped")
    parser.add_argument("--case", action="append", help="only cases whose name contains this; may be repeated")
    parser.add_argument("--tiles", action="store_true", help="grouped: every tile height, not only the chosen one")
    parser.add_argument(
        "--bandwidth", type=float, default=0.0, metavar="GB/S", help="decode: what memory can be read at"
    )
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
    if args.suite == "grouped":
        peak = ceiling(args.repeats)
        print(f"ceiling: {peak:.0f} TFLOP/s, bf16 8192x8192x8192 through MLX", file=sys.stderr)
    else:
        found = bandwidth(args.repeats)
        peak = max(found, args.bandwidth)
        source = "as given" if args.bandwidth > found else "a sum over 2 GB through MLX"
        print(f"ceiling: {peak:.0f} GB/s, {source}", file=sys.stderr)
    rows = []
    for row in measured(args.suite, cases, args.repeats, args.tiles):
        rows.append(row)
        print(line(row, peak), flush=True)
        if args.json:  # after each: nothing is lost if one fails
            bench.write_results(args.json, rows, " ".join(["python", "scripts/bench_ops.py", *sys.argv[1:]]))
    if any(row.verified is False for row in rows):
        sys.exit("a kernel's error is more than twice MLX's")


if __name__ == "__main__":
    main()
