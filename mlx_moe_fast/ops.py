"""Grouped quantized matmul on mx.arrays, out of two kernels: route, then one or two grouped products.

Rows are (token, expert) pairs in their original order; "sorted" is the same rows ordered by expert. Nothing here
decides whether a kernel should run: callers ask `eligibility` first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import variants
from .dispatch import choose_tile
from .launch import launch
from .problem import Projection
from .variants import Tile

ALIGNMENT = 16  # bytes: what one asynchronous copy moves
PERMUTE_CHUNK = 8  # elements that a thread of the route kernel permutes


@dataclass(frozen=True)
class Weights:
    """Arrays of one projection: weight [E, N, K * bits / 32] uint32, scales and biases [E, N, K / group_size], bias
    [E, N] or None, all row-contiguous; `projection` describes them."""

    projection: Projection
    weight: mx.array
    scales: mx.array
    biases: mx.array
    bias: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """In the kernels' order; scales stand in for a bias that is never read."""
        return self.weight, self.scales, self.biases, self.scales if self.bias is None else self.bias


@dataclass(frozen=True)
class Routing:
    """What kernels/route.cu makes: row_ids [rows] int32, tiles [slots, 4] int32, x [x_rows, k_pad] permuted."""

    row_ids: mx.array
    tiles: mx.array
    x: mx.array
    rows: int
    tile: Tile


def _permute_blocks(rows: int, width: int) -> int:
    return -(-rows * width // (PERMUTE_CHUNK * variants.ROUTE_THREADS))


def route(ids: mx.array, x: mx.array, experts: int, bits: int, tile: Tile) -> Routing:
    """Sorts rows by expert and permutes x for `bits`-bit weights, in one launch.

    Args:
        ids: [rows] integers, the expert of each row; those outside [0, experts) give rows of zeros.
        x: [x_rows, K] bf16 or fp16.
    """
    rows, (x_rows, k) = ids.size, x.shape
    k_pad = variants.padded(k, bits)
    slots = rows // tile.m + experts + 1
    row_ids, tiles, permuted = launch(
        variants.route(bits),
        [ids.astype(mx.int32), x],
        [((rows,), mx.int32), ((slots, 4), mx.int32), ((x_rows, k_pad), x.dtype)],
        [rows, experts, tile.m, experts + 1, x_rows, k, k_pad],
        blocks=experts + 1 + _permute_blocks(x_rows, k_pad),
        contiguous=True,
    )
    return Routing(row_ids, tiles, permuted, rows, tile)


def permute(x: mx.array, bits: int) -> mx.array:
    """x [rows, K] -> [rows, padded K], permuted for `bits`-bit weights."""
    rows, k = x.shape
    k_pad = variants.padded(k, bits)
    nothing = mx.zeros((1,), mx.int32)
    _, _, permuted = launch(
        variants.route(bits),
        [nothing, x],
        [((1,), mx.int32), ((1, 4), mx.int32), ((rows, k_pad), x.dtype)],
        [0, 0, 1, 0, rows, k, k_pad],
        blocks=_permute_blocks(rows, k_pad),
        contiguous=True,
    )
    return permuted


def _grouped(routing: Routing, x: mx.array, weights: Weights, x_div: int, scatter: bool) -> mx.array:
    """[rows, N]: one product. x is permuted; row r reads x[r // x_div], or its sorted place if x_div is 0."""
    p = weights.projection
    n_blocks = -(-p.n // variants.TILE_N)
    (out,) = launch(
        variants.of(p, False, routing.tile),
        [x, *weights.arrays, routing.tiles, routing.row_ids],
        [((routing.rows, p.n), x.dtype)],
        [p.experts, p.n, p.k, x.shape[1], x_div, int(weights.bias is not None), int(scatter)],
        blocks=n_blocks * routing.tiles.shape[0],
    )
    return out


def _glu(routing: Routing, gate: Weights, up: Weights, x_div: int, out_bits: int) -> mx.array:
    """[rows, padded N] in sorted order, permuted for `out_bits`: silu(gate) * up."""
    p = gate.projection
    width = variants.padded(p.n, out_bits)
    n_blocks = -(-width // (variants.TILE_N // 2))
    (out,) = launch(
        variants.of(p, True, routing.tile),
        [routing.x, *gate.arrays, *up.arrays, routing.tiles, routing.row_ids],
        [((routing.rows, width), routing.x.dtype)],
        [p.experts, p.n, p.k, routing.x.shape[1], x_div, int(gate.bias is not None), width, out_bits],
        blocks=n_blocks * routing.tiles.shape[0],
    )
    return out


def _tile(ids: mx.array, weights: Weights, tile: Tile | None) -> Tile:
    return tile or choose_tile(ids.size, weights.projection.experts).tile


def grouped_qmm(x: mx.array, ids: mx.array, weights: Weights, tile: Tile | None = None) -> mx.array:
    """x [x_rows, K], ids [rows], rows a multiple of x_rows -> [rows, N]: row r is W[ids[r]] x[r // (rows / x_rows)]."""
    routing = route(ids, x, weights.projection.experts, weights.projection.quantization.bits, _tile(ids, weights, tile))
    return _grouped(routing, routing.x, weights, ids.size // x.shape[0], scatter=True)


def moe_glu(
    x: mx.array, ids: mx.array, gate: Weights, up: Weights, down: Weights, tile: Tile | None = None
) -> mx.array:
    """Gated expert MLP with SwiGLU: x [T, H], ids [T * A] -> [T * A, H]. Gate and up are alike but for their values."""
    routing = route(ids, x, gate.projection.experts, gate.projection.quantization.bits, _tile(ids, gate, tile))
    hidden = _glu(routing, gate, up, ids.size // x.shape[0], down.projection.quantization.bits)
    return _grouped(routing, hidden, down, 0, scatter=True)


def moe_mlp(
    x: mx.array,
    ids: mx.array,
    first: list[Weights],
    activation: Callable[..., mx.array],
    down: Weights,
    tile: Tile | None = None,
) -> mx.array:
    """Expert MLP with any elementwise activation: x [T, H], ids [T * A] -> [T * A, H].

    `activation` gets one array [T * A, 1, F] for each of `first` (which share bits), rows in sorted order, as MLX's
    own layers call theirs.
    """
    head = first[0].projection
    routing = route(ids, x, head.experts, head.quantization.bits, _tile(ids, first[0], tile))
    x_div = ids.size // x.shape[0]
    projected = [_grouped(routing, routing.x, w, x_div, scatter=False)[:, None] for w in first]
    hidden = permute(activation(*projected).squeeze(1), down.projection.quantization.bits)
    return _grouped(routing, hidden, down, 0, scatter=True)


def own_their_buffers(arrays: list[mx.array]) -> bool:
    """Whether each array is row-contiguous and aligned for the kernels. Evaluates the arrays.

    MLX shows no strides of arrays on the GPU, but `contiguous` shares the buffer of a row-contiguous array that owns
    it, and copies any other.
    """
    probes = [launch(variants.Probe(), [a, mx.contiguous(a)], [((2,), mx.uint64)], [], blocks=1)[0] for a in arrays]
    pairs = np.array(mx.stack(probes))
    return bool((pairs[:, 0] == pairs[:, 1]).all() and (pairs % ALIGNMENT == 0).all())


def variants_of(projections: list[Projection], glu: bool) -> list[variants.Variant]:
    """Every variant that a layer may launch: `projections` in order, the last one the down projection; `glu`: the
    first two are computed together."""
    *first, down = projections
    found = [v for p in first for v in variants.needed(p, glu)]
    return list(dict.fromkeys(found + variants.needed(down, False)))


__all__ = [
    "Routing",
    "Weights",
    "grouped_qmm",
    "moe_glu",
    "moe_mlp",
    "own_their_buffers",
    "permute",
    "route",
    "variants_of",
]
