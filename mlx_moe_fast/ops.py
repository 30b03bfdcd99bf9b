"""Quantized matmul on mx.arrays: grouped, for many rows out of two kernels (route, then one or two grouped products)
and for few out of one; and dense, for few rows.

Rows are (token, expert) pairs in their original order; "sorted" is the same rows ordered by expert. Nothing here
decides whether a kernel should run: callers ask `eligibility` first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import device, variants
from .dispatch import Choice, choose, choose_dense, slots, tiles
from .launch import bind, launch
from .problem import Projection, RouterForm
from .variants import Decode, Prefill, Router, Strip, Tile, WgmmaTile

ALIGNMENT = 16  # bytes: what one asynchronous copy moves
WORDS = (mx.uint32, mx.int32)
PERMUTE_CHUNK = 8  # elements that a thread of the route kernel permutes


Shape = tuple[int, ...]
DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16}
NUMBERS = DTYPES | {"fp32": mx.float32}  # of router logits, and of a bias
Arrays = tuple[mx.array, mx.array, mx.array, mx.array]


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
    def arrays(self) -> Arrays:
        """In the kernels' order; scales stand in for a bias that is never read."""
        return self.weight, self.scales, self.biases, self.scales if self.bias is None else self.bias


@dataclass(frozen=True)
class Routing:
    """What kernels/route.cu makes: row_ids [rows] int32, tiles [slots, 4] int32, x [x_rows, k_pad] permuted."""

    row_ids: mx.array
    tiles: mx.array
    x: mx.array
    rows: int
    tile: Tile | WgmmaTile


def _permute_blocks(rows: int, width: int) -> int:
    return -(-rows * width // (PERMUTE_CHUNK * variants.ROUTE_THREADS))


def route(ids: mx.array, x: mx.array, experts: int, bits: int, tile: Tile | WgmmaTile) -> Routing:
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


def _tiled(
    variant: Prefill, routing: Routing, inputs: list[mx.array], width: int, dtype: mx.Dtype, scalars: list[int]
) -> mx.array:
    """[rows, width], by blocks for each tile of `routing` and `variant.features` of `width`."""
    slots = routing.tiles.shape[0]
    blocks = -(-width // variant.features) * slots
    if isinstance(variant.tile, WgmmaTile):  # as many as run at once, which share the work
        blocks, scalars = min(blocks, device.multiprocessors() or blocks), [*scalars, slots]
    inputs = [*inputs, routing.tiles, routing.row_ids]
    return launch(variant, inputs, [((routing.rows, width), dtype)], scalars, blocks=blocks)[0]


def _grouped(routing: Routing, x: mx.array, weights: Weights, x_div: int, scatter: bool) -> mx.array:
    """[rows, N]: one product. x is permuted; row r reads x[r // x_div], or its sorted place if x_div is 0."""
    p = weights.projection
    variant = variants.of(p, False, routing.tile)
    assert isinstance(variant, Prefill)
    scalars = [p.experts, p.n, p.k, x.shape[1], x_div, int(weights.bias is not None), int(scatter)]
    return _tiled(variant, routing, [x, *weights.arrays], p.n, x.dtype, scalars)


def _glu(routing: Routing, gate: Weights, up: Weights, x_div: int, out_bits: int) -> mx.array:
    """[rows, padded N] in sorted order, permuted for `out_bits`: silu(gate) * up."""
    p, x = gate.projection, routing.x
    variant, width = variants.of(p, True, routing.tile), variants.padded(p.n, out_bits)
    assert isinstance(variant, Prefill)
    scalars = [p.experts, p.n, p.k, x.shape[1], x_div, int(gate.bias is not None), width, out_bits]
    return _tiled(variant, routing, [x, *gate.arrays, *up.arrays], width, x.dtype, scalars)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch without its inputs."""

    variant: Decode | Router
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    scalars: tuple[int, ...]
    blocks: int

    def __call__(self, *inputs: mx.array) -> list[mx.array]:
        return launch(self.variant, inputs, self.outputs, self.scalars, blocks=self.blocks, contiguous=True)

    def bind(self) -> Callable[..., list[mx.array]]:
        """The same as a function of `inputs`, a keyword argument."""
        return bind(self.variant, self.outputs, self.scalars, blocks=self.blocks, contiguous=True)


def _few(p: Projection, glu: bool, x_rows: int, ids: Shape, dtype: mx.Dtype, choice: Choice, top_k: int = 0) -> Launch:
    """One product, or gate and up with SwiGLU: inputs x, arrays of the weights, ids -> [*ids, N]. x [x_rows, K], or any
    shape of so many rows: row r of ids reads row r // (rows / x_rows) of x.

    One product may be combined: further inputs token weights [..., top_k] fp32, counters of `strips`, all 0; a second
    output [*ids[:-1], N], the sum of each token's rows times its weights.
    """
    assert isinstance(choice.shape, Strip)
    variant, rows = variants.of(p, glu, choice.shape), math.prod(ids)
    assert isinstance(variant, Decode)
    scalars: tuple[int, ...] = (rows, p.n, p.k, int(p.has_bias), choice.split, p.experts, rows // x_rows)
    blocks = slots(rows, p.experts) * _strips(variant, p, choice)
    if glu:
        return Launch(variant, (((*ids, p.n), dtype),), scalars, blocks)
    combined = (*ids[:-1], p.n) if top_k else (1,)
    return Launch(variant, (((*ids, p.n), dtype), (combined, dtype)), (*scalars, top_k), blocks)


def _strips(variant: Decode, p: Projection, choice: Choice) -> int:
    """Strips of output features, each of as many blocks as there are slots."""
    return -(-p.n // variant.features(choice.split))


def _decode(x: mx.array, ids: mx.array, choice: Choice, *weights: Weights) -> mx.array:
    """`_few` at once, of one product or of gate and up."""
    p, glu = weights[0].projection, len(weights) == 2
    run = _few(p, glu, x.size // p.k, ids.shape, x.dtype, choice)
    # An x stands in for token weights and counters, which are not read.
    return run(x, *(a for w in weights for a in w.arrays), ids, *([] if glu else [x, x]))[0]


def bind_glu(gate: Projection, down: Projection, x: mx.array, ids: mx.array) -> Callable[..., mx.array] | None:
    """`moe_glu` for few rows of shapes like these, as a function of x, ids and the arrays of up, gate and down; None if
    ids have to be converted."""
    if ids.dtype not in WORDS:
        return None
    first = _few(gate, True, x.size // gate.k, ids.shape, x.dtype, choose(ids.size, gate, glu=True)).bind()
    last = _few(down, False, ids.size, ids.shape, x.dtype, choose(ids.size, down)).bind()

    def run(x: mx.array, ids: mx.array, *arrays: mx.array) -> mx.array:
        up, gate, down = arrays[:4], arrays[4:8], arrays[8:]
        return last(inputs=(*first(inputs=(x, *gate, *up, ids)), *down, ids, x, x))[0]

    return run


def _bits(value: float) -> int:
    """A float as a kernel's integer argument."""
    return int(np.float32(value).view(np.int32))


def _number(a: mx.array | None) -> str | None:
    return None if a is None else next(name for name, kind in NUMBERS.items() if kind == a.dtype)


def _router(logits: mx.array, bias: mx.array | None, form: RouterForm, counters: int) -> Launch:
    """Inputs: logits [..., E], bias or anything. Outputs: ids [..., top_k] int32, token weights [..., top_k] fp32,
    `counters` zeros."""
    *lead, experts = logits.shape
    tokens, limited = math.prod(lead), form.top_groups < form.groups
    outputs = ((*lead, form.top_k), mx.int32), ((*lead, form.top_k), mx.float32), ((counters,), mx.int32)
    scores = int(form.score == "softmax"), variants.NUMBERS[_number(bias)]
    groups = form.groups if limited else 1, form.top_groups, form.best if limited else 1, _bits(form.dropped)
    weights = int(bool(form.normalise)), _bits(form.eps), _bits(form.scale)
    scalars = tokens, experts, form.top_k, *scores, *groups, *weights, counters
    return Launch(variants.router(_number(logits)), outputs, scalars, -(-tokens // variants.ROUTER_TOKENS))


def router(logits: mx.array, form: RouterForm, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Top-k experts of each token and their weights.

    Args:
        logits: [..., E] bf16, fp16 or fp32, E at most 512. Of equal choices the lower index is taken first; NaN is the
            largest.
        form: top_k is at most 32 and E; groups are at most 32, of one size, not smaller than `best`.
        bias: [E] bf16, fp16 or fp32.

    Returns:
        ids [..., top_k] int32, the largest choice first, and weights [..., top_k] fp32.
    """
    ids, weights, _ = _router(logits, bias, form, 1)(logits, logits if bias is None else bias)
    return ids, weights


def _block(
    gate: Projection, down: Projection, x: mx.array, logits: mx.array, bias: mx.array | None, form: RouterForm
) -> tuple[Launch, Launch, Launch]:
    """Router, gate and up, down and combination for arrays like these, few rows."""
    lead = x.shape[:-1]
    ids, tokens = (*lead, form.top_k), math.prod(lead)
    last_choice = choose(tokens * form.top_k, down)
    variant = variants.of(down, False, last_choice.shape)
    assert isinstance(variant, Decode)
    strips = _strips(variant, down, last_choice)
    return (
        _router(logits, bias, form, strips),
        _few(gate, True, tokens, ids, x.dtype, choose(tokens * form.top_k, gate, glu=True)),
        _few(down, False, tokens * form.top_k, ids, x.dtype, last_choice, form.top_k),
    )


def moe_block(
    x: mx.array,
    logits: mx.array,
    bias: mx.array | None,
    form: RouterForm,
    gate: Weights,
    up: Weights,
    down: Weights,
) -> mx.array:
    """Router, gated expert MLP with SwiGLU and combination in three launches, for few rows.

    Args:
        x: [..., H].
        logits: [..., E]; the experts are chosen as `router` does, with the same `bias` and `form`.

    Returns:
        [..., H]: the sum over a token's experts of weight times output, added up in fp32 in the order of the weights.
    """
    route, first, last = _block(gate.projection, down.projection, x, logits, bias, form)
    ids, weights, finished = route(logits, logits if bias is None else bias)
    (hidden,) = first(x, *gate.arrays, *up.arrays, ids)
    return last(hidden, *down.arrays, ids, weights, finished)[1]


def bind_block(
    gate: Projection, down: Projection, x: mx.array, logits: mx.array, bias: mx.array | None, form: RouterForm
) -> Callable[..., mx.array]:
    """`moe_block` for arrays like these, as a function of x, logits, the bias if there is one, and the arrays of up,
    gate and down."""
    route, first, last = (part.bind() for part in _block(gate, down, x, logits, bias, form))

    def run(x: mx.array, logits: mx.array, *arrays: mx.array) -> mx.array:
        up, gate, down = arrays[-12:-8], arrays[-8:-4], arrays[-4:]
        ids, weights, finished = route(inputs=(logits, logits if bias is None else arrays[0]))
        (hidden,) = first(inputs=(x, *gate, *up, ids))
        return last(inputs=(hidden, *down, ids, weights, finished))[1]

    return run


def bind_dense(p: Projection, x: mx.array) -> Callable[..., mx.array]:
    """`dense_qmm` for an x like this, as a function of x and the weights' arrays."""
    run = _dense(p, x).bind()
    return lambda *arrays: run(inputs=arrays)[0]


def _words(ids: mx.array) -> mx.array:
    """Ids of 32 bits, signed or not: from 2^31 on they are out of range either way."""
    return ids if ids.dtype in WORDS else ids.astype(mx.int32)


def _dense(p: Projection, x: mx.array, choice: Choice | None = None) -> Launch:
    """One matrix for at most 32 rows: inputs x [..., K], arrays of the weights -> [..., N]."""
    rows = x.size // x.shape[-1]
    choice = choice or choose_dense(rows, p, device.multiprocessors())
    assert isinstance(choice.shape, Strip)
    variant = variants.dense(p, choice.shape)
    scalars = rows, p.n, p.k, int(p.has_bias), choice.split, choice.per_sm, choice.sms
    blocks = choice.per_sm * choice.sms or -(-p.n // variant.features(choice.split))
    return Launch(variant, (((*x.shape[:-1], p.n), x.dtype),), scalars, blocks)


def dense_qmm(x: mx.array, weights: Weights, choice: Choice | None = None) -> mx.array:
    """x [..., K], at most 32 rows, and weights of one matrix -> [..., N]: W x^T + bias."""
    return _dense(weights.projection, x, choice)(x, *weights.arrays)[0]


Shaped = Tile | WgmmaTile | Choice  # how a product may be asked for


def _given(shape: Shaped | None, rows: int, weights: Weights, glu: bool = False) -> Choice:
    if shape is None:
        return choose(rows, weights.projection, glu, device.arch())
    return shape if isinstance(shape, Choice) else Choice(shape, 1, "given")


def grouped_qmm(x: mx.array, ids: mx.array, weights: Weights, shape: Shaped | None = None) -> mx.array:
    """x [x_rows, K], ids [rows], rows a multiple of x_rows -> [rows, N]: row r is W[ids[r]] x[r // (rows / x_rows)]."""
    choice = _given(shape, ids.size, weights)
    if isinstance(choice.shape, Strip):
        return _decode(x, _words(ids), choice, weights)
    routing = route(ids, x, weights.projection.experts, weights.projection.quantization.bits, choice.shape)
    return _grouped(routing, routing.x, weights, ids.size // x.shape[0], scatter=True)


def moe_glu(
    x: mx.array, ids: mx.array, gate: Weights, up: Weights, down: Weights, shape: Shaped | None = None
) -> mx.array:
    """Gated expert MLP with SwiGLU: x [T, H], ids [T * A] -> [T * A, H]. Gate and up are alike but for their values.

    For few rows ids may have any shape, and the result has it too.
    """
    choice = _given(shape, ids.size, gate, glu=True)
    if isinstance(choice.shape, Strip):
        ids = _words(ids)
        last = choice if shape else choose(ids.size, down.projection)
        return _decode(_decode(x, ids, choice, gate, up), ids, last, down)
    routing = route(ids, x, gate.projection.experts, gate.projection.quantization.bits, choice.shape)
    hidden = _glu(routing, gate, up, ids.size // x.shape[0], down.projection.quantization.bits)
    return _grouped(routing, hidden, down, 0, scatter=True)


def moe_mlp(
    x: mx.array,
    ids: mx.array,
    first: list[Weights],
    activation: Callable[..., mx.array],
    down: Weights,
    shape: Shaped | None = None,
) -> mx.array:
    """Expert MLP with any elementwise activation: x [T, H], ids [T * A] -> [T * A, H].

    `activation` gets one array [T * A, 1, F] for each of `first` (which share bits), as MLX's own layers call theirs;
    rows in sorted order where there are many. For few rows ids may have any shape, and results have it too.
    """
    head = first[0].projection
    choice = _given(shape, ids.size, first[0])
    if isinstance(choice.shape, Strip):
        ids = _words(ids)
        hidden = activation(*(_decode(x, ids, choice, w)[..., None, :] for w in first)).squeeze(-2)
        return _decode(hidden, ids, choice if shape else choose(ids.size, down.projection), down)
    routing = route(ids, x, head.experts, head.quantization.bits, choice.shape)
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
    shapes = tiles(device.arch())
    found = [v for p in first for v in variants.needed(p, glu, shapes)]
    return list(dict.fromkeys(found + variants.needed(down, False, shapes)))


def few_variants(projections: list[Projection]) -> list[variants.Variant]:
    """Every variant that `moe_block` may launch; `projections`: up, gate and down."""
    _, gate, down = projections
    few = variants.EXPERT_STRIP
    routers = [variants.router(dtype) for dtype in (gate.dtype, "fp32")]  # of logits
    return [*routers, variants.of(gate, True, few), variants.of(down, False, few)]


__all__ = [
    "Routing",
    "Weights",
    "bind_block",
    "bind_dense",
    "bind_glu",
    "dense_qmm",
    "few_variants",
    "grouped_qmm",
    "moe_block",
    "moe_glu",
    "moe_mlp",
    "own_their_buffers",
    "permute",
    "route",
    "router",
    "variants_of",
]
