"""The table of kernels, and the permutation of K that Python and the kernels must agree on."""

import math
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_moe_fast import dispatch, envs, ops, variants
from mlx_moe_fast.dispatch import choose, choose_dense
from mlx_moe_fast.problem import Projection, Quantization
from mlx_moe_fast.variants import (
    BITS,
    DENSE_STRIPS,
    DTYPES,
    EXPERT_STRIP,
    GROUP_SIZES,
    TILES,
    WARPS,
    WGMMA,
    WGMMA_ARCH,
    Decode,
    Prefill,
    Route,
    Strip,
    all_variants,
    k_block,
    logical_k,
    padded,
    physical_k,
)

PREFILLS = [v for v in all_variants() if isinstance(v, Prefill)]
DECODES = [v for v in all_variants() if isinstance(v, Decode)]
bits_only = pytest.mark.parametrize("bits", BITS)


def test_ids_are_unique_and_can_name_a_kernel_and_a_file():
    ids = [v.id for v in all_variants()]
    # A format has each tile, plain and GLU, the same of wgmma and of the decode kernel, and a dense kernel a strip.
    a_format = 2 * len(TILES) + 2 + 2 + len(DENSE_STRIPS)
    others = 2 + len(BITS) + len(DTYPES) + 1  # probe, stamp, route, router
    assert len(set(ids)) == len(ids) == others + len(BITS) * len(GROUP_SIZES) * len(DTYPES) * a_format
    assert all(re.fullmatch("[a-z][a-z0-9_]*", i) for i in ids)


def test_defines_tell_variants_apart():
    assert len({tuple(v.defines.items()) for v in all_variants()}) == len(all_variants())


@pytest.mark.parametrize("variant", PREFILLS + DECODES, ids=lambda v: v.id)
def test_shared_memory_fits_the_smallest_cards(variant):
    # A block's on sm_86, sm_89, sm_120, sm_121; on sm_90.
    assert variant.shared_bytes <= (99 if variant in all_variants("sm_80") else 227) * 1024


def test_only_wgmma_needs_an_architecture():
    others = set(all_variants()) - set(all_variants("sm_80"))
    assert others == {v for v in PREFILLS if v.tile is WGMMA} and all_variants(WGMMA_ARCH) == all_variants()


@pytest.mark.parametrize("threshold, forced, arch, there", [
    (math.inf, "", WGMMA_ARCH, False), (90, "", WGMMA_ARCH, True), (90, "", "sm_80", False),
    (math.inf, "wgmma", WGMMA_ARCH, True), (math.inf, "wgmma", "sm_80", False), (math.inf, "16", WGMMA_ARCH, False),
])  # fmt: skip
def test_wgmma_is_compiled_where_it_may_be_launched(monkeypatch, threshold, forced, arch, there):
    monkeypatch.setattr(dispatch, "WGMMA_ROWS_PER_EXPERT", threshold)
    monkeypatch.setenv(envs.TILE.name, forced)
    assert (WGMMA in dispatch.tiles(arch)) == there


def test_shared_memory_of_one_variant_by_hand():
    # Two stages of 128 weight rows of 64 bytes and 16 tokens of 128 values; two slots of scales; row table.
    variant = Prefill(Quantization(4, 128), "bf16", False, variants.Tile(16, 2, 1, 8))
    assert variant.shared_bytes == 2 * (128 * 64 + 16 * 256) + 2 * 130 * 8 + 16 * 4


@pytest.mark.parametrize("bits, expected", [(4, 4 * (128 * 256 + 8 * 2048 + 16)), (8, 6 * (128 * 128 + 8 * 2048 + 16))])
def test_shared_memory_of_a_wgmma_variant_by_hand(bits, expected):
    # Stages of 128 tokens, of eight warps' 32 weight rows of 64 bytes, and of two barriers.
    assert Prefill(Quantization(bits, 64), "bf16", True, WGMMA).shared_bytes == expected


def test_shared_memory_of_a_decode_variant_by_hand():
    # Each of four warps: two stages of two tiles of 16 rows, two spans of 32 bytes each; of each tile, for 16 spans of
    # two groups, 72 bytes of scales; sums of 8 columns; a row table, which one matrix has not.
    variant = Decode(Quantization(4, 32), "bf16", "plain", Strip(8, 2, 2, 1))
    assert variant.shared_bytes == 4 * (2 * 2 * 2 * 16 * 32 + 2 * 16 * 2 * 72 + 8 * (16 * 2 + 4) * 4 + 8 * 4)
    dense = Decode(Quantization(4, 32), "bf16", "dense", Strip(8, 2, 2, 1))
    assert dense.shared_bytes == variant.shared_bytes - 4 * 8 * 4


@pytest.mark.parametrize("strip", {EXPERT_STRIP, *DENSE_STRIPS.values()}, ids=str)
@pytest.mark.parametrize("kind", ["dense", "plain", "glu"])
def test_a_decode_block_has_the_more_features_the_fewer_warps_share_k(strip, kind):
    variant = Decode(Quantization(4, 64), "bf16", kind, strip)
    a_warp = 16 * strip.tiles // (2 if kind == "glu" else 1)
    assert variant.features(WARPS) == a_warp and variant.features(1) == WARPS * a_warp
    assert strip.columns % 8 == 0 and strip.tiles % 2 == 0 and strip.stages >= 2


def test_a_dense_layer_needs_each_strip():
    projection = Projection(1, 128, 256, Quantization(4, 64), "bf16")
    needed = variants.needed_dense(projection)
    assert [v.strip.columns for v in needed] == [8, 16, 32] and {v.kind for v in needed} == {"dense"}
    assert set(needed) <= set(all_variants())
    assert {variants.dense(projection, choose_dense(rows, projection).shape) for rows in range(1, 33)} == set(needed)


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("arch, from_rows", [("sm_80", 30), (WGMMA_ARCH, 100), (WGMMA_ARCH, math.inf)])
def test_what_is_dispatched_is_what_was_compiled(monkeypatch, glu, arch, from_rows):
    monkeypatch.setattr(dispatch, "WGMMA_ROWS_PER_EXPERT", from_rows)
    dispatch._choose.cache_clear()
    projection = Projection(32, 128, 256, Quantization(4, 64), "bf16")
    needed = variants.needed(projection, glu, dispatch.tiles(arch))
    chosen = {variants.of(projection, glu, choose(rows, projection, glu, arch).shape) for rows in range(1, 4000)}
    assert chosen == set(needed) - {Route(4)}
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("tile", TILES.values(), ids=lambda t: f"m{t.m}")
def test_a_tile_has_a_pipeline_and_halves_down_to_16_tokens(tile):
    assert tile.stages >= 2  # one is read while another is filled
    assert 16 <= tile.m and tile.m & (tile.m - 1) == 0


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("dtype", variants.DTYPES)
def test_what_a_layer_needs_is_declared(bits, group, dtype, glu):
    projection = Projection(8, 128, 256, Quantization(bits, group), dtype)
    needed = ops.variants_of([projection, projection], glu)
    assert set(needed) <= set(all_variants())
    assert len(needed) == len(set(needed)) == 1 + (1 + len(TILES)) * (2 if glu else 1)  # GLU: plain for down


@bits_only
def test_logical_k_permutes_each_block_in_itself(bits):
    size = k_block(bits)
    for block in (0, 1, 5):
        inside = range(block * size, (block + 1) * size)
        assert sorted(logical_k(p, bits) for p in inside) == list(inside)


@bits_only
def test_physical_k_is_the_inverse(bits):
    for k in range(2 * k_block(bits)):
        assert logical_k(physical_k(k, bits), bits) == k


def pack(integers, bits):
    """MLX's packing: element k in bits [bits * (k % pack), ...) of word k / pack."""
    pack = 32 // bits
    shifts = np.arange(pack, dtype=np.uint32) * np.uint32(bits)
    words = integers.astype(np.uint32).reshape(*integers.shape[:-1], -1, pack) << shifts
    return np.bitwise_or.reduce(words, axis=-1)


@bits_only
def test_pack_is_mlx_layout(bits):
    integers = np.random.default_rng(0).integers(0, 2**bits, (2, 256))
    ones = mx.ones((2, 256 // 64))
    found = mx.dequantize(mx.array(pack(integers, bits)), ones, mx.zeros_like(ones), group_size=64, bits=bits)
    assert np.array_equal(np.array(found), integers)


def fragment(words, bits, s, u):
    """What `dequantize` in kernels/quant.cuh takes from a lane's four words for an MMA step: h = 0 and 1."""
    if bits == 4:
        pair = int(words[s // 2]) >> 4 * (2 * (s % 2) + u) & 0x000F000F
    else:
        pair = int(words[s]) >> 8 * u & 0x00FF00FF
    return pair & 0xFFFF, pair >> 16


@bits_only
def test_a_lane_finds_the_elements_of_its_fragment_in_its_own_quarter(bits):
    size = k_block(bits)
    # Row 0 holds the low digit of every k and row 1 the high one: what is extracted spells the element.
    digits = [np.arange(size) >> shift & (2**bits - 1) for shift in (0, bits)]
    rows = [pack(d, bits) for d in digits]
    for t in range(4):
        quarters = [row[4 * t : 4 * t + 4] for row in rows]  # 16 bytes
        for s in range(size // 16):
            for u in range(2):
                low, high = (fragment(quarter, bits, s, u) for quarter in quarters)
                for h in range(2):
                    p = 16 * s + 8 * u + 2 * t + h
                    assert low[h] + (high[h] << bits) == logical_k(p, bits), (t, s, u, h)


@pytest.mark.parametrize("group", GROUP_SIZES)
@bits_only
def test_a_lane_needs_one_scale_a_row_and_block(bits, group):
    size = k_block(bits)
    for p in range(size):
        t = p // 2 % 4
        assert logical_k(p, bits) // group == t * (size // 4) // group  # the kernel's index of the scale


@bits_only
def test_a_piece_of_16_bytes_is_inside_a_row_or_outside(bits):
    # K may end anywhere in a block at a multiple of 32: cp.async fills whole pieces past it with zeros.
    piece = 16 * 8 // bits
    for k in range(32, 2 * k_block(bits) + 1, 32):
        assert k % piece == 0
        width = padded(k, bits)
        assert k <= width < k + k_block(bits) and width % k_block(bits) == 0
        assert sum(logical_k(p, bits) < k for p in range(width)) == k  # x keeps every element


@bits_only
def test_in_glu_a_threads_second_piece_is_eight_weight_rows_on(bits):
    # What load_weights in kernels/prefill_sm80.cu steps by: shared rows p and p + 32 of a panel of 64.
    for n0 in range(0, 256, 64):
        for p in range(n0, n0 + 32):
            assert logical_k(p + 32, bits) == logical_k(p, bits) + 8
