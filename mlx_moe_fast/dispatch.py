"""Problem -> token tile. Pure: no arrays, no device, and every choice can be explained."""

from dataclasses import dataclass

from . import envs
from .errors import MlxMoeFastError
from .variants import TILES, Tile

# Most rows an expert, on average, for which a tile height was the fastest on an H200; taller tiles run shorter
# loops when they are not full, so a tall one serves a wide range (kernels/LOG.md).
ROWS_PER_EXPERT = ((6, 16), (22, 32), (90, 64))
TALLEST = max(TILES)


# Multiply-adds of one projection below which MLX's own kernels, which read weights once a row, are done before
# ours have been launched. Measured on an H200 (kernels/LOG.md).
MIN_WORK = 80_000_000


def few_rows(n: int, k: int) -> int:
    """Routed rows of an n x k projection below which our launches do not pay."""
    return 0 if envs.TILE.get() else -(-MIN_WORK // (n * k))


@dataclass(frozen=True)
class Choice:
    """A tile, and why."""

    tile: Tile
    why: str


def choose_tile(rows: int, experts: int) -> Choice:
    """The tile for `rows` routed rows (tokens x top-k) over `experts` experts. Raises on a forced tile that
    does not exist."""
    forced = envs.TILE.get()
    if forced:
        if not forced.isdecimal() or int(forced) not in TILES:
            raise MlxMoeFastError(
                f"{envs.TILE.name}={forced!r} is no tile height.", f"Use one of {', '.join(map(str, TILES))}."
            )
        return Choice(TILES[int(forced)], f"forced by {envs.TILE.name}")
    per_expert = rows / experts
    m = next((m for most, m in ROWS_PER_EXPERT if per_expert <= most), TALLEST)
    return Choice(TILES[m], f"{per_expert:.1f} rows an expert")
