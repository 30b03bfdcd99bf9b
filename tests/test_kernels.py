"""Every kernel variant on a GPU, forced, against NumPy; outputs hold garbage before each launch."""

import mlx.core as mx
import numpy as np
import pytest
from cases import Case, around, make_ids, make_weights
from numerics import array, check, grouped, moe_glu, rel_rms

from mlx_moe_fast import launch, ops, variants
from mlx_moe_fast.problem import Projection, Quantization
from mlx_moe_fast.variants import TILES, Prefill

pytestmark = pytest.mark.gpu
PREFILLS = [v for v in variants.all_variants() if isinstance(v, Prefill)]
Q4 = Quantization(4, 64)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Whatever a kernel does not write is a large number, as an index and as a value."""
    monkeypatch.setattr(launch, "poison", 2147483520.0)


def run_plain(case: Case, tile=None) -> tuple[mx.array, np.ndarray]:
    x, ids, gate, _, _ = case.arrays()
    out = ops.grouped_qmm(x, ids.flatten(), gate, tile)
    rows = array(x).repeat(case.top_k, axis=0)
    return out, grouped(rows, array(ids).flatten(), gate)


def run_glu(case: Case, tile=None) -> tuple[mx.array, np.ndarray]:
    x, ids, gate, up, down = case.arrays()
    out = ops.moe_glu(x, ids.flatten(), gate, up, down, tile)
    rows = array(x).repeat(case.top_k, axis=0)
    return out, moe_glu(rows, array(ids).flatten(), gate, up, down)


@pytest.mark.parametrize("variant", PREFILLS, ids=lambda v: v.id)
def test_variant(variant: Prefill):
    for case in around(variant.tile.m, variant.quantization, variant.dtype):
        out, reference = (run_glu if variant.glu else run_plain)(case, variant.tile)
        check(out, reference, variant.dtype, 3 if variant.glu else 1)


@pytest.mark.parametrize("down", [Quantization(8, 64), Quantization(8, 32), Quantization(4, 32)], ids=str)
@pytest.mark.parametrize("first", [Quantization(4, 64), Quantization(8, 64)], ids=str)
@pytest.mark.parametrize("features", [64, 128, 192, 704, 1408])
def test_down_projection_with_other_bits(first, down, features):
    out, reference = run_glu(Case(50, 2, 256, features, 4, first, down=down))
    check(out, reference, "bf16", 3)


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
    experts = 67  # a prime
    ids = make_ids(np.random.default_rng(rows), rows, 1, experts, kind).flatten()
    x = mx.zeros((1, 64), mx.bfloat16)
    routing = ops.route(mx.array(ids), x, experts, 4, tile)
    bucket = np.where((ids < 0) | (ids >= experts), experts, ids)
    order = np.argsort(bucket, kind="stable")
    np.testing.assert_array_equal(array(routing.row_ids), order)
    covered = []
    for expert, first, count, _ in array(routing.tiles):
        assert 0 <= count <= tile.m
        assert count == 0 or (bucket[order[first : first + count]] == expert).all()
        covered.extend(range(first, first + count) if count else ())
    assert sorted(covered) == list(range(rows))  # every row once


@pytest.mark.parametrize("bits", variants.BITS)
@pytest.mark.parametrize("k", [32, 96, 128, 160, 2880])
def test_permutation(bits, k):
    x = mx.array(np.arange(3 * k, dtype=np.float32).reshape(3, k) % 251).astype(mx.float16)
    width = variants.padded(k, bits)
    logical = np.array([variants.logical_k(p, bits) for p in range(width)])
    expected = np.where(logical < k, array(x)[:, np.minimum(logical, k - 1)], 0)
    np.testing.assert_array_equal(array(ops.permute(x, bits)), expected)
    strided = mx.contiguous(x.T).T  # the same values, columns first
    np.testing.assert_array_equal(array(ops.permute(strided, bits)), expected)


@pytest.mark.parametrize("rows", [1, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("experts", [1, 8])
def test_many_rows(rows, experts):
    case = Case(rows, 1, 128, 64, experts, Q4, ids="duplicates")
    check(*run_plain(case), "bf16")


@pytest.mark.parametrize(
    "variant", [v for v in PREFILLS if not v.glu and v.quantization.group_size == 64], ids=lambda v: v.id
)
def test_exact_in_integers(variant):
    """Integer inputs, scales of one and no bias: every sum is exact, so every bit must be right."""
    q, rng = variant.quantization, np.random.default_rng(1)
    p = Projection(3, 136, 320, q, variant.dtype)
    weights = make_weights(rng, p)
    ones = mx.ones_like(weights.scales)
    weights = ops.Weights(p, weights.weight & 0x11111111, ones, -ones)  # weights of -1, 0 and, at 8 bits, up to 16
    x = mx.array(rng.integers(-2, 3, (70, 320)).astype(np.float32)).astype(weights.scales.dtype)
    ids = make_ids(rng, 70, 1, 3, "duplicates").flatten()
    reference = mx.array(grouped(array(x), ids, weights)).astype(x.dtype)
    np.testing.assert_array_equal(array(ops.grouped_qmm(x, mx.array(ids), weights, variant.tile)), array(reference))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_stay_in_their_row(bad):
    case = Case(70, 2, 256, 128, 4, Q4)
    x, ids, gate, up, down = case.arrays()
    clean = array(ops.moe_glu(x, ids.flatten(), gate, up, down))
    x[5, 17] = bad
    out = array(ops.moe_glu(x, ids.flatten(), gate, up, down))
    touched = np.zeros(case.rows, bool)
    touched[10:12] = True  # both experts of token 5
    np.testing.assert_array_equal(out[~touched], clean[~touched])
    assert not np.isfinite(out[touched]).all(axis=1).any()


@pytest.mark.parametrize("tile", TILES.values(), ids=lambda t: f"m{t.m}")
def test_neighbours_do_not_change_a_row(tile):
    """The bits of a row depend neither on the other rows nor on how many there are."""
    case = Case(300, 1, 512, 128, 2, Q4, ids="one")
    x, ids, gate, _, _ = case.arrays()
    full = array(ops.grouped_qmm(x, ids.flatten(), gate, tile))
    for first, count in ((0, 1), (7, 16), (100, 129), (299, 1)):
        part = ops.grouped_qmm(x[first : first + count], ids[first : first + count].flatten(), gate, tile)
        np.testing.assert_array_equal(array(part), full[first : first + count])


def test_offsets_beyond_32_bits():
    """Experts and outputs that lie more than 2^31 bytes from their array's start."""
    p = Projection(72, 8192, 8192, Q4, "bf16")  # 2.4 GB of weights
    words = mx.random.randint(0, 2**31 - 1, (p.experts, p.n, p.k // 8), mx.int32, key=mx.random.key(0)).view(mx.uint32)
    scales = mx.full((p.experts, p.n, p.k // 64), 0.002, mx.bfloat16)
    weights = ops.Weights(p, words, scales, -7.5 * scales)
    x = mx.random.normal((150_000, p.k), key=mx.random.key(1)).astype(mx.bfloat16)  # 2.4 GB, and as much comes out
    ids = np.full(150_000, 3, np.int32)
    ids[-2:] = 71
    out = ops.grouped_qmm(x, mx.array(ids), weights)
    for row in (0, 149_997, 149_998, 149_999):
        check(out[row : row + 1], grouped(array(x[row : row + 1]), ids[row : row + 1], weights), "bf16")


def stock_and_ours(quantization: Quantization, dtype: str) -> tuple[float, float]:
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
    ours, reference = run_plain(case)
    return rel_rms(array(stock).reshape(reference.shape), reference), rel_rms(array(ours), reference)


@pytest.mark.parametrize("dtype", variants.DTYPES)
@pytest.mark.parametrize("group_size", variants.GROUP_SIZES)
@pytest.mark.parametrize("bits", variants.BITS)
def test_error_is_at_most_twice_stocks(bits, group_size, dtype):
    stock, ours = stock_and_ours(Quantization(bits, group_size), dtype)
    assert ours <= 2 * stock, f"ours {ours:.2e}, MLX's {stock:.2e}"
