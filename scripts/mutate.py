"""Plants faults in the kernels, one at a time, and asks whether the checks of the CPU suite see them.

    python scripts/mutate.py             # all; writes the table of docs/reliability.md
    python scripts/mutate.py --check     # all; writes nothing, exits 1 if a fault is missed
    python scripts/mutate.py --only "wait removed"

A fault is a change of text in a copy of the sources; the kernels on disk stay as they are. It is caught if a check
fails, if the emulator or a sanitizer stops the kernel, or if results depend on the schedule.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import mlx.core as mx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import checks  # noqa: E402
from cases import Case, around, few  # noqa: E402
from emulator import Emulator, Fault, build  # noqa: E402
from numerics import array  # noqa: E402

from mlx_moe_fast import device, jit, ops, variants  # noqa: E402
from mlx_moe_fast.dispatch import Choice  # noqa: E402
from mlx_moe_fast.problem import Quantization  # noqa: E402
from mlx_moe_fast.variants import (  # noqa: E402
    DENSE_STRIPS,
    EXPERT_STRIP,
    TILES,
    WARPS,
    WGMMA,
    Decode,
    Prefill,
    Tile,
    Variant,
    WgmmaTile,
)

PAGE = ROOT / "docs" / "reliability.md"
RUNS = ((0, True), (1, False), (0, False), (1, True))  # seed of the schedule; whether copies land late

# ---- probes: one check of one problem each ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """A check, which may return a result that the schedule must not change, and the variants that it launches. x begins
    `skip` bytes into its buffer."""

    label: str
    variants: tuple[Variant, ...]
    check: Callable[[], mx.array | None]
    skip: int = 0


def plain(bits: int, group: int, dtype: str, tile: int | Tile | WgmmaTile) -> Prefill:
    return Prefill(Quantization(bits, group), dtype, False, TILES[tile] if isinstance(tile, int) else tile)


def glu(bits: int, group: int, dtype: str, tile: int | WgmmaTile) -> Prefill:
    return Prefill(Quantization(bits, group), dtype, True, TILES[tile] if isinstance(tile, int) else tile)


def launched(variant: Prefill, down: Quantization | None = None) -> tuple[Variant, ...]:
    """What `ops` launches for a variant: GLU is followed by the down projection."""
    second = (Prefill(down or variant.quantization, variant.dtype, False, variant.tile),) if variant.glu else ()
    return variants.route(variant.quantization.bits), variant, *second


def edge(variant: Prefill, i: int) -> Probe:
    """Case i of `cases.around` against the reference."""
    return given(variant, around(variant.tile.m, variant.quantization, variant.dtype)[i])


def given(variant: Prefill, case: Case) -> Probe:
    """Any case against the reference."""
    tile = f"tile {variant.tile.m}"
    if variant.tile is WGMMA:
        tile += " of prefill_sm90"
    elif variant.tile not in TILES.values():
        tile += f" of {variant.tile.stages} stages"
    label = f"{'GLU' if variant.glu else 'plain'}, {tile}, {case}"
    return Probe(label, launched(variant, case.down), partial(checks.run, case, variant.glu, variant.tile))


def special(check: Callable[[Prefill], None], variant: Prefill) -> Probe:
    return Probe(f"{check.__name__}, {variant.id}", launched(variant), partial(check, variant))


def routing(rows: int, tile: int, kind: str) -> Probe:
    check = partial(checks.routing_is_a_stable_sort, rows, TILES[tile], kind, experts=7)
    return Probe(f"routing_is_a_stable_sort, {rows} rows, tile {tile}, {kind}", (variants.route(4),), check)


def permutation(bits: int, k: int) -> Probe:
    check = partial(checks.permutation_is_the_formula, bits, k)
    return Probe(f"permutation_is_the_formula, {bits} bits, K {k}", (variants.route(bits),), check)


def nan_in_a_row() -> Probe:
    variant = glu(4, 64, "bf16", 16)
    check = partial(checks.bad_values_stay_in_their_row, float("nan"), variant.tile)
    return Probe("bad_values_stay_in_their_row, NaN, tile 16", launched(variant), check)


# Of decode. `split`: 1, WARPS, or EVEN for blocks that share a matrix evenly.
EVEN = 0
HOW = {1: "a warp for each row", WARPS: "warps share K", EVEN: "blocks share N"}


def decode(kind: str, bits: int, group: int, dtype: str, columns: int = 8) -> Decode:
    strip = DENSE_STRIPS[columns] if kind == "dense" else EXPERT_STRIP
    return Decode(Quantization(bits, group), dtype, kind, strip)


def matrix(variant: Decode, rows: int, n: int, k: int, split: int = WARPS, skip: int = 0) -> Probe:
    """A dense product against the reference."""
    choice = Choice(variant.strip, split, "") if split else checks.shapes_of(variant)[-1]
    label = f"{variant.id}, {HOW[split]}, {rows} x {k} to {n}" + (f", x {skip} bytes on" if skip else "")
    return Probe(label, (variant,), partial(checks.run_matrix, variant, choice, rows, n, k), skip)


def routed(variant: Decode, case: Case, split: int = WARPS) -> Probe:
    """A case against the reference; GLU is followed by the down projection."""
    down = (Decode(variant.quantization, variant.dtype, "plain", variant.strip),) if variant.kind == "glu" else ()
    check = partial(checks.run, case, variant.kind == "glu", Choice(variant.strip, split, ""))
    return Probe(f"decode, {variant.kind}, {HOW[split]}, {case}", (variant, *down), check)


def in_order(variant: Decode) -> Probe:
    return Probe(f"parts_add_up_in_order, {variant.id}", (variant,), partial(checks.parts_add_up_in_order, variant))


def near(variant: Decode, i: int, split: int = WARPS) -> Probe:
    """Case i of `cases.around` and, from there on, of `cases.few`."""
    q, dtype = variant.quantization, variant.dtype
    return routed(variant, [*around(variant.strip.columns, q, dtype), *few(q, dtype)][i], split)


def router(name: str, dtype: str = "bf16") -> Probe:
    """A case of `checks.ROUTERS`."""
    check = partial(checks.router_is_the_formula, dtype, name)
    return Probe(f"router, {dtype}: {name}", (variants.router(dtype),), check)


def bad_logits() -> Probe:
    return Probe("router_bears_bad_logits", (variants.router("bf16"),), partial(checks.router_bears_bad_logits, "bf16"))


def block() -> Probe:
    q = Quantization(4, 64)
    experts = [Decode(q, "bf16", kind, EXPERT_STRIP) for kind in ("glu", "plain")]
    routers = [variants.router(dtype) for dtype in ("bf16", "fp32")]
    return Probe("block_is_its_parts", (*routers, *experts), partial(checks.block_is_its_parts, q, "bf16"))


# ---- the faults ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """`old`, which occurs once in `file`, becomes `new`. `sanitize`: only an access outside a buffer betrays it."""

    name: str
    file: str
    old: str
    new: str
    models: str
    probe: Probe
    sanitize: bool = False


PREFILL, ROUTE, DECODE, ROUTER = "prefill_sm80.cu", "route.cu", "decode.cu", "router.cu"
HOPPER = "prefill_sm90.cu"
TILE, QUANT = "prefill.cuh", "quant.cuh"
P, G = plain(4, 64, "bf16", 16), glu(4, 64, "bf16", 16)
P8, G8 = plain(8, 64, "bf16", 16), glu(8, 64, "bf16", 16)
W, W32, WG = plain(4, 64, "bf16", WGMMA), plain(4, 32, "bf16", WGMMA), glu(4, 64, "bf16", WGMMA)
P16, P8_16 = plain(4, 64, "fp16", 16), plain(8, 64, "fp16", 16)
DEEP = plain(4, 64, "bf16", Tile(16, 3, 5, 2))  # three stages, which no tile has yet: groups of copies matter
D, D32, D8, D8_128 = (decode("dense", b, g, "bf16") for b, g in ((4, 64), (4, 32), (8, 64), (8, 128)))
E, EG = decode("plain", 4, 64, "bf16"), decode("glu", 4, 64, "bf16")
# Rows, N and K for `matrix`.
ONE, EDGE, PARTS, TAILS, LONG = (1, 8, 64), (5, 16, 320), (8, 128, 1024), (5, 136, 320), (7, 40, 1088)

RING_BARRIER = (
    "      __syncwarp();  // the pair has landed for all lanes, and all have read the one whose place is filled now\n"
)
REFILL = """\
      if (kb + C::kStages - 1 < k_blocks) {
        load_weights(w, w_up, p.n - weight_row0, bytes_left > 0, write);
        load_tokens(kb + C::kStages - 1, write, 16 * active);
        w += 64, w_up += 64, bytes_left -= 64;
      }
"""
COMMIT = "      ptx::cp_async_commit();\n"
WAIT = "        ptx::cp_async_wait<C::kStages - 2>();\n"
BARRIER = (
    "        __syncthreads();  // stage kb has landed for all, and all have left stage kb - 1, which is refilled now\n"
)
READ = "        q = load_quantized(read + lane_weights, lane_scales + (kb & 1) * C::kScaleBytes);\n"

SLOTS = """\
  static constexpr int kScalePitch = (kTileN + 2) * 8, kScaleBytes = kGroups * kScalePitch;
  static constexpr int kWeightBytes = kTileN * KBlock<kBits>::kBytes, kTokenPitch = kTileK * 2;
  static constexpr int kRowStep = kThreads * 16 / kTokenPitch;  // tokens that the block copies at once
  static constexpr int kRowsPerThread = kTileM / kRowStep;
  static constexpr int kStageBytes = kWeightBytes + kTileM * kTokenPitch;
  static constexpr int kScaleOffset = kStages * kStageBytes;
  static constexpr int kRowOffset = kScaleOffset + 2 * kScaleBytes;
"""

MUTATIONS = [
    # The pipeline.
    Mutation(
        "barrier after the row table removed",
        PREFILL,
        "fill_row_table();\n    __syncthreads();",
        "fill_row_table();",
        "a row table read before other warps have written it",
        edge(P, 0),
    ),
    Mutation(
        "barrier of the pipeline removed",
        PREFILL,
        BARRIER,
        "",
        "a stage read before other warps' copies have landed",
        edge(P, 2),
    ),
    Mutation(
        "barrier before the wait",
        PREFILL,
        WAIT + BARRIER,
        "        __syncthreads();\n" + WAIT,
        "a wait that covers a thread's own copies only",
        edge(P, 2),
    ),
    Mutation(
        "refill before the barrier",
        PREFILL,
        "      if (kb >= 0) {\n" + WAIT + BARRIER + READ + "      }\n" + REFILL + COMMIT,
        REFILL + COMMIT + "      if (kb >= 0) {\n" + WAIT.replace("- 2", "- 1") + BARRIER + READ + "      }\n",
        "a stage refilled while other warps still read it",
        edge(P, 2),
    ),
    Mutation("wait removed", PREFILL, WAIT, "", "a stage read before it has landed", edge(P, 2)),
    Mutation(
        "wait too lax",
        PREFILL,
        WAIT,
        WAIT.replace("- 2", "- 1"),
        "one group of copies too many left under way",
        edge(P, 2),
    ),
    Mutation("commit removed", PREFILL, COMMIT, "", "copies that no wait covers", edge(P, 2)),
    Mutation(
        "commit before the copies",
        PREFILL,
        REFILL + COMMIT,
        COMMIT + REFILL,
        "copies counted to the next group",
        edge(DEEP, 2),
    ),
    Mutation(
        "commit only with copies",
        PREFILL,
        REFILL + COMMIT,
        REFILL.replace("      }\n", "  " + COMMIT + "      }\n"),
        "no group in the last rounds, so the wait counts wrong",
        edge(DEEP, 2),
    ),
    Mutation(
        "write stage not advanced",
        PREFILL,
        "      write = write + C::kStageBytes == end ? smem : write + C::kStageBytes;\n",
        "",
        "every K block copied to one stage",
        edge(P, 2),
    ),
    Mutation(
        "read stage not advanced",
        PREFILL,
        "      read = read + C::kStageBytes == end ? smem : read + C::kStageBytes;\n",
        "",
        "every K block read from one stage",
        edge(P, 2),
    ),
    Mutation(
        "write stage wraps late",
        PREFILL,
        "write = write + C::kStageBytes == end",
        "write = write == end",
        "a stage that lies in the scales",
        edge(P, 2),
    ),
    Mutation(
        "tokens of the neighbour K block",
        PREFILL,
        "load_tokens(kb + C::kStages - 1,",
        "load_tokens(max(kb + C::kStages - 2, 0),",
        "weights and tokens of different K blocks",
        edge(P, 2),
    ),
    Mutation(
        "up weights not advanced",
        PREFILL,
        "w += 64, w_up += 64, bytes",
        "w += 64, bytes",
        "the up panel stays at its first K block",
        edge(G, 2),
    ),
    Mutation(
        "one slot of scales",
        PREFILL,
        SLOTS,
        SLOTS.replace("kScaleBytes = kGroups * kScalePitch", "kScaleBytes = 0").replace(
            "2 * kScaleBytes", "2 * kGroups * kScalePitch"
        ),
        "scales overwritten while other warps still read them",
        edge(G, 2),
    ),
    # Tails.
    Mutation(
        "K tail of weights off by one",
        PREFILL,
        "bytes_left > 0",
        "bytes_left >= 0",
        "16 bytes past the end of a weight row",
        edge(P, 2),
        sanitize=True,
    ),
    Mutation(
        "N tail of weights off by one",
        PREFILL,
        "more && step < rows",
        "more && step <= rows",
        "a weight row past the last",
        edge(P, 2),
        sanitize=True,
    ),
    Mutation(
        "K tail of scales off by one",
        PREFILL,
        "group < p.k / C::kGroup",
        "group <= p.k / C::kGroup",
        "a scale past the end of a row",
        edge(P, 2),
        sanitize=True,
    ),
    Mutation(
        "N tail of scales dropped",
        PREFILL,
        "const bool valid = row_offset >= 0 && group",
        "const bool valid = group",
        "scales of rows that do not exist",
        edge(P, 2),
        sanitize=True,
    ),
    Mutation(
        "N tail of the bias dropped",
        TILE,
        "!p.has_bias || row >= p.n",
        "!p.has_bias",
        "a bias past the last",
        edge(P, 4),
        sanitize=True,
    ),
    Mutation(
        "N tail of the store off by one",
        TILE,
        "token >= tile.z || column >= p.width(kGlu)",
        "token >= tile.z || column > p.width(kGlu)",
        "the first features of the next row overwritten",
        edge(P, 2),
        sanitize=True,
    ),
    Mutation(
        "rows of the store off by one",
        TILE,
        "token >= tile.z || column",
        "token > tile.z || column",
        "a row of the next tile overwritten",
        edge(P, 7),
    ),
    Mutation(
        "N tail of the zeros off by one",
        TILE,
        "if (column >= p.n) continue;",
        "if (column > p.n) continue;",
        "the first features of the next row zeroed",
        edge(plain(4, 32, "bf16", 16), 6),
    ),
    Mutation(
        "row table past the tile's end",
        PREFILL,
        "tile.z - 1);",
        "tile.z);",
        "an index read past the last row",
        edge(P, 2),
        sanitize=True,
    ),
    Mutation(
        "unused tiles computed",
        PREFILL,
        "  if (tile.z == 0) return;\n",
        "",
        "work for no rows, and reads of row -1",
        edge(P, 8),
        sanitize=True,
    ),
    Mutation(
        "blocks counted without padding",
        PREFILL,
        "(p.width(C::kGlu) + Block<C>::kColumns - 1)",
        "(p.n + Block<C>::kColumns - 1)",
        "tiles taken for others where the padded width has more blocks",
        edge(G, 1),
    ),
    Mutation(
        "pitch without padding",
        PREFILL,
        "static_cast<u32>(p.k_pad)",
        "static_cast<u32>(p.k)",
        "token rows taken for shorter than they are",
        edge(P, 2),
    ),
    # Which row, expert, group.
    Mutation(
        "weights of expert 0",
        PREFILL,
        "(expert_row + weight_row0) * row_bytes",
        "static_cast<i64>(weight_row0) * row_bytes",
        "the expert's offset lost",
        edge(P, 7),
    ),
    Mutation(
        "scales of expert 0",
        PREFILL,
        "(expert_row + scale_row) * (p.k",
        "static_cast<i64>(scale_row) * (p.k",
        "the expert's offset lost",
        edge(P, 7),
    ),
    Mutation(
        "bias of expert 0",
        TILE,
        "bias + static_cast<i64>(tile.x) * p.n + row",
        "bias + row",
        "the expert's offset lost",
        edge(P, 4),
    ),
    Mutation(
        "bias of the neighbour row",
        TILE,
        "weight_row(block_row(panel, half, lane / 4))",
        "weight_row(block_row(panel, half, lane / 4 ^ 1))",
        "a lane's row taken for another",
        edge(P, 4),
    ),
    Mutation(
        "bias dropped",
        TILE,
        "+ bias[panel][b % 2]; };",
        "+ 0 * bias[panel][b % 2]; };",
        "sums without their bias",
        edge(P, 4),
    ),
    Mutation(
        "has_bias ignored",
        TILE,
        "!p.has_bias || row >= p.n",
        "row >= p.n",
        "something else added where there is no bias",
        edge(P, 0),
    ),
    Mutation(
        "bias of the gate for both",
        TILE,
        "kGlu && panel == 1 ? p.bias_up : p.bias",
        "p.bias",
        "up gets the bias of gate",
        edge(G, 4),
    ),
    Mutation(
        "scale of the lane's neighbour group",
        PREFILL,
        "t * (C::kTileK / 4) / C::kGroup * C::kScalePitch",
        "(t ^ 2) * (C::kTileK / 4) / C::kGroup * C::kScalePitch",
        "quarters of a K block exchange their scales",
        edge(P, 0),
    ),
    Mutation(
        "a group in each K block",
        PREFILL,
        "kb * C::kTileK / C::kGroup + g",
        "kb * C::kGroups + g",
        "groups that span two K blocks counted twice",
        edge(plain(8, 128, "bf16", 16), 2),
    ),
    Mutation(
        "scales of the wrong slot",
        PREFILL,
        "store_scales((kb + 1) & 1,",
        "store_scales(kb & 1,",
        "the other slot of the double buffer",
        edge(P, 2),
    ),
    Mutation(
        "subnormal scales flushed",
        PREFILL,
        "make_uint2(scale[g] * 0x10001u,",
        "make_uint2((scale[g] & 0x7F80 ? scale[g] : 0) * 0x10001u,",
        "scales below the smallest normal number taken for zero",
        special(checks.subnormal_scales_count, P),
    ),
    Mutation(
        "scales of up one row late",
        PREFILL,
        "threadIdx.x >= kPanel",
        "threadIdx.x > kPanel",
        "the first row of up has the scales of gate",
        edge(G, 0),
    ),
    Mutation(
        "scale not doubled",
        PREFILL,
        "make_uint2(scale[g] * 0x10001u,",
        "make_uint2(scale[g],",
        "every other weight without its scale",
        edge(P, 0),
    ),
    Mutation(
        "x_div ignored",
        TILE,
        "ptx::load(row_ids + sorted) / x_div",
        "ptx::load(row_ids + sorted)",
        "a token's row taken for another",
        edge(P, 6),
        sanitize=True,
    ),
    Mutation(
        "scatter ignored",
        TILE,
        "!kGlu && p.scatter ? ptx::load(p.row_ids + sorted) : sorted",
        "sorted",
        "rows left in sorted order",
        edge(P, 5),
    ),
    Mutation(
        "scatter of zeros ignored",
        TILE,
        "row = p.scatter ? ptx::load(p.row_ids + sorted) : sorted",
        "row = sorted",
        "zeros in sorted order",
        edge(P, 6),
    ),
    Mutation(
        "no zeros",
        PREFILL,
        "tile.x == p.experts ? block.store_zeros() : block.run();",
        "if (tile.x != p.experts) block.run();",
        "rows whose id is out of range keep what was in memory",
        edge(P, 6),
    ),
    Mutation(
        "row table in another order",
        PREFILL,
        "i % C::kRowsPerThread * C::kRowStep + i / C::kRowsPerThread",
        "i",
        "a loading thread's rows mixed up",
        edge(P, 2),
    ),
    Mutation(
        "rounded before the bias",
        TILE,
        "return sum(panel, j, b % 2 * 2 + c) + bias[panel][b % 2];",
        "return T::to_float(static_cast<u16>(T::pack(sum(panel, j, b % 2 * 2 + c), 0.0f))) + bias[panel][b % 2];",
        "a sum rounded twice",
        special(checks.exact_in_integers, P),
    ),
    # Fragments.
    Mutation(
        "swizzle dropped by the writer",
        PREFILL,
        "(chunk ^ (r0 & 7)) * 16",
        "chunk * 16",
        "tokens not where ldmatrix looks",
        edge(P, 2),
    ),
    Mutation(
        "swizzle dropped by the reader",
        PREFILL,
        "((lane / 8 % 2) ^ (lane & 7)) * 16",
        "(lane / 8 % 2) * 16",
        "tokens not where they were put",
        edge(P, 2),
    ),
    Mutation(
        "xor of the step dropped", PREFILL, "(tokens ^ (step * 32))", "tokens", "every step reads the first", edge(P, 0)
    ),
    Mutation(
        "xor of the round dropped",
        PREFILL,
        "      tokens ^= (round ^ (round + 1)) * (C::kUnroll * 32);\n",
        "",
        "every round reads the first",
        edge(P, 0),
    ),
    Mutation(
        "words not advanced",
        PREFILL,
        "make_uint4(w.z, w.w, 0, 0)",
        "make_uint4(w.x, w.y, 0, 0)",
        "every round has the first words",
        edge(P, 0),
    ),
    Mutation(
        "halves of A exchanged",
        PREFILL,
        "a[panel][2 * u + half]",
        "a[panel][2 * half + u]",
        "registers of the MMA's A operand mixed up",
        edge(P, 0),
    ),
    Mutation(
        "halves of B exchanged",
        PREFILL,
        "T::mma(acc[panel][2 * j], a[panel], b.x, b.y)",
        "T::mma(acc[panel][2 * j], a[panel], b.y, b.x)",
        "registers of the MMA's B operand mixed up",
        edge(P, 0),
    ),
    Mutation(
        "movmatrix dropped",
        TILE,
        "ptx::movmatrix_trans(packed)",
        "packed",
        "two tokens of a row taken for two rows of a token",
        edge(P, 2),
    ),
    Mutation(
        "rows interleaved otherwise",
        TILE,
        "2 * kRun * (i / 2) + 2 * b + i % 2",
        "2 * kRun * (i / 2) + b + kRun * (i % 2)",
        "neighbours of a lane that are none in memory",
        edge(P, 0),
    ),
    Mutation(
        "half of the tokens stored",
        TILE,
        "if (j >= blocks) return;",
        "if (j >= blocks / 2) return;",
        "8-token blocks taken for 16-token ones",
        edge(P, 3),
    ),
    Mutation(
        "active rounded down",
        PREFILL,
        "while (16 * active < tile.z)",
        "while (32 * active <= tile.z)",
        "tokens past a power of two left out",
        edge(plain(4, 64, "bf16", 32), 2),
    ),
    Mutation(
        "loop of 32 tokens for 16",
        PREFILL,
        "multiply<C::kBlocksM == 1 ? 1 : 2>",
        "multiply<1>",
        "a short tile's second half left out",
        edge(plain(4, 64, "bf16", 64), 6),
    ),
    Mutation(
        "loop of 64 tokens for 32",
        PREFILL,
        "C::kBlocksM == 1 ? 1 : C::kBlocksM / 2>",
        "C::kBlocksM / 4>",
        "a short tile's second half left out",
        edge(plain(4, 64, "bf16", 128), 7),
    ),
    Mutation(
        "half of the tokens copied",
        PREFILL,
        "if (i * C::kRowStep >= tokens) return;",
        "if (2 * i * C::kRowStep >= tokens) return;",
        "a stage multiplied that was filled in part",
        edge(plain(4, 64, "bf16", 64), 2),
    ),
    # SwiGLU.
    Mutation(
        "gate and up exchanged",
        TILE,
        "swiglu(value(0, 0), value(1, 0)), swiglu(value(0, 1), value(1, 1))",
        "swiglu(value(1, 0), value(0, 0)), swiglu(value(1, 1), value(0, 1))",
        "silu(up) * gate",
        edge(G, 0),
    ),
    Mutation(
        "silu without its sigmoid",
        QUANT,
        "gate * ptx::rcp_approx(1.0f + ptx::exp2_approx(-1.4426950408889634f * gate)) * up",
        "gate * up",
        "a plain product",
        edge(G, 0),
    ),
    Mutation(
        "exp for exp2",
        QUANT,
        "exp2_approx(-1.4426950408889634f * gate)",
        "exp2_approx(-gate)",
        "2^-x for e^-x",
        edge(G, 0),
    ),
    Mutation(
        "hidden activations not permuted",
        TILE,
        "kGlu ? logical_k(n0 + r % kPanel, p.out_bits) : n0 + r",
        "kGlu ? n0 + r % kPanel : n0 + r",
        "features in an order that the down projection does not read",
        edge(G, 0),
    ),
    Mutation(
        "hidden activations permuted for the wrong bits",
        TILE,
        "logical_k(n0 + r % kPanel, p.out_bits)",
        "logical_k(n0 + r % kPanel, 12 - p.out_bits)",
        "gate and up of other bits than down",
        given(G, Case(20, 2, 128, 192, 4, Quantization(4, 64), down=Quantization(8, 64))),
    ),
    Mutation(
        "sigmoid that overflows",
        QUANT,
        "return gate * ptx::rcp_approx(1.0f + ptx::exp2_approx(-1.4426950408889634f * gate)) * up;",
        "const float e = ptx::exp2_approx(1.4426950408889634f * gate);\n"
        "  return gate * (e * ptx::rcp_approx(1.0f + e)) * up;",
        "e^x / (1 + e^x), which is NaN for large gates",
        special(checks.large_gates_saturate, G),
    ),
    # Routing.
    Mutation(
        "barrier of routing removed",
        ROUTE,
        "  __syncthreads();\n",
        "",
        "sums of warps that have not counted yet",
        routing(511, 16, "duplicates"),
    ),
    Mutation(
        "warp prefix dropped",
        ROUTE,
        "lane < warp ? other.y : 0",
        "lane < warp ? 0 * other.y : 0",
        "warps write to the same places",
        routing(511, 16, "duplicates"),
    ),
    Mutation(
        "lane prefix off by one",
        ROUTE,
        "(1u << lane) - 1",
        "(2u << lane) - 1",
        "a lane counts itself",
        routing(31, 16, "duplicates"),
    ),
    Mutation(
        "order reversed in a warp",
        ROUTE,
        "__popc(votes & ((1u << lane) - 1))",
        "__popc(votes >> lane) - 1",
        "a sort that is not stable",
        routing(31, 16, "duplicates"),
    ),
    Mutation(
        "rows past the end counted",
        ROUTE,
        "found[j] >= 0 && found[j] < expert",
        "found[j] < expert",
        "offsets too large",
        routing(31, 16, "duplicates"),
        sanitize=True,
    ),
    Mutation(
        "ids out of range not collected",
        ROUTE,
        "static_cast<int>(min(static_cast<u32>(ptx::load(ids + i)), static_cast<u32>(experts)))",
        "min(ptx::load(ids + i), experts)",
        "negative ids lost",
        routing(511, 16, "bad"),
    ),
    Mutation(
        "rest of the segments lost",
        ROUTE,
        "(rows + kThreads - 1) / kThreads * 32",
        "max(rows / kThreads, 1) * 32",
        "the last rows seen by no warp",
        routing(513, 16, "duplicates"),
    ),
    Mutation(
        "second batch of ids at the first place",
        ROUTE,
        ", i + 32 * j + lane);",
        ", begin + 32 * j + lane);",
        "rows beyond a warp's first 256 ids lost",
        routing(9000, 16, "duplicates"),
    ),
    Mutation(
        "only the first 512 tiles",
        ROUTE,
        "slot += kThreads)",
        "slot += 1 << 20)",
        "full tiles of a large expert never written",
        routing(9000, 16, "one"),
    ),
    Mutation(
        "full tiles rounded up",
        ROUTE,
        "full = count / tile_m",
        "full = (count + tile_m - 1) / tile_m",
        "a short tile written as full",
        routing(511, 16, "duplicates"),
    ),
    Mutation(
        "unused slot written as full",
        ROUTE,
        "i < full ? tile_m : 0",
        "tile_m",
        "rows of two experts in a tile",
        routing(511, 16, "duplicates"),
    ),
    Mutation(
        "unused slot not written",
        ROUTE,
        "slot < (offset + count) / tile_m",
        "slot < first + full",
        "a tile that holds what was in memory",
        routing(511, 16, "duplicates"),
    ),
    Mutation(
        "rest written as full",
        ROUTE,
        "count - full * tile_m, 0)",
        "tile_m, 0)",
        "rows of the next expert in a short tile",
        routing(511, 16, "duplicates"),
    ),
    Mutation(
        "rest at the first row",
        ROUTE,
        "offset + full * tile_m, count",
        "offset, count",
        "rows of a full tile twice, the rest never",
        routing(511, 16, "duplicates"),
    ),
    # The permutation of K, and dequantisation.
    Mutation(
        "permuted rows off by one",
        ROUTE,
        "if (row >= x_rows)",
        "if (row > x_rows)",
        "a row past the last",
        permutation(4, 160),
        sanitize=True,
    ),
    Mutation(
        "padding not zeroed",
        ROUTE,
        "(hi < k ? static_cast<u32>(ptx::load(in + hi)) << 16 : 0u)",
        "static_cast<u32>(ptx::load(in + hi)) << 16",
        "the next row in the padding: harmless to products until it holds a NaN",
        permutation(4, 160),
    ),
    Mutation(
        "padding with the next row's NaN",
        ROUTE,
        "(lo < k ? ptx::load(in + lo) : 0u)",
        "ptx::load(in + lo)",
        "a NaN that leaks into the token before",
        nan_in_a_row(),
    ),
    Mutation(
        "pair exchanged by the permutation",
        ROUTE,
        "(lo < k ? ptx::load(in + lo) : 0u) | (hi < k ? static_cast<u32>(ptx::load(in + hi)) << 16 : 0u)",
        "(hi < k ? ptx::load(in + hi) : 0u) | (lo < k ? static_cast<u32>(ptx::load(in + lo)) << 16 : 0u)",
        "h exchanged",
        permutation(4, 128),
    ),
    Mutation(
        "u and h exchanged, 4 bits",
        QUANT,
        "2 * (s % 2) + u + 4 * h",
        "2 * (s % 2) + h + 4 * u",
        "nibbles in another order than MLX's",
        edge(P, 0),
    ),
    Mutation(
        "u and h exchanged, 8 bits",
        QUANT,
        "4 * s + u + 2 * h",
        "4 * s + h + 2 * u",
        "bytes in another order than MLX's",
        edge(P8, 0),
    ),
    Mutation(
        "nibbles of the wrong step",
        QUANT,
        "2 * (s % 2) + u)",
        "2 * u + s % 2)",
        "steps and halves exchanged inside a word",
        edge(P, 0),
    ),
    Mutation(
        "neighbour word",
        QUANT,
        "kBits == 4 ? s / 2 : s;",
        "kBits == 4 ? (s / 2) ^ 1 : s;",
        "a lane's words exchanged",
        edge(P, 0),
    ),
    Mutation(
        "bf16 magic number off by one",
        QUANT,
        "0x3F803F80u, 0xC300C300u);  // - 128",
        "0x3F803F80u, 0xC301C301u);",
        "integers one too small",
        edge(P, 0),
    ),
    Mutation(
        "fp16 magic number of odd nibbles",
        QUANT,
        "0xD400D400u",
        "0xE400E400u",
        "1024 taken off where 64 was added",
        edge(P16, 0),
    ),
    Mutation(
        "int8 high bit ignored in bf16",
        QUANT,
        "(~v & 0x00800080u) * 0x86u",
        "0x00800080u * 0x86u",
        "weights from 128 on 128 too small",
        edge(P8, 0),
    ),
    Mutation(
        "bytes of a pair exchanged in fp16",
        QUANT,
        "i ? 0x4341u : 0x4240u",
        "i ? 0x4143u : 0x4042u",
        "selector that picks h the other way round",
        edge(P8_16, 0),
    ),
    Mutation(
        "scale and bias exchanged",
        QUANT,
        "T::fma2(q, scale2, bias2)",
        "T::fma2(q, bias2, scale2)",
        "q * bias + scale",
        edge(P, 0),
    ),
    Mutation(
        "weights rounded twice",
        QUANT,
        "return ptx::fma_bf16x2(a, b, c);",
        "return ptx::fma_bf16x2(ptx::fma_bf16x2(a, b, 0x80008000u), 0x3F803F80u, c);",
        "a product rounded before the bias is added",
        special(checks.one_hot_rows_show_the_weights, P),
    ),
    # Decode: the ring and the sums.
    Mutation(
        "warp barrier of the ring removed",
        DECODE,
        RING_BARRIER,
        "",
        "weights read before other lanes' copies have landed",
        matrix(D, *PARTS),
    ),
    Mutation(
        "ring waited for too laxly",
        DECODE,
        "ptx::cp_async_wait<C::kStages - 2>();",
        "ptx::cp_async_wait<C::kStages - 1>();",
        "one group of copies too many left under way",
        matrix(D, *PARTS),
    ),
    Mutation(
        "last copies not waited for",
        DECODE,
        "    ptx::cp_async_wait<0>();  // zeros, perhaps, that would land on the next rows' weights\n",
        "",
        "zeros that land on the weights of an expert's next rows",
        near(E, 4),
    ),
    Mutation(
        "place in the ring not advanced",
        DECODE,
        "      write = write + C::kStageBytes == end_of_ring ? ring() : write + C::kStageBytes;\n",
        "",
        "every pair of spans copied to one stage",
        matrix(D, *PARTS),
    ),
    Mutation(
        "pair in the ring not advanced",
        DECODE,
        "      read = read + C::kStageBytes == end_of_ring ? ring() : read + C::kStageBytes;\n",
        "",
        "every pair of spans read from one stage",
        matrix(D, *PARTS),
    ),
    Mutation(
        "weights not advanced",
        DECODE,
        "from[m] += kPair * kSpanBytes;",
        "{}",
        "the same spans of a row again and again",
        matrix(D, *PARTS),
    ),
    Mutation(
        "warp barrier before new scales removed",
        DECODE,
        "    __syncwarp();  // all have read the batch before\n",
        "",
        "scales overwritten while other lanes still read them",
        matrix(D, 1, 8, 2048, split=1),
    ),
    Mutation(
        "warp barrier before unaligned scales removed",
        DECODE,
        "    __syncwarp();  // all have read the batch before\n    if (whole_groups()) {\n",
        "    if (whole_groups()) {\n      __syncwarp();\n",
        "the same where a row's scales are read one by one",
        matrix(D, *LONG, split=1),
    ),
    Mutation(
        "barrier before the parts are added up removed",
        DECODE,
        "    multiply(count);\n    __syncthreads();\n",
        "    multiply(count);\n",
        "sums read before other warps have written them",
        matrix(D, *PARTS),
    ),
    Mutation(
        "barrier between passes removed",
        DECODE,
        "      if (first) __syncthreads();  // the sums have been read, and the rings may be filled again\n",
        "",
        "sums zeroed for the next rows while other warps still read them",
        near(E, 4),
    ),
    Mutation(
        "sums not zeroed",
        DECODE,
        "    set_zero();\n",
        "",
        "parts added to what was in memory",
        matrix(D, *ONE),
    ),
    Mutation(
        "sums kept after a part",
        DECODE,
        "          sums[t][j][c] = 0;\n",
        "",
        "a part counted again with the next",
        matrix(D, *LONG, split=1),
    ),
    # Decode: parts and tails.
    Mutation(
        "last part dropped",
        DECODE,
        "w < kParts; ++w",
        "w < kParts - 1; ++w",
        "a quarter of K left out",
        matrix(D, *PARTS),
    ),
    Mutation(
        "parts overlap",
        DECODE,
        ": min(begin + part, pairs);",
        ": min(begin + part + 1, pairs);",
        "the first spans of a part counted twice",
        matrix(D, *PARTS),
    ),
    Mutation(
        "parts added up from the last",
        DECODE,
        "sum_of(w, column, row)",
        "sum_of(kParts - 1 - w, column, row)",
        "bits that depend on how many warps share K",
        in_order(D),
    ),
    Mutation(
        "parts not kept apart",
        DECODE,
        "if (--in_part == 0 || pair + 1 == end) {",
        "if (--in_part < 0 || pair + 1 == end) {",
        "bits that depend on how many warps share K",
        in_order(D),
    ),
    Mutation(
        "first scales of another part",
        DECODE,
        "load_scales(begin * kPair, first_scales);",
        "load_scales(0, first_scales);",
        "every part begins with the scales of the first",
        matrix(D, *PARTS),
    ),
    Mutation(
        "K tail of the ring off by one",
        DECODE,
        "bytes_left > 0",
        "bytes_left >= 0",
        "16 bytes past the end of a weight row",
        matrix(D, *EDGE),
        sanitize=True,
    ),
    Mutation(
        "N tail of the ring off by one",
        DECODE,
        "+ i, p.n - 1);",
        "+ i, p.n);",
        "a weight row past the last",
        matrix(D, *EDGE),
        sanitize=True,
    ),
    Mutation(
        "K tail of x not clamped",
        DECODE,
        "first = min(k, p.k - C::kUnit),",
        "first = k,",
        "x past the end of its last row",
        matrix(D, *EDGE),
        sanitize=True,
    ),
    Mutation(
        "K tail of a span's second half of x not clamped",
        DECODE,
        "second = min(k + C::kUnit, p.k - C::kUnit);",
        "second = k + C::kUnit;",
        "x past the end of its last row",
        matrix(D32, 5, 16, 288),
        sanitize=True,
    ),
    Mutation(
        "K tail of aligned scales off by one",
        DECODE,
        "      if (group < p.k / C::kGroup) {",
        "      if (group <= p.k / C::kGroup) {",
        "scales past the end of a row",
        matrix(D, *PARTS),
        sanitize=True,
    ),
    Mutation(
        "biases past the end of K kept",
        DECODE,
        "inside ? bias : 0",
        "bias",
        "the sum of x past the end of K gets a bias",
        matrix(D, *TAILS),
    ),
    Mutation(
        "N tail of the sums off",
        DECODE,
        "own >= warp_rows() || n0 + feature >= p.n",
        "own >= warp_rows()",
        "the first features of the next row overwritten",
        matrix(D, *EDGE),
        sanitize=True,
    ),
    Mutation(
        "even shares: tiles of the next block stored",
        DECODE,
        "own >= warp_rows() || n0 + feature >= p.n",
        "n0 + feature >= p.n",
        "zeros in the features of a neighbour",
        matrix(D, *TAILS, split=EVEN),
    ),
    Mutation(
        "even shares: first tile off by one",
        DECODE,
        "n0 = static_cast<int>(16 * first)",
        "n0 = static_cast<int>(16 * first + 16)",
        "every block begins a tile late",
        matrix(D, *TAILS, split=EVEN),
    ),
    Mutation(
        "even shares: remainder lost",
        DECODE,
        "static_cast<int>((unit + 1) * all / units - first)",
        "static_cast<int>(all / units)",
        "tiles that no block has",
        matrix(D, *TAILS, split=EVEN),
    ),
    Mutation(
        "even shares: odd tiles two at a time",
        DECODE,
        " && (C::kRouted || tiles % 2 == 0)",
        "",
        "a tile multiplied that was not copied",
        matrix(D, *TAILS, split=EVEN),
    ),
    Mutation(
        "N tail of the zeros dropped",
        DECODE,
        "i < pairs && n0 + 2 * i < p.n;",
        "i < pairs;",
        "the features of the next rows zeroed",
        near(E, 10, split=1),
        sanitize=True,
    ),
    Mutation(
        "every warp has the first rows",
        DECODE,
        "return p.split == 1 ? warp : 0;",
        "return 0;",
        "warps that do not share K do the same",
        near(E, 2, split=1),
    ),
    # Decode: which row, which expert.
    Mutation(
        "rows beyond the eighth lost",
        DECODE,
        "((1u << lane) - 1)) - first;",
        "((1u << lane) - 1));",
        "every pass has an expert's first rows",
        near(E, 4),
    ),
    Mutation(
        "negative ids lost",
        DECODE,
        "static_cast<int>(min(static_cast<u32>(id), static_cast<u32>(p.experts)))",
        "min(id, p.experts)",
        "ids out of range that no block looks for",
        near(E, 6),
    ),
    Mutation(
        "ids beyond the last lost",
        DECODE,
        "static_cast<int>(min(static_cast<u32>(id), static_cast<u32>(p.experts)))",
        "id < 0 ? p.experts : id",
        "ids out of range that no block looks for",
        near(E, 6),
    ),
    Mutation(
        "ids read past the end",
        DECODE,
        "found[j] = row < p.rows ?",
        "found[j] = row <= p.rows ?",
        "an id past the last",
        near(E, 0),
        sanitize=True,
    ),
    Mutation(
        "rows past the end found",
        DECODE,
        "ptx::load(p.ids + row)) : -1;",
        "ptx::load(p.ids + row)) : 0;",
        "rows that do not exist, of the first expert",
        near(E, 5),
        sanitize=True,
    ),
    Mutation(
        "later passes taken for another row's",
        DECODE,
        "(first == 0 && p.rows <= p.experts && block.row_of(0) != slot)",
        "(p.rows <= p.experts && block.row_of(0) != slot)",
        "rows beyond the eighth lost where there are few",
        near(E, 9),
    ),
    Mutation(
        "one slot too few looked at",
        DECODE,
        "expert = p.rows <= p.experts ?",
        "expert = p.rows < p.experts ?",
        "as many rows as experts, and no block for the ids out of range",
        near(E, 10),
    ),
    Mutation(
        "ids of the pass before",
        DECODE,
        "if (begin || first) load_ids",
        "if (begin) load_ids",
        "the last ids that were loaded taken for the first",
        near(E, 11),
    ),
    Mutation(
        "only the first ids",
        DECODE,
        "begin < p.rows; begin += 32 * kIds",
        "begin < min(p.rows, 32 * kIds); begin += 32 * kIds",
        "rows beyond the first 256 never found",
        near(E, 11),
    ),
    Mutation(
        "x of another token",
        DECODE,
        "C::kRouted ? row / p.x_div : row",
        "row",
        "a token's row taken for another",
        near(E, 6),
        sanitize=True,
    ),
    Mutation(
        "columns without a row not repeated",
        DECODE,
        "x_of(min(8 * b + lane / 4, count - 1))",
        "x_of(8 * b + lane / 4)",
        "rows that were never listed",
        near(E, 0),
    ),
    Mutation(
        "decode: weights of expert 0",
        DECODE,
        "(static_cast<i64>(expert) * p.n + first_row) * row_bytes",
        "static_cast<i64>(first_row) * row_bytes",
        "the expert's offset lost",
        near(E, 4),
    ),
    Mutation(
        "decode: scales of expert 0",
        DECODE,
        "(static_cast<i64>(expert) * p.n + weight_row(t, row)) * (p.k",
        "static_cast<i64>(weight_row(t, row)) * (p.k",
        "the expert's offset lost",
        near(E, 4),
    ),
    Mutation(
        "decode: bias of expert 0",
        DECODE,
        "values + static_cast<i64>(expert) * p.n + n0 + feature",
        "values + n0 + feature",
        "the expert's offset lost",
        near(E, 4),
    ),
    Mutation(
        "decode: has_bias ignored",
        DECODE,
        "return p.has_bias ? T::to_float(ptx::ldg16(values + static_cast<i64>(expert) * p.n + n0 + feature)) : 0.0f;",
        "return T::to_float(ptx::ldg16(values + static_cast<i64>(expert) * p.n + n0 + feature));",
        "something else added where there is no bias",
        matrix(D, *ONE),
    ),
    Mutation(
        "decode: bias dropped",
        DECODE,
        "row + h) + bias(p.bias, feature + h);",
        "row + h);",
        "sums without their bias",
        matrix(D, *TAILS),
    ),
    # Decode: numbers.
    Mutation(
        "offset of the integers left in",
        DECODE,
        "bias - T::template kOffset<C::kBits> * scale",
        "bias",
        "128 too much in each weight",
        matrix(D, *ONE),
    ),
    Mutation(
        "scales of the rows 8 above",
        DECODE,
        "C::kScalePitch + half * 64);",
        "C::kScalePitch);",
        "half of a tile's rows with other rows' scales",
        matrix(D, *PARTS),
    ),
    Mutation(
        "second span with the first one's scales",
        DECODE,
        "i * C::kSpan / C::kGroup;",
        "0 * i;",
        "a group of scales used twice",
        matrix(D, *PARTS),
    ),
    Mutation(
        "a group of scales for each pair",
        DECODE,
        "in_batch % (C::kGroup / C::kSpan) == 0",
        "in_batch % kPair == 0",
        "groups longer than a pair of spans counted twice",
        matrix(D8_128, *PARTS),
    ),
    Mutation(
        "sum of x of the first group for both",
        DECODE,
        "T::mma(total[g][j], ones, b[g][s][j][0], b[g][s][j][1]);",
        "T::mma(total[g][j], ones, b[0][s][j][0], b[0][s][j][1]);",
        "offset and bias with the wrong sum of x",
        matrix(D32, 5, 136, 288),
    ),
    Mutation(
        "half of x left out of its sum",
        DECODE,
        "T::mma(total[g][j], ones, b[g][s][j][0], b[g][s][j][1]);",
        "T::mma(total[g][j], ones, b[g][s][j][0], 0);",
        "offset and bias with the wrong sum of x",
        matrix(D, *ONE),
    ),
    Mutation(
        "second x ahead not used",
        DECODE,
        "pair_up(tokens[i % C::kAhead], b);",
        "pair_up(tokens[0], b);",
        "weights and x of different spans",
        matrix(D, *PARTS),
    ),
    Mutation(
        "x one span ahead instead of two",
        DECODE,
        "(pair * kPair + i + C::kAhead) * C::kSpan",
        "(pair * kPair + i + 1) * C::kSpan",
        "weights and x of different spans",
        matrix(D, *PARTS),
    ),
    Mutation(
        "x of an 8-bit word mixed up",
        DECODE,
        "(word ? v.z : v.x)",
        "(word ? v.y : v.x)",
        "bytes multiplied with their neighbours' x",
        matrix(D8, *ONE),
    ),
    Mutation(
        "decode: nibbles of the wrong step",
        DECODE,
        "2 * e + i / 2",
        "e + 2 * (i / 2)",
        "steps and halves exchanged inside a word",
        matrix(D, *ONE),
    ),
    Mutation(
        "halves of a span of two groups mixed up",
        DECODE,
        "lane % 2 * 256 + lane / 4 * 16",
        "lane % 2 * 16 + lane / 4 * 32",
        "words of other rows",
        matrix(D32, 5, 136, 288),
    ),
    Mutation(
        "decode: features of a pair exchanged",
        DECODE,
        "T::pack(pair[0], pair[1])",
        "T::pack(pair[1], pair[0])",
        "neighbours exchanged",
        matrix(D, *ONE),
    ),
    Mutation(
        "decode: gate and up exchanged",
        DECODE,
        "return C::kGlu && t % 2;",
        "return C::kGlu && t % 2 == 0;",
        "silu(up) * gate",
        near(EG, 0),
    ),
    Mutation(
        "decode: bias of the gate for both",
        DECODE,
        "bias(p.bias_up, feature + h)",
        "bias(p.bias, feature + h)",
        "up gets the bias of gate",
        near(EG, 4),
    ),
    Mutation(
        "tiles of gate and up taken for one matrix",
        DECODE,
        "C::kGlu ? own / 16 * 32 + own % 16 : own",
        "own",
        "features of up among those of gate",
        near(EG, 0),
    ),
    Mutation(
        "x at any address taken for aligned",
        DECODE,
        "    if (reinterpret_cast<u64>(p.x) % 16) return run_slowly(count);\n",
        "",
        "loads that hardware refuses",
        matrix(D, *ONE, skip=2),
    ),
    Mutation(
        "step by step: nibbles exchanged",
        DECODE,
        ">> (k % 2 * 4) & 15",
        ">> ((1 - k % 2) * 4) & 15",
        "neighbouring weights exchanged",
        matrix(D, *ONE, skip=2),
    ),
    Mutation(
        "step by step: N tail dropped",
        DECODE,
        "      if (n0 + feature >= p.n) continue;\n      float value",
        "      float value",
        "weight rows past the last",
        matrix(D, *ONE, skip=2),
        sanitize=True,
    ),
    # The router.
    Mutation(
        "router: the higher index of equal logits",
        ROUTER,
        "ptx::redux_min(key == best_key ? expert : experts)",
        "ptx::redux_max(key == best_key ? expert : 0)",
        "another order of equal experts",
        router("softmax over all"),
    ),
    Mutation(
        "router: the higher index of equal logits of a lane",
        ROUTER,
        "if (keys[i] > key) key",
        "if (keys[i] >= key && keys[i]) key",
        "another order of equal experts",
        router("as many experts as fit"),
    ),
    Mutation(
        "router: a chosen expert stays",
        ROUTER,
        "      if (expert == lane + 32 * i) keys[i] = 0;\n",
        "      (void)expert;\n",
        "the best expert top_k times",
        router("softmax over all"),
    ),
    Mutation(
        "router: zeros of two kinds",
        ROUTER,
        "__float_as_uint(value + 0.0f)",
        "__float_as_uint(value)",
        "-0 smaller than 0",
        router("all the lanes"),
    ),
    Mutation(
        "router: NaN is nothing",
        ROUTER,
        ": 0xFFFFFFFFu;\n}",
        ": 0;\n}",
        "an expert that is not there",
        bad_logits(),
    ),
    Mutation(
        "router: experts past the last",
        ROUTER,
        "keys[i] = i < count ? order_key(values[i]) : 0;",
        "keys[i] = order_key(values[i]);",
        "ids out of range",
        router("all the lanes"),
    ),
    Mutation(
        "router: an expert too many",
        ROUTER,
        "(experts - lane + 31) / 32",
        "(experts - lane + 32) / 32",
        "logits past the last",
        router("all of them"),
        sanitize=True,
    ),
    Mutation(
        "router: a token too many",
        ROUTER,
        "  if (token >= tokens) return;\n",
        "",
        "a warp without a token",
        router("softmax over all"),
        sanitize=True,
    ),
    Mutation(
        "router: the largest logit of a lane",
        ROUTER,
        "value_of(ptx::redux_max(largest_key))",
        "value_of(largest_key)",
        "parts of different wholes",
        router("softmax over all"),
    ),
    Mutation(
        "router: half a warp added up",
        ROUTER,
        "for (int i = 16; i > 0; i /= 2) v +=",
        "for (int i = 8; i > 0; i /= 2) v +=",
        "a sum without the other half",
        router("softmax over all"),
    ),
    Mutation(
        "router: the other sum",
        ROUTER,
        "normalise ? sum",
        "!normalise ? sum",
        "a softmax over the top-k for one over all",
        router("softmax over all"),
    ),
    Mutation(
        "router: eps forgotten",
        ROUTER,
        "sum + __uint_as_float(eps) * whole",
        "sum",
        "a denominator without it",
        router("softmax with a bias, normalised"),
    ),
    Mutation(
        "router: eps of a sigmoid",
        ROUTER,
        "__uint_as_float(eps) * whole",
        "__uint_as_float(eps)",
        "an eps beside powers instead of scores",
        router("softmax with a bias, normalised"),
    ),
    Mutation(
        "router: scale forgotten",
        ROUTER,
        "share * __uint_as_float(scale)",
        "share",
        "weights as they are normalised",
        router("sigmoid"),
    ),
    Mutation(
        "router: weights of another token",
        ROUTER,
        "bits_at(logits, MOE_LOGITS, row + chosen)",
        "bits_at(logits, MOE_LOGITS, chosen)",
        "the logits of the first token",
        router("many tokens"),
    ),
    Mutation(
        "router: sigmoid upside down",
        ROUTER,
        "sign = softmax ? 1 : -1",
        "sign = 1",
        "1 - sigmoid",
        router("sigmoid"),
    ),
    Mutation(
        "router: bias forgotten",
        ROUTER,
        "order_key(score + biases[i])",
        "order_key(score)",
        "a choice by scores",
        router("sigmoid with a bias"),
    ),
    Mutation(
        "router: bias read as logits are",
        ROUTER,
        "load_numbers(biases, bias, bias_kind",
        "load_numbers(biases, bias, MOE_LOGITS",
        "numbers of another format",
        router("sigmoid with a bias"),
    ),
    Mutation(
        "router: one format of 16 bits",
        ROUTER,
        "kind == kBf16 ?",
        "kind != kNone ?",
        "fp16 taken for bf16",
        router("softmax with a bias, normalised"),
    ),
    Mutation(
        "router: groups by logits",
        ROUTER,
        "bias_kind != kNone || best > 1",
        "bias_kind != kNone",
        "sums of logits instead of scores",
        router("groups without a bias"),
    ),
    Mutation(
        "router: no limit",
        ROUTER,
        "if (groups > 1) limit_groups",
        "if (groups > 64) limit_groups",
        "experts of all groups",
        router("groups"),
    ),
    Mutation(
        "router: the best two for one",
        ROUTER,
        "if (best == 1) return",
        "if (best == 0) return",
        "groups by a sum",
        router("groups by their best"),
    ),
    Mutation(
        "router: the second best of a lane",
        ROUTER,
        "ptx::redux_max(taken ? second : first)",
        "ptx::redux_max(taken ? second : second)",
        "a second best that is another lane's first",
        router("groups"),
    ),
    Mutation(
        "router: equal experts of a group",
        ROUTER,
        "holders << (31 - lane) == 0x80000000u",
        "holders",
        "the second of two equal experts forgotten",
        router("groups without a bias"),
    ),
    Mutation(
        "router: an expert of the next group",
        ROUTER,
        "- begin < size ? keys[i]",
        "- begin <= size ? keys[i]",
        "a group too large",
        router("groups"),
    ),
    Mutation(
        "router: a group too many",
        ROUTER,
        "n < top_groups; ++n",
        "n <= top_groups; ++n",
        "the best of the others kept",
        router("groups"),
    ),
    Mutation(
        "router: the last of equal groups",
        ROUTER,
        "ptx::redux_min(mine == largest ? lane : 32)",
        "ptx::redux_max(mine == largest ? lane : 0)",
        "another order of equal groups",
        router("groups without a bias"),
    ),
    Mutation(
        "router: groups all dropped to nothing",
        ROUTER,
        "top_groups, best, order_key(__uint_as_float(dropped))",
        "top_groups, best, 1u",
        "experts of other groups below negative choices, which are above",
        router("groups of two"),
    ),
    Mutation(
        "router: groups all dropped to 0",
        ROUTER,
        "top_groups, best, order_key(__uint_as_float(dropped))",
        "top_groups, best, order_key(0)",
        "experts of other groups above negative choices",
        router("more than the groups have"),
    ),
    Mutation(
        "router: the winners dropped",
        ROUTER,
        "mine != 0);",
        "mine == 0);",
        "the wrong groups",
        router("groups"),
    ),
    Mutation(
        "router: counters as they were",
        ROUTER,
        "i < n_counters;",
        "i < n_counters - 1;",
        "a strip that nobody combines",
        block(),
    ),
    Mutation(
        "router: four experts of a lane",
        ROUTER,
        "32 * i >= experts;",
        "32 * i >= min(experts, 128);",
        "loops left too early",
        router("groups"),
    ),
    # The Hopper kernel.
    Mutation(
        "Hopper: x announced before it has landed",
        HOPPER,
        "    ptx::cp_async_wait<kPending>();\n",
        "",
        "a full barrier that covers copies under way",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: no fence between copies and wgmma",
        HOPPER,
        "    ptx::fence_proxy_async();\n",
        "",
        "copies that the asynchronous proxy need not see",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: x announced by one warp",
        HOPPER,
        "ptx::mbarrier_init(full(s), kLoaders / 32);",
        "ptx::mbarrier_init(full(s), 1);",
        "a full barrier that waits for one of four warps",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: x not waited for",
        HOPPER,
        "      ptx::mbarrier_wait(barriers.full(stream.tokens.stage), stream.tokens.parity);\n",
        "",
        "a stage of x read before it is full",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: x refilled at once",
        HOPPER,
        "        ptx::mbarrier_wait(barriers.empty(turn.stage), turn.parity ^ 1);\n",
        "",
        "a stage of x refilled while wgmma reads it",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: parity of the empty barriers",
        HOPPER,
        "turn.parity ^ 1);",
        "turn.parity);",
        "a loader that waits for a stage which nobody has filled",
        edge(W, 0),
    ),
    Mutation(
        "Hopper: parity not flipped",
        HOPPER,
        "stage = 0, parity ^= 1;",
        "stage = 0;",
        "a second turn that takes the first one's phase for its own",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: x released by one warp",
        HOPPER,
        "ptx::mbarrier_init(empty(s), kWarps);",
        "ptx::mbarrier_init(empty(s), 1);",
        "a stage refilled when the first of eight warps is done",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: x released before it is read",
        HOPPER,
        "barriers.empty(before));  // and its x, if",
        "barriers.empty(stream.tokens.stage));  // and its x, if",
        "the stage in use released, not the one before",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: last x never announced",
        HOPPER,
        "    if (before >= 0) publish<0>(before);\n",
        "",
        "the last stage's copies left under way",
        edge(W, 0),
    ),
    Mutation(
        "Hopper: last x never released",
        HOPPER,
        "    if (lane == 0) ptx::mbarrier_arrive(barriers.empty(before));\n",
        "",
        "a unit's last stage held for ever",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: x released too early",
        HOPPER,
        "ptx::wgmma_wait<1>();",
        "ptx::wgmma_wait<2>();",
        "a stage released while a step before may read it",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: sums read before wgmma ends",
        HOPPER,
        "    ptx::wgmma_wait<0>();\n",
        "",
        "accumulators stored before they are complete",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: weights of the ring too early",
        HOPPER,
        "ahead == C::kRing - 1 ? ptx::cp_async_wait<C::kRing - 2>() : ptx::cp_async_wait<0>();",
        "ptx::cp_async_wait<C::kRing - 1>();",
        "a wait that leaves the weights of this K block under way",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: short K waited for as a long one",
        HOPPER,
        "ahead == C::kRing - 1 ? ptx::cp_async_wait<C::kRing - 2>() : ptx::cp_async_wait<0>();",
        "ptx::cp_async_wait<C::kRing - 2>();",
        "fewer copies under way than the wait allows for",
        edge(W, 0),
    ),
    Mutation(
        "Hopper: next unit's weights from its start",
        HOPPER,
        "ends ? kb + ahead - k_blocks : kb + ahead",
        "ends ? 0 : kb + ahead",
        "K blocks of the next unit fetched twice",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: this unit's weights for the next",
        HOPPER,
        "fetch(ends ? next : rows,",
        "fetch(rows,",
        "the next unit begun with this one's rows",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: scales of the K block before",
        HOPPER,
        "last ? 0 : kb + 1",
        "last ? 0 : kb",
        "scales one K block late",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: scales of this unit for the next",
        HOPPER,
        "load_scales(last ? next : rows,",
        "load_scales(rows,",
        "the next unit begun with this one's scales",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: second panel of x never read",
        HOPPER,
        "step / 4 * C::kPanelTokens + step % 4 * 32",
        "step % 4 * 32",
        "a descriptor that stays in the first 128 bytes",
        edge(W, 0),
    ),
    Mutation(
        "Hopper: x not swizzled",
        HOPPER,
        "(chunk % 8 ^ r0 % 8) * 16",
        "chunk % 8 * 16",
        "another order of x in shared memory than the descriptor's",
        edge(W, 2),
    ),
    Mutation(
        "Hopper: panels of x exchanged",
        HOPPER,
        "chunk / 8 * C::kPanelTokens",
        "(1 - chunk / 8) * C::kPanelTokens",
        "the halves of a K block in each other's place",
        edge(W, 0),
    ),
    Mutation(
        "Hopper: 33 tokens taken for 32",
        HOPPER,
        "tile.z > 32 ? 64",
        "tile.z > 33 ? 64",
        "wgmmas too narrow for a tile's last row",
        given(W, Case(33, 1, 128, 256, 2, Quantization(4, 64), "bf16", ids="one")),
    ),
    Mutation(
        "Hopper: a unit left out",
        HOPPER,
        "unit.number + static_cast<int>(gridDim.x)",
        "unit.number + 2 * static_cast<int>(gridDim.x)",
        "every second unit of a block never done",
        edge(W, 5),
    ),
    Mutation(
        "Hopper: units too near each other",
        HOPPER,
        "u % n_blocks * Base::kColumns",
        "u % n_blocks * Base::kPanel",
        "weight rows done twice, and others not at all",
        given(W, Case(5, 1, 64, 512, 1, Quantization(4, 64), "bf16")),
    ),
    Mutation(
        "Hopper: rows of no expert left alone",
        HOPPER,
        "      skip(tile, n0);\n",
        "",
        "ids out of range without their zeros",
        edge(W, 6),
    ),
    Mutation(
        "Hopper: tokens past the end of a tile",
        HOPPER,
        "min(r0 + i * kRowStep, unit.tile.z - 1)",
        "(r0 + i * kRowStep)",
        "row ids read past their end",
        edge(W, 2),
        sanitize=True,
    ),
    Mutation(
        "Hopper: weight rows past the end",
        HOPPER,
        "byte < row_bytes && distance < rows.left",
        "byte < row_bytes",
        "weights read past the last expert's",
        edge(W, 2),
        sanitize=True,
    ),
    Mutation(
        "Hopper: K past the end of a weight row",
        HOPPER,
        "byte < row_bytes && distance < rows.left",
        "distance < rows.left",
        "weights read past the last row",
        given(W, Case(5, 1, 64, 64, 1, Quantization(4, 64), "bf16")),
        sanitize=True,
    ),
    Mutation(
        "Hopper: scales past the last group",
        HOPPER,
        "group < groups && distance < rows.left",
        "distance < rows.left",
        "scales of the next row, or past the last",
        given(W, Case(5, 1, 64, 64, 1, Quantization(4, 64), "bf16")),
        sanitize=True,
    ),
    Mutation(
        "Hopper: scales of one group for all lanes",
        HOPPER,
        "lane % 4 * (C::kTileK / 4)) / C::kGroup",
        "0) / C::kGroup",
        "lanes whose elements lie in another group",
        given(W32, Case(5, 1, 256, 128, 2, Quantization(4, 32), "bf16")),
    ),
    Mutation(
        "Hopper: GLU: rows of the other half",
        HOPPER,
        "half * (p.out_bits == 4 ? 32 : 16)",
        "half * 16",
        "permuted rows taken for others",
        edge(WG, 2),
    ),
    Mutation(
        "Hopper: GLU: gate for both",
        HOPPER,
        "(C::kGlu && panel ? p.w_up : p.w)",
        "p.w",
        "up projected with the weights of the gate",
        edge(WG, 2),
    ),
    Mutation(
        "Hopper: GLU: scales of the gate for both",
        HOPPER,
        "(C::kGlu && panel ? p.scales_up : p.scales)",
        "p.scales",
        "up dequantised with the gate's scales",
        edge(WG, 2),
    ),
]


# ---- planting and catching -------------------------------------------------------------------------------------------


def plant(mutation: Mutation) -> dict[str, str]:
    """The kernel sources with one fault. ValueError if the table no longer fits them."""
    text = jit.sources()[mutation.file]
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name!r}: what it changes occurs {text.count(mutation.old)} times in {mutation.file}"
        )
    return {**jit.sources(), mutation.file: text.replace(mutation.old, mutation.new)}


def reads(variant: Variant, file: str) -> bool:
    """Whether a variant's source is a file or includes it. What the prefill kernels share, no other includes."""
    return file in (variant.source, QUANT) or (file == TILE and isinstance(variant, Prefill))


def seen_by(variant: Variant, mutation: Mutation | None) -> dict[str, str]:
    """The sources that a variant is built of: faulty ones only where it includes the faulty file."""
    return plant(mutation) if mutation and reads(variant, mutation.file) else jit.sources()


def prepare(mutations: Iterable[Mutation]) -> None:
    """Builds what the mutations need, with the fault and without, side by side. Raises if a fault does not compile."""
    wanted = [
        (variant, seen_by(variant, planted), mutation.sanitize)
        for mutation in mutations
        for variant in mutation.probe.variants
        for planted in (mutation, None)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda w: build(*w), wanted))


def complaint(probe: Probe, sanitize: bool = False, mutation: Mutation | None = None) -> str | None:
    """What is wrong with the kernels as a probe sees them, None if nothing."""
    results: list[mx.array] = []
    for seed, late in RUNS:

        def launch(variant: Variant, *args, seed: int = seed, late: bool = late, **kwargs) -> list[mx.array]:
            emulator = Emulator(seed, late, sanitize, seen_by(variant, mutation), skip=probe.skip)
            return emulator.launch(variant, *args, **kwargs)

        try:
            # So few multiprocessors that blocks which share the work have several units of it.
            with mock.patch.object(ops, "launch", launch), mock.patch.object(device, "multiprocessors", lambda: 2):
                result = probe.check()
        except Fault as fault:
            return describe(str(fault))
        except AssertionError:
            return "wrong result"
        if result is not None:
            results.append(array(result))
            if (results[0] != results[-1]).any():
                return "results depend on the schedule"
    return None


def describe(fault: str) -> str:
    """The emulator's or a sanitizer's finding, without where."""
    for pattern in (r"AddressSanitizer: [\w-]+", r"runtime error: [^\n]*", r"thread \d+: ([^\n]*)"):
        if found := re.search(pattern, fault):
            return found[found.lastindex or 0]
    return "crash"


def table(found: dict[str, str | None]) -> str:
    """Markdown: every fault, where it is shown, what gave it away."""
    lines = ["| fault | what it models | shown by | given away by |", "|:--|:--|:--|:--|"]
    for m in MUTATIONS:
        lines.append(f"| {m.name} | {m.models} | {m.probe.label} | {found[m.name] or '**missed**'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a fault is missed")
    parser.add_argument("--only", metavar="NAME", help="one fault; writes nothing")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if args.only in (None, m.name)]
    if not chosen:
        sys.exit(f"error: no fault is called {args.only!r}")

    prepare(chosen)
    for probe, sanitize in {m.probe.label + str(m.sanitize): (m.probe, m.sanitize) for m in chosen}.values():
        if wrong := complaint(probe, sanitize):
            sys.exit(f"error: the kernels as they are: {probe.label}: {wrong}")
    found: dict[str, str | None] = {}
    for m in chosen:
        start = time.perf_counter()
        found[m.name] = complaint(m.probe, m.sanitize, m)
        print(f"{time.perf_counter() - start:5.2f} s  {m.name}: {found[m.name] or 'MISSED'}", flush=True)
    missed = [name for name, how in found.items() if how is None]
    print(f"{len(found) - len(missed)} of {len(found)} caught")
    if not (args.check or args.only):
        page = PAGE.read_text()
        block = re.compile(r"(?<=<!-- mutations -->\n).*(?=<!-- /mutations -->)", re.S)
        PAGE.write_text(block.sub(lambda _: table(found) + "\n", page))
    if missed:
        sys.exit(f"error: missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
