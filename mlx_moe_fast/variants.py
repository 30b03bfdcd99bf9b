"""THE table of kernels. One id names a variant everywhere: entry point, cache file, report, test, benchmark."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

from .problem import Projection, Quantization

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("bf16", "fp16")

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
    """Launch shape of kernels/prefill_sm80.cu: `m` tokens a block, `stages` of the pipeline, `blocks_per_sm` that the
    register budget allows for, `unroll_words` of a lane's four words in the inner loop."""

    m: int
    stages: int
    blocks_per_sm: int
    unroll_words: int

    kernel = "prefill_sm80"
    threads = 128
    weight_rows = 128  # of a block; GLU: half of them gate, half up

    def shared_bytes(self, q: Quantization) -> int:
        block = k_block(q.bits)
        stage = self.weight_rows * K_BLOCK_BYTES + self.m * block * 2
        return self.stages * stage + 2 * max(1, block // q.group_size) * (self.weight_rows + 2) * 8 + self.m * 4

    def defines(self, q: Quantization) -> dict[str, str | int]:
        return {
            "MOE_TILE_M": self.m,
            "MOE_STAGES": self.stages,
            "MOE_UNROLL_WORDS": self.unroll_words,
            "MOE_BLOCKS_PER_SM": self.blocks_per_sm,
        }


@dataclass(frozen=True)
class WgmmaTile:
    """Launch shape of kernels/prefill_sm90.cu: `m` tokens at most, fewer where a tile has fewer rows. A block per
    multiprocessor, which share the work."""

    m: int

    kernel = "prefill_sm90"
    threads = 384
    weight_rows = 256

    def shared_bytes(self, q: Quantization) -> int:
        stages, ring = WGMMA_STAGES[q.bits]
        return stages * (self.m * k_block(q.bits) * 2 + 16) + ring * self.weight_rows * K_BLOCK_BYTES

    def defines(self, q: Quantization) -> dict[str, str | int]:
        stages, ring = WGMMA_STAGES[q.bits]
        return {"MOE_STAGES": stages, "MOE_RING": ring}


TILES = {t.m: t for t in (Tile(16, 2, 5, 2), Tile(32, 2, 4, 2), Tile(64, 2, 3, 2), Tile(128, 2, 2, 2))}
WGMMA = WgmmaTile(128)
WGMMA_ARCH = "sm_90a"
WGMMA_STAGES = {4: (4, 4), 8: (6, 6)}  # by bits: of activations, and of weights


@dataclass(frozen=True)
class Prefill:
    """A variant of kernels/prefill_sm80.cu or prefill_sm90.cu."""

    quantization: Quantization
    dtype: str
    glu: bool
    tile: Tile | WgmmaTile

    @property
    def source(self) -> str:
        return f"{self.tile.kernel}.cu"

    @cached_property
    def id(self) -> str:
        kind = "glu" if self.glu else "plain"
        return f"{self.tile.kernel}_{kind}_{self.quantization}_{self.dtype}_m{self.tile.m}"

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def features(self) -> int:
        """Output features of a block."""
        return self.tile.weight_rows // (2 if self.glu else 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernel asserts the same number."""
        return self.tile.shared_bytes(self.quantization)

    @property
    def defines(self) -> dict[str, str | int]:
        """Macros that make this variant out of the source."""
        return {
            "MOE_ENTRY": self.id,
            "MOE_DTYPE": {"bf16": "Bf16", "fp16": "Fp16"}[self.dtype],
            "MOE_BITS": self.quantization.bits,
            "MOE_GROUP": self.quantization.group_size,
            "MOE_GLU": int(self.glu),
            "MOE_SHARED_BYTES": self.shared_bytes,
            **self.tile.defines(self.quantization),
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
def of(projection: Projection, glu: bool, shape: Tile | WgmmaTile | Strip) -> Prefill | Decode:
    """The variant that computes `projection` of experts (GLU: a pair of such) with `shape`."""
    if isinstance(shape, Strip):
        return Decode(projection.quantization, projection.dtype, "glu" if glu else "plain", shape)
    return Prefill(projection.quantization, projection.dtype, glu, shape)


@cache
def dense(projection: Projection, strip: Strip) -> Decode:
    """The variant that computes one dense `projection`."""
    return Decode(projection.quantization, projection.dtype, "dense", strip)


def needed(projection: Projection, glu: bool, tiles: Iterable[Tile | WgmmaTile]) -> list[Variant]:
    """Every variant that `projection` of experts may be dispatched to, if it may to `tiles`."""
    return [route(projection.quantization.bits), *(of(projection, glu, shape) for shape in (EXPERT_STRIP, *tiles))]


def needed_dense(projection: Projection) -> list[Variant]:
    """Every variant that a dense `projection` may be dispatched to."""
    return [dense(projection, strip) for strip in DENSE_STRIPS.values()]


def all_variants(arch: str = "") -> list[Variant]:
    """Every declared variant; only those that `arch` can run, if given."""
    tiles: list[Tile | WgmmaTile] = [*TILES.values(), *([WGMMA] if arch in ("", WGMMA_ARCH) else [])]
    quantizations = [Quantization(bits, group) for bits, group in product(BITS, GROUP_SIZES)]
    prefills = product(quantizations, DTYPES, (False, True), tiles)
    decodes = [*product(("plain", "glu"), [EXPERT_STRIP]), *product(("dense",), DENSE_STRIPS.values())]
    return [
        Probe(),
        Stamp(),
        *(Route(bits) for bits in BITS),
        *(Router(dtype) for dtype in NUMBERS if dtype),
        *(Prefill(*p) for p in prefills),
        *(Decode(q, dtype, kind, strip) for q, dtype, (kind, strip) in product(quantizations, DTYPES, decodes)),
    ]
