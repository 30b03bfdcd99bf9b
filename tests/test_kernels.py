"""Every kernel variant on a GPU, forced, against NumPy; outputs hold garbage before each launch."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from cases import Case
from checks import (
    Q4,
    ROUTERS,
    bad_values_stay_in_their_row,
    batch_does_not_change_a_row,
    block_is_its_parts,
    exact_in_integers,
    large_gates_saturate,
    neighbours_do_not_change_a_row,
    one_hot_rows_show_the_weights,
    permutation_is_the_formula,
    router_bears_bad_logits,
    router_is_the_formula,
    router_sees_small_differences,
    routing_is_a_stable_sort,
    run,
    run_plain,
    run_variant,
    subnormal_scales_count,
)
from numerics import array, check, grouped, moe_glu, rel_rms

from mlx_moe_fast import device, launch, ops, variants
from mlx_moe_fast.dispatch import Choice
from mlx_moe_fast.problem import Projection, Quantization
from mlx_moe_fast.variants import EXPERT_STRIP, TILES, WGMMA, WGMMA_ARCH, Decode, Prefill, Tile, WgmmaTile

pytestmark = pytest.mark.gpu
PREFILLS = [v for v in variants.all_variants(device.arch()) if isinstance(v, Prefill)]
DECODES = [v for v in variants.all_variants() if isinstance(v, Decode)]
ON_HOPPER = pytest.mark.skipif(device.arch() != WGMMA_ARCH, reason="needs wgmma")
WGMMA_IF_THERE = pytest.param(WGMMA, marks=ON_HOPPER, id="wgmma")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Whatever a kernel does not write is a large number, as an index and as a value."""
    monkeypatch.setattr(launch, "poison", 2147483520.0)


@pytest.mark.parametrize("variant", PREFILLS + DECODES, ids=lambda v: v.id)
def test_variant(variant: Prefill | Decode):
    run_variant(variant)


@pytest.mark.parametrize("dtype", variants.DTYPES)
def test_batch_does_not_change_a_row(dtype):
    batch_does_not_change_a_row(dtype)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", ops.NUMBERS)
def test_router(dtype, name):
    router_is_the_formula(dtype, name)


@pytest.mark.parametrize("dtype", ops.NUMBERS)
def test_bad_logits(dtype):
    router_bears_bad_logits(dtype)
    router_sees_small_differences()


@pytest.mark.parametrize("bits_down", [None, 8])
@pytest.mark.parametrize(
    "quantization", [Quantization(b, g) for b in variants.BITS for g in variants.GROUP_SIZES], ids=str
)
@pytest.mark.parametrize("dtype", variants.DTYPES)
def test_block(quantization, dtype, bits_down):
    block_is_its_parts(quantization, dtype, bits_down)


@pytest.mark.parametrize("rows", [1, 5, 90])  # dense and experts, decode and prefill
def test_x_may_begin_anywhere(rows):
    x, ids, gate, up, down = Case(rows, 2, 256, 192, 5, Q4).arrays()
    x = mx.concatenate([mx.zeros((3,), x.dtype), x.flatten()])[3:].reshape(x.shape)
    flat = array(ids).flatten()
    check(
        ops.moe_glu(x, ids.flatten(), gate, up, down),
        moe_glu(array(x).repeat(2, axis=0), flat, gate, up, down),
        "bf16",
        3,
    )
    matrix = ops.Weights(replace(gate.projection, experts=1), *(a[:1] + 0 for a in gate.arrays[:3]))
    check(ops.dense_qmm(x[:5], matrix), grouped(array(x[:5]), np.zeros(min(rows, 5), np.int32), matrix), "bf16")


@pytest.mark.parametrize("down", [Quantization(8, 64), Quantization(8, 32), Quantization(4, 32)], ids=str)
@pytest.mark.parametrize("first", [Quantization(4, 64), Quantization(8, 64)], ids=str)
@pytest.mark.parametrize("features", [64, 128, 192, 704, 1408])
def test_down_projection_with_other_bits(first, down, features):
    run(Case(50, 2, 256, features, 4, first, down=down), glu=True)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_unfused_activation(top_k):
    case = Case(45, top_k, 256, 192, 9, Q4, has_bias=True, ids="bad")
    x, ids, gate, up, down = case.arrays()
    seen = []

    def activation(a, b):
        seen.append(a.shape)
        return mx.maximum(a, 0) * b

    out = ops.moe_mlp(x, ids.flatten(), [gate, up], activation, down)
    rows, flat = array(x).repeat(top_k, axis=0), array(ids).flatten()
    hidden = np.maximum(grouped(rows, flat, gate), 0) * grouped(rows, flat, up)
    check(out, grouped(hidden, flat, down), "bf16", 3)
    assert seen == [(case.rows, 1, 192)]


@pytest.mark.parametrize("kind", ["distinct", "duplicates", "one", "sorted", "bad"])
@pytest.mark.parametrize("tile", TILES.values(), ids=lambda t: f"m{t.m}")
@pytest.mark.parametrize("rows", [1, 31, 511, 513, 4096, 70_000])
def test_routing(rows, tile, kind):
    routing_is_a_stable_sort(rows, tile, kind)


@pytest.mark.parametrize("bits", variants.BITS)
@pytest.mark.parametrize("k", [32, 96, 128, 160, 2880])
def test_permutation(bits, k):
    permutation_is_the_formula(bits, k)


@pytest.mark.parametrize("shape", [pytest.param(None, id="dispatched"), WGMMA_IF_THERE])
@pytest.mark.parametrize("rows", [1, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("experts", [1, 8])
def test_many_rows(rows, experts, shape):
    run(Case(rows, 1, 128, 64, experts, Q4, ids="duplicates"), False, shape)


@ON_HOPPER
@pytest.mark.parametrize("blocks", [1, 5, 500])  # that share the work
@pytest.mark.parametrize("variant", [v for v in PREFILLS if v.tile is WGMMA], ids=lambda v: v.id)
def test_blocks_share_the_work(variant, blocks, monkeypatch):
    monkeypatch.setattr(device, "multiprocessors", lambda: blocks)
    run_variant(variant)


PLAIN64 = [v for v in PREFILLS if not v.glu and v.quantization.group_size == 64]
PLAIN64 += [v for v in DECODES if v.kind != "glu"]


@pytest.mark.parametrize("variant", PLAIN64, ids=lambda v: v.id)
def test_exact_in_integers(variant):
    exact_in_integers(variant)


@pytest.mark.parametrize("variant", PLAIN64, ids=lambda v: v.id)
def test_one_hot_rows(variant):
    one_hot_rows_show_the_weights(variant)


@pytest.mark.parametrize("variant", PLAIN64, ids=lambda v: v.id)
def test_subnormal_scales(variant):
    subnormal_scales_count(variant)


@pytest.mark.parametrize(
    "variant", [v for v in PREFILLS if v.glu] + [v for v in DECODES if v.kind == "glu"], ids=lambda v: v.id
)
def test_large_gates(variant):
    large_gates_saturate(variant)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_stay_in_their_row(bad):
    for tile in (TILES[16], *([WGMMA] if device.arch() == WGMMA_ARCH else [])):
        bad_values_stay_in_their_row(bad, tile)
    bad_values_stay_in_their_row(bad, Choice(EXPERT_STRIP, 1, "forced"))


@pytest.mark.parametrize("tile", [*(pytest.param(t, id=f"m{m}") for m, t in TILES.items()), WGMMA_IF_THERE])
def test_neighbours_do_not_change_a_row(tile):
    neighbours_do_not_change_a_row(tile)


@pytest.mark.parametrize("shape", [pytest.param(None, id="dispatched"), WGMMA_IF_THERE])
def test_offsets_beyond_32_bits(shape):
    """Experts and outputs that lie more than 2^31 bytes from their array's start."""
    p = Projection(72, 8192, 8192, Q4, "bf16")  # 2.4 GB of weights
    words = mx.random.randint(0, 2**31 - 1, (p.experts, p.n, p.k // 8), mx.int32, key=mx.random.key(0)).view(mx.uint32)
    scales = mx.full((p.experts, p.n, p.k // 64), 0.002, mx.bfloat16)
    weights = ops.Weights(p, words, scales, -7.5 * scales)
    x = mx.random.normal((150_000, p.k), key=mx.random.key(1)).astype(mx.bfloat16)  # 2.4 GB, and as much comes out
    ids = np.full(150_000, 3, np.int32)
    ids[-2:] = 71
    out = ops.grouped_qmm(x, mx.array(ids), weights, shape)
    for row in (0, 149_997, 149_998, 149_999):
        check(out[row : row + 1], grouped(array(x[row : row + 1]), ids[row : row + 1], weights), "bf16")


def stock_and_ours(quantization: Quantization, dtype: str, shape: Tile | WgmmaTile | Choice) -> tuple[float, float]:
    """rel_rms of MLX's gather_qmm and of ours on the same problem."""
    case = Case(64, 2, 512, 256, 4, quantization, dtype)
    x, ids, gate, _, _ = case.arrays()
    stock = mx.gather_qmm(
        mx.expand_dims(x, (-2, -3)),
        gate.weight,
        gate.scales,
        gate.biases,
        rhs_indices=ids,
        transpose=True,
        group_size=quantization.group_size,
        bits=quantization.bits,
    )
    ours, reference = run_plain(case, shape)
    return rel_rms(array(stock).reshape(reference.shape), reference), rel_rms(array(ours), reference)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(TILES[32], id="prefill"),
        pytest.param(Choice(EXPERT_STRIP, 1, "forced"), id="decode"),
        WGMMA_IF_THERE,
    ],
)
@pytest.mark.parametrize("dtype", variants.DTYPES)
@pytest.mark.parametrize("group_size", variants.GROUP_SIZES)
@pytest.mark.parametrize("bits", variants.BITS)
def test_error_is_at_most_twice_stocks(bits, group_size, dtype, shape):
    stock, ours = stock_and_ours(Quantization(bits, group_size), dtype, shape)
    assert ours <= 2 * stock, f"ours {ours:.2e}, MLX's {stock:.2e}"
