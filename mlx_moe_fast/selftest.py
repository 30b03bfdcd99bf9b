"""Runs a kernel once on a tiny problem with a known answer: a kernel that does not load, or computes something else,
is found when a model is patched and not in the middle of a generation."""

from collections.abc import Iterable

import mlx.core as mx

from . import ops
from .errors import KernelBuildError
from .problem import Projection
from .variants import Prefill, Variant, physical_k

DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16}
ROWS, N, K, EXPERTS = 3, 8, 128, 2


_passed: set[str] = set()


def run(variants: Iterable[Variant]) -> None:
    """Raises KernelBuildError if one of the variants fails; asks each once a process. The route kernel runs along."""
    for variant in variants:
        if isinstance(variant, Prefill) and variant.id not in _passed:
            try:
                wrong = _wrong(variant)
            except RuntimeError as error:
                raise KernelBuildError(
                    f"{variant.id} did not run ({error}).", "MLX's own kernels serve meanwhile."
                ) from error
            if wrong:
                raise KernelBuildError(f"{variant.id} computed {wrong}.", "Please report this with your GPU's name.")
            _passed.add(variant.id)


def _wrong(variant: Prefill) -> str | None:
    """What a variant computes wrongly for weights of q = 1, scale 1/4, bias 1/4 and inputs of 1: K / 2 each."""
    q, dtype = variant.quantization, DTYPES[variant.dtype]
    projection = Projection(EXPERTS, N, K, q, variant.dtype)
    word = sum(1 << (q.bits * i) for i in range(32 // q.bits))
    ones = mx.full((EXPERTS, N, K // q.group_size), 0.25, dtype)
    weights = ops.Weights(projection, mx.full((EXPERTS, N, K * q.bits // 32), word, mx.uint32), ones, ones)
    x, ids = mx.ones((ROWS, K), dtype), mx.array([1, -1, 0], mx.int32)
    if variant.glu:
        routing = ops.route(ids, x, EXPERTS, q.bits, variant.tile)
        # Sorted rows: expert 0, expert 1, and one that is never written. silu(64) * 64 = 4096.
        out = ops._glu(routing, weights, weights, 1, q.bits)[:2]
        expected = mx.array([[4096.0] * N] * 2)
        out = mx.take(out, mx.array([physical_k(n, q.bits) for n in range(N)]), axis=1)
    else:
        out = ops.grouped_qmm(x, ids, weights, variant.tile)
        expected = mx.array([[64.0] * N, [0.0] * N, [64.0] * N])
    same = mx.array_equal(out.astype(mx.float32), expected)
    return None if same.item() else f"{out.tolist()}, expected is {expected.tolist()}"
