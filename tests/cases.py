"""Problems, shared by tests and benchmarks: named shapes, seeded arrays, routings."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_moe_fast.ops import Weights
from mlx_moe_fast.problem import Projection, Quantization

DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16}


def floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> mx.array:
    """Standard normal values."""
    return mx.array(rng.standard_normal(shape, np.float32)).astype(DTYPES[dtype])


def make_weights(rng: np.random.Generator, projection: Projection) -> Weights:
    """Random weights of about unit gain: every integer, scales within a factor of three, biases that centre them."""
    p, q = projection, projection.quantization
    words = rng.integers(0, 2**32, (p.experts, p.n, p.k * q.bits // 32), np.uint32)
    top = 2**q.bits - 1
    step = 3.5 / top / np.sqrt(p.k)
    scales = step * rng.uniform(0.5, 1.5, (p.experts, p.n, p.k // q.group_size)).astype(np.float32)
    biases = -scales * top / 2 * rng.uniform(0.9, 1.1, scales.shape).astype(np.float32)
    bias = floats(rng, (p.experts, p.n), p.dtype) if p.has_bias else None
    return Weights(p, mx.array(words), *(mx.array(a).astype(DTYPES[p.dtype]) for a in (scales, biases)), bias)


def make_ids(rng: np.random.Generator, tokens: int, top_k: int, experts: int, kind: str) -> np.ndarray:
    """[tokens, top_k] int32.

    distinct    what a router gives: different experts in a token; the last expert stays empty if it can
    duplicates  any ids: an expert more than once in a token
    one         every row to one expert
    sorted      as duplicates, in order
    bad         a third of them -1, E, or the largest int32
    """
    usable = max(top_k, experts - 1)
    if kind == "distinct":
        ids = rng.random((tokens, usable)).argsort(axis=1)[:, :top_k]
    elif kind == "one":
        ids = np.full((tokens, top_k), experts // 2)
    else:
        ids = rng.integers(0, max(1, experts - 1), (tokens, top_k))
    if kind == "sorted":
        ids = np.sort(ids, axis=None).reshape(ids.shape)
    if kind == "bad":
        wrong = rng.choice([-1, experts, 2**31 - 1], ids.shape)
        ids = np.where(rng.random(ids.shape) < 1 / 3, wrong, ids)
    return ids.astype(np.int32)


@dataclass(frozen=True)
class Case:
    """One expert layer: T tokens, top-k A, H and F features, E experts."""

    tokens: int
    top_k: int
    hidden: int
    features: int
    experts: int
    quantization: Quantization
    dtype: str = "bf16"
    has_bias: bool = False
    ids: str = "distinct"
    down: Quantization | None = None
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Of gate and up, and of down."""
        first = Projection(self.experts, self.features, self.hidden, self.quantization, self.dtype, self.has_bias)
        down = Projection(
            self.experts,
            self.hidden,
            self.features,
            self.down or self.quantization,
            self.dtype,
            self.has_bias,
        )
        return first, down

    def arrays(self) -> tuple[mx.array, mx.array, Weights, Weights, Weights]:
        """x [T, H], ids [T, A], gate, up, down."""
        rng = np.random.default_rng(self.seed)
        first, down = self.projections
        x = floats(rng, (self.tokens, self.hidden), self.dtype)
        ids = mx.array(make_ids(rng, self.tokens, self.top_k, self.experts, self.ids))
        return x, ids, make_weights(rng, first), make_weights(rng, first), make_weights(rng, down)

    def __str__(self) -> str:
        extra = ("-bias" if self.has_bias else "") + ("" if self.ids == "distinct" else f"-{self.ids}")
        extra += f"-down{self.down}" if self.down else ""
        shape = f"T{self.tokens}-A{self.top_k}-H{self.hidden}-F{self.features}-E{self.experts}"
        return f"{shape}-{self.quantization}-{self.dtype}{extra}"


def around(tile: int, quantization: Quantization, dtype: str) -> list[Case]:
    """Shapes on and beside the edges of a tile of `tile` tokens, for one quantization and dtype."""
    g = quantization.group_size
    block = max(512 // quantization.bits, g)  # K block

    def make(*shape: int, **kw) -> Case:
        return Case(*shape, quantization, dtype, **kw)

    return [
        make(1, 1, block, 128, 2),  # one row, one K block
        make(1, 2, g, g, 3),  # shorter than a K block
        make(tile - 1, 1, 2 * block + g, 128 + g, 1),  # a tile but one; K tail; N tail
        make(tile, 1, 3 * block, 256, 2, ids="one"),  # exactly a tile
        make(tile + 1, 1, 256, 3 * g, 2, ids="one", has_bias=True),  # a tile and one row
        make(2 * tile + 5, 2, 384, 5 * g, 7, ids="duplicates"),  # several tiles an expert, unsorted
        make(33, 4, 2 * block, 6 * g, 5, ids="bad", has_bias=True),  # ids out of range
        make(40, 4, 512, 128 + g, 5, ids="sorted"),
        make(3, 4, 128 + g, 128, 64),  # most experts empty
    ]


def few(quantization: Quantization, dtype: str) -> list[Case]:
    """Routings that a kernel meets which looks through the ids itself."""
    g = quantization.group_size
    return [
        Case(11, 1, g, g, 12, quantization, dtype, ids="one"),  # fewer rows than experts, and one has more than eight
        Case(12, 1, g, g, 12, quantization, dtype, ids="bad"),  # as many rows as experts
        Case(290, 1, g, g, 40, quantization, dtype, ids="duplicates"),  # more ids than are loaded at once
    ]
