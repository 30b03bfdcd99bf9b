"""Runs a kernel once on a tiny problem with a known answer: a kernel that does not load, or computes something else,
is found when a model is patched and not in the middle of a generation."""

import logging
from collections.abc import Iterable

import mlx.core as mx

from . import ops
from .dispatch import Choice
from .errors import KernelBuildError
from .launch import handed_over
from .ops import DTYPES
from .problem import Projection, RouterForm
from .variants import WARPS, Decode, Prefill, Route, Router, Variant, physical_k

ROWS, N, K, EXPERTS = 3, 8, 128, 2
log = logging.getLogger(__name__)
_passed: set[str] = set()


def run(variants: Iterable[Variant]) -> None:
    """Raises KernelBuildError if one of the variants fails; asks each once a process."""
    for variant in variants:
        if isinstance(variant, Prefill | Decode | Route | Router) and variant.id not in _passed:
            try:
                wrong = _first(variant)
            except RuntimeError as error:
                raise KernelBuildError(
                    f"{variant.id} did not run ({error}).", "MLX's own kernels serve meanwhile."
                ) from error
            if wrong:
                raise KernelBuildError(f"{variant.id} computed {wrong}.", "Please report this with your GPU's name.")
            _passed.add(variant.id)


def _first(variant: Prefill | Decode | Route | Router) -> str | None:
    """`_wrong`, with the machine code handed over to MLX if it takes it."""
    try:
        with handed_over(variant):
            return _wrong(variant)
    except RuntimeError as error:
        log.debug("%s is launched with its code (%s)", variant.id, error)
        return _wrong(variant)


def _wrong(variant: Prefill | Decode | Route | Router) -> str | None:
    """What a variant computes wrongly for weights of q = 1, scale 1/4, bias 1/4 and inputs of 1: K / 2 each."""
    if isinstance(variant, Route):
        return _difference(ops.permute(mx.ones((ROWS, K), mx.float16), variant.bits), [[1.0] * K] * ROWS)
    if isinstance(variant, Router):
        logits = mx.array([[0, 0, 9, 9, 0], [7, 0, 0, 0, 7]], ops.NUMBERS[variant.dtype])
        chosen, shares = ops.router(logits, RouterForm(2))
        return _difference(mx.stack([chosen, shares]), [[[2, 3], [0, 4]], [[0.5, 0.5], [0.5, 0.5]]])
    q, dtype = variant.quantization, DTYPES[variant.dtype]
    projection = Projection(EXPERTS, N, K, q, variant.dtype)
    word = sum(1 << (q.bits * i) for i in range(32 // q.bits))
    ones = mx.full((EXPERTS, N, K // q.group_size), 0.25, dtype)
    weights = ops.Weights(projection, mx.full((EXPERTS, N, K * q.bits // 32), word, mx.uint32), ones, ones)
    x, ids = mx.ones((ROWS, K), dtype), mx.array([1, -1, 0], mx.int32)
    product, activated, zero = [64.0] * N, [4096.0] * N, [0.0] * N  # silu(64) * 64 = 4096
    if isinstance(variant, Decode):
        outs, expected = [], []
        for split in (1, WARPS):
            choice = Choice(variant.strip, split, "")
            if variant.kind == "dense":
                outs.append(ops.dense_qmm(x, weights, choice))
                expected.append([product] * ROWS)
            else:
                glu = variant.kind == "glu"
                outs.append(ops._decode(x, ids, choice, *[weights] * (2 if glu else 1)))
                expected.append([activated if glu else product, zero, activated if glu else product])
                if not glu:
                    outs.append(_combined(x, weights, choice))
                    expected.append([[48.0] * N, [32.0] * N, product])
        return _difference(mx.stack(outs), expected)
    if variant.glu:
        routing = ops.route(ids, x, EXPERTS, q.bits, variant.tile)
        # Sorted rows: expert 0, expert 1, and one that is never written.
        out = ops._glu(routing, weights, weights, 1, q.bits)[:2]
        return _difference(mx.take(out, mx.array([physical_k(n, q.bits) for n in range(N)]), axis=1), [activated] * 2)
    return _difference(ops.grouped_qmm(x, ids, weights, variant.tile), [product, zero, product])


def _combined(x: mx.array, weights: ops.Weights, choice: Choice) -> mx.array:
    """Two experts a token, one of them out of range, with weights of 1/4 and 1/2, 1/2 and 1, 1/4 and 3/4."""
    ids, shares = mx.array([[1, 0], [1, -1], [0, 1]], mx.int32), mx.array([[0.25, 0.5], [0.5, 1.0], [0.25, 0.75]])
    p = weights.projection
    run = ops._few(p, False, ROWS, ids.shape, x.dtype, choice, top_k=2)
    counters = mx.zeros((run.blocks,), mx.int32)
    return run(x, *weights.arrays, ids, shares, counters)[1]


def _difference(out: mx.array, expected: list) -> str | None:
    same = mx.array_equal(out.astype(mx.float32), mx.array(expected))
    return None if same.item() else f"{out.tolist()}, expected is {expected}"
