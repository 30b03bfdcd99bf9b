"""References and error measures, shared by tests and benchmarks.

The reference of a quantized product is the fp32 product with weights dequantised to fp32 by NumPy from MLX's packed
words: independent of MLX's kernels and of ours.
"""

import mlx.core as mx
import numpy as np

from mlx_moe_fast.ops import Weights
from mlx_moe_fast.problem import RouterForm


def array(a: mx.array) -> np.ndarray:
    """An mx.array as NumPy; 16-bit floats become float32."""
    return np.array(a.astype(mx.float32) if a.dtype in (mx.bfloat16, mx.float16) else a)


def dequantize(weights: Weights, experts: np.ndarray | None = None) -> np.ndarray:
    """[E, N, K] float32 (of `experts` only, if given): q * scale + bias, element k in bits [bits k, bits (k + 1)) of a
    row."""
    q = weights.projection.quantization
    chosen = slice(None) if experts is None else mx.array(experts)
    words, scales, biases = (array(a[chosen]) for a in (weights.weight, weights.scales, weights.biases))
    shifts = np.arange(0, 32, q.bits, dtype=np.uint32)
    integers = (words[..., None] >> shifts & (2**q.bits - 1)).reshape(*words.shape[:-1], -1)
    grouped = integers.reshape(*scales.shape, q.group_size).astype(np.float32)
    return (grouped * scales[..., None] + biases[..., None]).reshape(integers.shape)


def grouped(x: np.ndarray, ids: np.ndarray, weights: Weights) -> np.ndarray:
    """x [rows, K], ids [rows] -> [rows, N] float32; rows with an id out of range are zero."""
    out = np.zeros((len(ids), weights.projection.n), np.float32)
    for expert in np.unique(ids[(ids >= 0) & (ids < weights.projection.experts)]):
        rows = ids == expert
        out[rows] = x[rows] @ dequantize(weights, np.array([expert]))[0].T
        if weights.bias is not None:
            out[rows] += array(weights.bias[int(expert)])
    return out


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def moe_glu(x: np.ndarray, ids: np.ndarray, gate: Weights, up: Weights, down: Weights) -> np.ndarray:
    """x [rows, H], ids [rows] -> [rows, H] float32: down(silu(gate) * up)."""
    return grouped(silu(grouped(x, ids, gate)) * grouped(x, ids, up), ids, down)


def rel_rms(out: np.ndarray, reference: np.ndarray) -> float:
    """||out - reference|| / ||reference||, in float64; NaN if anything is not finite."""
    difference = out.astype(np.float64) - reference
    norm = float(np.linalg.norm(reference.astype(np.float64)))
    return float(np.linalg.norm(difference)) / norm if norm else float(np.linalg.norm(difference))


# What 16-bit weights, inputs and outputs cost a product: a few roundings of 2^-9 (bf16) or 2^-12 (fp16) each.
REL_RMS = {"bf16": 5e-3, "fp16": 7e-4}


def check(out: mx.array, reference: np.ndarray, dtype: str, products: int = 1) -> None:
    """Asserts that `out` is `reference` up to the rounding of `products` chained products, as a whole and in every
    row, naming the worst element."""
    got = array(out).reshape(reference.shape)
    assert np.isfinite(got).all(), f"not finite at {np.argwhere(~np.isfinite(got))[0]}"
    limit = REL_RMS[dtype] * products
    error = rel_rms(got, reference)
    rows = np.linalg.norm(got - reference, axis=-1) / np.maximum(np.linalg.norm(reference, axis=-1), 1e-30)
    dead = np.linalg.norm(reference, axis=-1) == 0
    assert (got[dead] == 0).all(), f"row {np.argwhere(dead & (got != 0).any(-1))[0]} should be zero"
    rows[dead] = 0
    worst = np.unravel_index(np.abs(got - reference).argmax(), got.shape)
    where = f"worst at {tuple(map(int, worst))}: {got[worst]} for {reference[worst]}"
    assert error <= limit, f"rel_rms {error:.2e} > {limit:.1e}, {where}"
    assert rows.max(initial=0) <= 4 * limit, f"row {rows.argmax()} has rel_rms {rows.max():.2e}, {where}"


def router_reference(
    logits: np.ndarray, form: RouterForm, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights of each token: largest choice first, ties to the lower index, NaN above all."""
    z = logits.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp(z - z.max(axis=-1, keepdims=True))
        score = powers / powers.sum(axis=-1, keepdims=True) if form.score == "softmax" else 1 / (1 + np.exp(-z))
    limited = form.top_groups < form.groups
    choice = score + (0 if bias is None else bias)
    if bias is None and not (limited and form.best > 1):
        choice = z  # in whose order scores are, but for those that are rounded to the same
    choice = np.where(np.isnan(choice), np.inf, choice)
    if limited:
        groups = choice.reshape(len(z), form.groups, -1)
        worth = np.sort(groups, axis=-1)[..., -form.best :].sum(axis=-1)
        losers = np.argsort(-worth, axis=-1, kind="stable")[:, form.top_groups :]
        np.put_along_axis(groups, losers[..., None], form.dropped, axis=1)
        choice = groups.reshape(z.shape)
    order = np.argsort(-choice, axis=-1, kind="stable")[:, : form.top_k]
    weights = np.take_along_axis(score, order, axis=-1)
    if form.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + form.eps)
    return order, weights * form.scale
