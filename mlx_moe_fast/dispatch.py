"""Problem -> kernel and launch shape. Pure: no arrays, no device, and every choice can be explained."""

import math
from dataclasses import dataclass
from functools import cache

from . import envs
from .errors import MlxMoeFastError
from .problem import Projection
from .variants import DENSE_STRIPS, EXPERT_STRIP, TILES, WARPS, WGMMA, WGMMA_ARCH, Strip, Tile, WgmmaTile

# Most rows an expert, on average, for which a tile height was the fastest on an H200; taller tiles run shorter
# loops when they are not full, so a tall one serves a wide range (kernels/LOG.md).
ROWS_PER_EXPERT = ((6, 16), (22, 32), (90, 64))
TALLEST = max(TILES)

# Rows an expert, on average, from which the wgmma kernel serves on sm_90a: none, before it has been checked on a card.
WGMMA_ROWS_PER_EXPERT = math.inf
FORCIBLE: dict[str, Tile | WgmmaTile] = {**{str(m): tile for m, tile in TILES.items()}, "wgmma": WGMMA}

# Routed rows for which the decode kernel reads the weights: any up to the first number, so that the bits of a row do
# not depend on the size of a small batch, and up to the last one where experts have few rows (kernels/LOG.md).
DECODE_ROWS, DECODE_ROWS_PER_EXPERT, MOST_DECODE_ROWS = 64, 4, 1024
DENSE_ROWS = max(DENSE_STRIPS)

# The warps of a decode block share K where there are few blocks, or where K is long. Measured on an H200.
ENOUGH_WARPS, SHORT_ROW = 700, 1024

# Multiply-adds of one projection below which MLX's own kernel, which reads weights once a row, is done before the
# Python of a launch of ours is paid for: twice MLX's own, some 4 us. From the times of single products and launches on
# an H200 (kernels/LOG.md).
MIN_WORK = 30_000_000

# A single row of a dense layer stays on MLX's kernel: a model's step waits for MLX's thread there, and ours, though
# twice as fast on the GPU, made it longer (docs/batched-decode.md). But an output layer of this size saves 0.1 ms.
LEAST_DENSE_ROWS, LONE_ROW_WORK = 2, 250_000_000

# Rows of a dense layer from which MLX runs another kernel, of 22 us and more however small the matrix; ours takes 7.
STOCK_BATCH_ROWS = 8


def few_rows(n: int, k: int, dense: bool = False) -> int:
    """Rows of an n x k projection below which our launches do not pay."""
    if envs.TILE.get():
        return 0
    rows = -(-MIN_WORK // (n * k))
    if not dense:
        return rows
    return 1 if n * k >= LONE_ROW_WORK else min(max(LEAST_DENSE_ROWS, rows), STOCK_BATCH_ROWS)


@dataclass(frozen=True)
class Choice:
    """A tile of a prefill kernel or a strip of the decode kernel, how many of whose warps share the parts of K; and
    why. `per_sm`: blocks for each of `sms` multiprocessors, which share a dense matrix evenly; 0: as many blocks as
    the matrix fills."""

    shape: Tile | WgmmaTile | Strip
    split: int
    why: str
    per_sm: int = 0
    sms: int = 0


def split(features: int, k: int, bits: int, slots: int, tiles: int) -> int:
    """How many of a decode block's warps share the parts of K, for `slots` matrices of `features` rows (GLU: gate and
    up) in `tiles` of 16."""
    warps = slots * features // (16 * tiles)
    return 1 if warps >= ENOUGH_WARPS and k * bits // 8 <= SHORT_ROW else WARPS


def slots(rows: int, experts: int) -> int:
    """Experts that blocks are launched for: all of them and one for ids out of range, or one a row."""
    return min(rows, experts + 1)


def forced_tile() -> Tile | WgmmaTile | None:
    """The tile that the environment asks for. Raises if it does not exist."""
    forced = envs.TILE.get()
    if forced and forced not in FORCIBLE:
        raise MlxMoeFastError(f"{envs.TILE.name}={forced!r} is no tile.", f"Use one of {', '.join(FORCIBLE)}.")
    return FORCIBLE.get(forced)


def tiles(arch: str) -> list[Tile | WgmmaTile]:
    """Every tile that `choose` may come to on `arch`."""
    wgmma = arch == WGMMA_ARCH and (WGMMA_ROWS_PER_EXPERT < math.inf or forced_tile() is WGMMA)
    return [*TILES.values(), *([WGMMA] if wgmma else [])]


def choose(rows: int, projection: Projection, glu: bool = False, arch: str = "") -> Choice:
    """The shape for `rows` routed rows (tokens x top-k) of `projection` (GLU: of a pair of such)."""
    tile = forced_tile()
    return Choice(tile, 1, f"forced by {envs.TILE.name}") if tile else _choose(rows, projection, glu, arch)


@cache
def _choose(rows: int, projection: Projection, glu: bool, arch: str) -> Choice:
    p, per_expert = projection, rows / projection.experts
    why = f"{per_expert:.1f} rows an expert"
    if rows <= DECODE_ROWS or (rows <= MOST_DECODE_ROWS and per_expert <= DECODE_ROWS_PER_EXPERT):
        features, strip = p.n * (2 if glu else 1), EXPERT_STRIP
        return Choice(strip, split(features, p.k, p.quantization.bits, slots(rows, p.experts), strip.tiles), why)
    if arch == WGMMA_ARCH and per_expert >= WGMMA_ROWS_PER_EXPERT:
        return Choice(WGMMA, 1, why)
    return Choice(TILES[next((m for most, m in ROWS_PER_EXPERT if per_expert <= most), TALLEST)], 1, why)


def is_few(rows: int, projection: Projection) -> bool:
    """Whether `rows` routed rows of `projection` run on the decode kernel."""
    return isinstance(choose(rows, projection).shape, Strip)


@cache
def choose_dense(rows: int, projection: Projection, sms: int = 0) -> Choice:
    """The strip for `rows` rows, at most DENSE_ROWS, of one dense `projection` on a GPU of `sms` multiprocessors."""
    strip = next(s for columns, s in DENSE_STRIPS.items() if rows <= columns)
    p = projection
    shared = split(p.n, p.k, p.quantization.bits, 1, strip.tiles)
    if shared == 1 or not sms:
        return Choice(strip, shared, f"{rows} rows")
    tiles = -(-p.n // 16)
    per_sm = max(-(-tiles // (sms * strip.tiles)), min(strip.blocks_per_sm, -(-tiles // sms)))
    return Choice(strip, shared, f"{rows} rows", per_sm, sms)
