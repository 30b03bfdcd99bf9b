"""THE table of kernels. One id names a variant everywhere: entry point, cache file, report, test, benchmark."""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

from .problem import Projection, Quantization

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("bf16", "fp16")

THREADS = 128  # of a prefill block
TILE_N = 128  # weight rows of a prefill block; GLU: half of them gate, half up
K_BLOCK_BYTES = 64  # of a weight row: one pipeline stage, and the block in which K is permuted
ROUTE_THREADS = 512
WARPS = 4  # of a decode block, and parts of K
ROUTER_TOKENS = 4  # of a block of the router kernel
ROUTER_EXPERTS, ROUTER_TOP_K, ROUTER_GROUPS = 512, 32, 32  # the most that it takes
NUMBERS = {None: 0, "fp32": 1, "bf16": 2, "fp16": 3}  # of logits, and of a bias if there is one
SPAN_BYTES = 32  # of a weight row, kernels/decode.cu


def k_block(bits: int) -> int:
    """Elements of K in a block: the unit of permutation and padding (kernels/quant.cuh)."""
    return K_BLOCK_BYTES * 8 // bits


def padded(k: int, bits: int) -> int:
    """`k` rounded up to whole K blocks: the width of permuted activations."""
    return -(-k // k_block(bits)) * k_block(bits)


def logical_k(p: int, bits: int) -> int:
    """The element of K that stands at position `p` of permuted activations (kernels/quant.cuh)."""
    size = k_block(bits)
    s, u, t, h = p % size // 16, p // 8 % 2, p // 2 % 4, p % 2
    inside = 32 * t + 8 * (s // 2) + 2 * (s % 2) + u + 4 * h if bits == 4 else 16 * t + 4 * s + u + 2 * h
    return p // size * size + inside


def physical_k(k: int, bits: int) -> int:
    """The position of element `k` in permuted activations: the inverse of `logical_k`."""
    size = k_block(bits)
    return next(p for p in range(k // size * size, (k // size + 1) * size) if logical_k(p, bits) == k)


@dataclass(frozen=True)
class Tile:
    """Launch shape of the prefill kernel: `m` tokens a block, `stages` of the pipeline, `blocks_per_sm` that the
    register budget allows for, `unroll_words` of a lane's four words in the inner loop."""

    m: int
    stages: int
    blocks_per_sm: int
    unroll_words: int


TILES = {t.m: t for t in (Tile(16, 2, 5, 2), Tile(32, 2, 4, 2), Tile(64, 2, 3, 2), Tile(128, 2, 2, 2))}


@dataclass(frozen=True)
class Prefill:
    """A variant of kernels/prefill_sm80.cu."""

    quantization: Quantization
    dtype: str
    glu: bool
    tile: Tile

    source = "prefill_sm80.cu"

    @cached_property
    def id(self) -> str:
        kind = "glu" if self.glu else "plain"
        return f"prefill_sm80_{kind}_{self.quantization}_{self.dtype}_m{self.tile.m}"

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernel asserts the same number."""
        block = k_block(self.quantization.bits)
        groups = max(1, block // self.quantization.group_size)
        stage = TILE_N * K_BLOCK_BYTES + self.tile.m * block * 2
        return self.tile.stages * stage + 2 * groups * (TILE_N + 2) * 8 + self.tile.m * 4

    @property
    def defines(self) -> dict[str, str | int]:
        """Macros that make this variant out of the source."""
        return {
            "MOE_ENTRY": self.id,
            "MOE_DTYPE": {"bf16": "Bf16", "fp16": "Fp16"}[self.dtype],
            "MOE_BITS": self.quantization.bits,
            "MOE_GROUP": self.quantization.group_size,
            "MOE_GLU": int(self.glu),
            "MOE_TILE_M": self.tile.m,
            "MOE_STAGES": self.tile.stages,
            "MOE_UNROLL_WORDS": self.tile.unroll_words,
            "MOE_BLOCKS_PER_SM": self.tile.blocks_per_sm,
            "MOE_SHARED_BYTES": self.shared_bytes,
        }


@dataclass(frozen=True)
class Strip:
    """Launch shape of the decode kernel: `columns` rows of x at once, `tiles` of 16 weight rows a warp (GLU: half of
    them gate, half up), `stages` of the ring, `blocks_per_sm` that the register budget allows for."""

    columns: int
    tiles: int
    stages: int
    blocks_per_sm: int


DENSE_STRIPS = {s.columns: s for s in (Strip(8, 2, 2, 4), Strip(16, 4, 2, 2), Strip(32, 2, 2, 2))}
EXPERT_STRIP = Strip(8, 4, 2, 2)


@dataclass(frozen=True)
class Decode:
    """A variant of kernels/decode.cu. `kind`: "dense", or of experts "plain" or "glu"."""

    quantization: Quantization
    dtype: str
    kind: str
    strip: Strip

    source = "decode.cu"
    threads = 32 * WARPS

    @cached_property
    def id(self) -> str:
        return f"decode_{self.kind}_{self.quantization}_{self.dtype}_m{self.strip.columns}"

    def features(self, split: int) -> int:
        """Output features of a block, of whose warps `split` share the parts of K."""
        return 16 * self.strip.tiles // (2 if self.kind == "glu" else 1) * WARPS // split

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernel asserts the same number."""
        s, q = self.strip, self.quantization
        ring = s.stages * 2 * (s.tiles * 16 * SPAN_BYTES + 64)
        span = SPAN_BYTES * 8 // q.bits
        lane_groups = min(16, 32 * q.group_size // span // s.tiles) * span // q.group_size // 4
        scales = s.tiles * 4 * lane_groups * (128 + (32 // lane_groups if lane_groups < 4 else 8))
        sums = s.columns * (16 * s.tiles + 4) * 4
        return WARPS * (ring + scales + sums + (0 if self.kind == "dense" else s.columns * 4))

    @property
    def defines(self) -> dict[str, str | int]:
        """Macros that make this variant out of the source."""
        return {
            "MOE_ENTRY": self.id,
            "MOE_DTYPE": {"bf16": "Bf16", "fp16": "Fp16"}[self.dtype],
            "MOE_BITS": self.quantization.bits,
            "MOE_GROUP": self.quantization.group_size,
            "MOE_ROUTED": int(self.kind != "dense"),
            "MOE_GLU": int(self.kind == "glu"),
            "MOE_BLOCKS": self.strip.columns // 8,
            "MOE_TILES": self.strip.tiles,
            "MOE_STAGES": self.strip.stages,
            "MOE_BLOCKS_PER_SM": self.strip.blocks_per_sm,
            "MOE_SHARED_BYTES": self.shared_bytes,
        }


@dataclass(frozen=True)
class Route:
    """A variant of kernels/route.cu: routing lists, and activations permuted for `bits`-bit weights."""

    bits: int

    source = "route.cu"
    threads = ROUTE_THREADS
    shared_bytes = ROUTE_THREADS // 32 * 8  # two counts a warp

    @cached_property
    def id(self) -> str:
        return f"route_{self.bits}bit"

    @property
    def defines(self) -> dict[str, str | int]:
        return {"MOE_ENTRY": self.id, "MOE_BITS": self.bits, "MOE_SHARED_BYTES": self.shared_bytes}


@dataclass(frozen=True)
class Router:
    """kernels/router.cu: top-k experts and their weights from router logits of `dtype`."""

    dtype: str

    source = "router.cu"
    threads = 32 * ROUTER_TOKENS
    shared_bytes = 0

    @cached_property
    def id(self) -> str:
        return f"router_{self.dtype}"

    @property
    def defines(self) -> dict[str, str | int]:
        return {"MOE_ENTRY": self.id, "MOE_LOGITS": NUMBERS[self.dtype]}


@dataclass(frozen=True)
class Probe:
    """kernels/probe.cu: where arrays lie."""

    source = "probe.cu"
    id = "probe"
    threads = 1
    shared_bytes = 0

    @property
    def defines(self) -> dict[str, str | int]:
        return {"MOE_ENTRY": self.id}


@dataclass(frozen=True)
class Stamp:
    """kernels/stamp.cu: the GPU's clock between two kernels, for benchmarks."""

    source = "stamp.cu"
    id = "stamp"
    threads = 256
    shared_bytes = 0

    @property
    def defines(self) -> dict[str, str | int]:
        return {"MOE_ENTRY": self.id, "MOE_THREADS": self.threads}


Variant = Prefill | Decode | Route | Router | Probe | Stamp


route = cache(Route)
router = cache(Router)


@cache
def of(projection: Projection, glu: bool, shape: Tile | Strip) -> Prefill | Decode:
    """The variant that computes `projection` of experts (GLU: a pair of such) with `shape`."""
    if isinstance(shape, Strip):
        return Decode(projection.quantization, projection.dtype, "glu" if glu else "plain", shape)
    return Prefill(projection.quantization, projection.dtype, glu, shape)


@cache
def dense(projection: Projection, strip: Strip) -> Decode:
    """The variant that computes one dense `projection`."""
    return Decode(projection.quantization, projection.dtype, "dense", strip)


def needed(projection: Projection, glu: bool) -> list[Variant]:
    """Every variant that `projection` of experts may be dispatched to."""
    shapes: list[Tile | Strip] = [EXPERT_STRIP, *TILES.values()]
    return [route(projection.quantization.bits), *(of(projection, glu, shape) for shape in shapes)]


def needed_dense(projection: Projection) -> list[Variant]:
    """Every variant that a dense `projection` may be dispatched to."""
    return [dense(projection, strip) for strip in DENSE_STRIPS.values()]


def all_variants() -> list[Variant]:
    """Every declared variant."""
    quantizations = [Quantization(bits, group) for bits, group in product(BITS, GROUP_SIZES)]
    prefills = product(quantizations, DTYPES, (False, True), TILES.values())
    decodes = [*product(("plain", "glu"), [EXPERT_STRIP]), *product(("dense",), DENSE_STRIPS.values())]
    return [
        Probe(),
        Stamp(),
        *(Route(bits) for bits in BITS),
        *(Router(dtype) for dtype in NUMBERS if dtype),
        *(Prefill(*p) for p in prefills),
        *(Decode(q, dtype, kind, strip) for q, dtype, (kind, strip) in product(quantizations, DTYPES, decodes)),
    ]
