"""What the kernels have to do, as checks through `ops`: on a GPU, and on the CPU with the emulator's launch."""

import mlx.core as mx
import numpy as np
from cases import Case, around, few, floats, make_ids, make_weights
from numerics import array, check, grouped, moe_glu, router_reference

from mlx_moe_fast import ops, variants
from mlx_moe_fast.dispatch import Choice
from mlx_moe_fast.problem import Projection, Quantization, RouterForm
from mlx_moe_fast.variants import DENSE_STRIPS, EXPERT_STRIP, WARPS, Decode, Prefill, Tile, WgmmaTile

Q4 = Quantization(4, 64)


Shape = Tile | WgmmaTile | Choice | None


def shapes_of(variant: Prefill | Decode) -> list[Tile | WgmmaTile | Choice]:
    """How a variant is asked for: a decode kernel's warps share K, or do not, or blocks share a matrix evenly."""
    if isinstance(variant, Prefill):
        return [variant.tile]
    shapes = [Choice(variant.strip, split, "forced") for split in (1, WARPS)]
    # Nine tiles of 16, the most that a matrix here has, over two multiprocessors.
    even = Choice(variant.strip, WARPS, "forced", per_sm=-(-9 // (2 * variant.strip.tiles)), sms=2)
    return [*shapes, even] if variant.kind == "dense" else shapes


def multiply(variant: Prefill | Decode, shape: Shape, x: mx.array, ids: mx.array, w: ops.Weights) -> mx.array:
    """A product by a variant; a dense one, whose weights are one matrix, in as many calls as it needs."""
    if isinstance(variant, Decode) and variant.kind == "dense":
        step = variant.strip.columns
        return mx.concatenate([ops.dense_qmm(x[i : i + step], w, shape) for i in range(0, x.shape[0], step)])
    return ops.grouped_qmm(x, ids, w, shape)


def experts_of(variant: Prefill | Decode, experts: int) -> int:
    """`experts`, or the one matrix of a dense variant."""
    return 1 if isinstance(variant, Decode) and variant.kind == "dense" else experts


def run_plain(case: Case, shape: Shape = None) -> tuple[mx.array, np.ndarray]:
    """One projection of a case: result and reference."""
    x, ids, gate, _, _ = case.arrays()
    out = ops.grouped_qmm(x, ids.flatten(), gate, shape)
    return out, grouped(array(x).repeat(case.top_k, axis=0), array(ids).flatten(), gate)


def run_glu(case: Case, shape: Shape = None) -> tuple[mx.array, np.ndarray]:
    """The whole expert MLP of a case: result and reference."""
    x, ids, gate, up, down = case.arrays()
    out = ops.moe_glu(x, ids.flatten(), gate, up, down, shape)
    return out, moe_glu(array(x).repeat(case.top_k, axis=0), array(ids).flatten(), gate, up, down)


def run(case: Case, glu: bool, shape: Shape = None) -> mx.array:
    """Runs and checks a case; returns the result."""
    out, reference = (run_glu if glu else run_plain)(case, shape)
    check(out, reference, case.dtype, 3 if glu else 1)
    return out


def matrix(variant: Decode, rows: int, n: int, k: int) -> tuple[mx.array, ops.Weights]:
    """x and weights of a dense product, with a bias if n is 136."""
    rng = np.random.default_rng(rows)
    weights = make_weights(rng, Projection(1, n, k, variant.quantization, variant.dtype, has_bias=n == 136))
    return floats(rng, (rows, k), variant.dtype), weights


def run_matrix(variant: Decode, choice: Choice, rows: int, n: int, k: int) -> mx.array:
    """Runs and checks a dense variant on one shape; returns the result."""
    x, weights = matrix(variant, rows, n, k)
    out = ops.dense_qmm(x, weights, choice)
    check(out, grouped(array(x), np.zeros(rows, np.int32), weights), variant.dtype)
    return out


def run_dense(variant: Decode, choice: Choice) -> list[mx.array]:
    """Runs and checks a dense variant around its strip: rows, tails in N and K, rows of scales of any alignment."""
    columns, g = variant.strip.columns, variant.quantization.group_size
    block = 1024 // variant.quantization.bits  # elements of K that a lane's aligned scales belong to
    shapes = [(1, 8, g), (columns, 128, 4 * block), (columns // 2 + 1, 136, block + g), (columns - 1, 40, 17 * g)]
    return [run_matrix(variant, choice, *shape) for shape in shapes]


def run_variant(variant: Prefill | Decode) -> None:
    """Runs and checks a variant on the shapes around its tile."""
    for shape in shapes_of(variant):
        if isinstance(variant, Decode) and variant.kind == "dense":
            run_dense(variant, shape)
            continue
        glu = variant.glu if isinstance(variant, Prefill) else variant.kind == "glu"
        rows = variant.tile.m if isinstance(variant, Prefill) else variant.strip.columns
        cases = around(rows, variant.quantization, variant.dtype)
        if isinstance(variant, Decode):
            cases += few(variant.quantization, variant.dtype)
        for case in cases:
            run(case, glu, shape)


def batch_does_not_change_a_row(dtype: str) -> None:
    """A row's bits are the same alone and among 32, with any strip and however the warps share K."""
    rng = np.random.default_rng(5)
    dense = make_weights(rng, Projection(1, 136, 704, Q4, dtype))
    x = floats(rng, (32, 704), dtype)
    full = array(ops.dense_qmm(x, dense))
    for columns, strip in DENSE_STRIPS.items():
        for split in (1, WARPS):
            for rows in (1, columns):
                np.testing.assert_array_equal(
                    array(ops.dense_qmm(x[:rows], dense, Choice(strip, split, ""))), full[:rows]
                )
    x, ids, gate, up, down = Case(32, 2, 704, 192, 8, Q4, dtype).arrays()
    full = array(ops.moe_glu(x, ids.flatten(), gate, up, down))
    for rows in (1, 3, 8, 31):
        for choice in (None, *(Choice(EXPERT_STRIP, split, "") for split in (1, WARPS))):
            out = ops.moe_glu(x[:rows], ids[:rows].flatten(), gate, up, down, choice)
            np.testing.assert_array_equal(array(out), full[: 2 * rows])


def parts_add_up_in_order(variant: Decode) -> None:
    """Where all of K cancels but what fp32 rounds away, bits are still the same however warps and blocks share a dense
    matrix: the parts of K are added up in one order."""
    rng, k = np.random.default_rng(6), 8192 // variant.quantization.bits  # four parts of four spans
    weights = make_weights(rng, Projection(1, 24, k // 2, variant.quantization, variant.dtype))
    twice = (mx.concatenate([a, a], axis=-1) for a in (weights.weight, weights.scales, weights.biases))
    weights = ops.Weights(Projection(1, 24, k, variant.quantization, variant.dtype), *twice)
    x = floats(rng, (variant.strip.columns, k // 2), variant.dtype) * 1024
    first, *others = (array(ops.dense_qmm(mx.concatenate([x, -x], axis=-1), weights, s)) for s in shapes_of(variant))
    assert first.any()
    for other in others:
        np.testing.assert_array_equal(other, first)


def routing_is_a_stable_sort(rows: int, tile: Tile, kind: str, experts: int = 67) -> None:
    """Row ids are a stable sort by expert, ids out of range last; the tiles hold every sorted row once."""
    ids = make_ids(np.random.default_rng(rows), rows, 1, experts, kind).flatten()
    routing = ops.route(mx.array(ids), mx.zeros((1, 64), mx.bfloat16), experts, 4, tile)
    bucket = np.where((ids < 0) | (ids >= experts), experts, ids)
    order = np.argsort(bucket, kind="stable")
    np.testing.assert_array_equal(array(routing.row_ids), order)
    covered: list[int] = []
    for expert, first, count, _ in array(routing.tiles):
        assert 0 <= count <= tile.m
        assert count == 0 or (bucket[order[first : first + count]] == expert).all()
        covered.extend(range(first, first + count) if count else ())
    assert sorted(covered) == list(range(rows))


def permutation_is_the_formula(bits: int, k: int) -> None:
    """Permuted activations are `variants.logical_k`, with zeros in the padding."""
    x = mx.array(np.arange(3 * k, dtype=np.float32).reshape(3, k) % 251).astype(mx.float16)
    logical = np.array([variants.logical_k(p, bits) for p in range(variants.padded(k, bits))])
    expected = np.where(logical < k, array(x)[:, np.minimum(logical, k - 1)], 0)
    np.testing.assert_array_equal(array(ops.permute(x, bits)), expected)


def integers(variant: Prefill | Decode, rows: int, n: int) -> tuple[mx.array, np.ndarray, ops.Weights]:
    """x, ids and weights of integers, with a bias and scales of one: every sum is exact in fp32. Sums are larger than
    16 bits hold, so that a rounding before the bias would show."""
    q, rng, experts = variant.quantization, np.random.default_rng(1), experts_of(variant, 3)
    p = Projection(experts, n, 384, q, variant.dtype, has_bias=True)
    weights = make_weights(rng, p)
    ones = mx.ones_like(weights.scales)
    bias = mx.array(rng.integers(-99, 100, (experts, n)).astype(np.float32)).astype(ones.dtype)
    weights = ops.Weights(p, weights.weight & 0x11111111, ones, -ones, bias)  # weights of -1, 0 and, at 8 bits, to 16
    top = 100 if q.bits == 4 else 10
    x = mx.array(rng.integers(-top, top + 1, (rows, 384)).astype(np.float32)).astype(weights.scales.dtype)
    return x, make_ids(rng, rows, 1, experts, "duplicates").flatten(), weights


def exact_in_integers(variant: Prefill | Decode) -> None:
    """Of integers every bit must be right."""
    x, ids, weights = integers(variant, 70, 136)
    reference = mx.array(grouped(array(x), ids, weights)).astype(x.dtype)
    for shape in shapes_of(variant):
        out = multiply(variant, shape, x, mx.array(ids), weights)
        np.testing.assert_array_equal(array(out), array(reference))


def bad_values_stay_in_their_row(bad: float, shape: Shape = None) -> None:
    """A NaN or an infinity of one token reaches its own rows and changes no bit of another, nor does a token of them,
    which lies beside the padding of the token before."""
    case = Case(70, 2, 192, 192, 4, Q4)
    x, ids, gate, up, down = case.arrays()
    clean = array(ops.moe_glu(x, ids.flatten(), gate, up, down, shape))
    for where in (17, slice(None)):
        x[5, where] = bad
        out = array(ops.moe_glu(x, ids.flatten(), gate, up, down, shape))
        touched = np.zeros(case.rows, bool)
        touched[10:12] = True  # both experts of token 5
        np.testing.assert_array_equal(out[~touched], clean[~touched])
        assert not np.isfinite(out[touched]).all(axis=1).any()


def large_gates_saturate(variant: Prefill | Decode) -> None:
    """Gates far beyond where e^x overflows give silu's limits, 0 and x."""
    case = Case(15, 1, 384, 256, 1, variant.quantization, variant.dtype)
    x, ids, gate, up, down = case.arrays()
    loud = ops.Weights(gate.projection, gate.weight, gate.scales * 64, gate.biases * 64)
    rows, flat = array(x), array(ids).flatten()
    assert np.abs(grouped(rows, flat, loud)).max() > 100
    for shape in shapes_of(variant):
        out = ops.moe_glu(x, ids.flatten(), loud, up, down, shape)
        check(out, moe_glu(rows, flat, loud, up, down), variant.dtype, 3)


def neighbours_do_not_change_a_row(tile: Tile) -> None:
    """The bits of a row depend neither on the other rows nor on how many there are."""
    x, ids, gate, _, _ = Case(300, 1, 512, 128, 2, Q4, ids="one").arrays()
    full = array(ops.grouped_qmm(x, ids.flatten(), gate, tile))
    for first, count in ((0, 1), (7, 16), (100, 129), (299, 1)):
        part = ops.grouped_qmm(x[first : first + count], ids[first : first + count].flatten(), gate, tile)
        np.testing.assert_array_equal(array(part), full[first : first + count])


def one_hot_rows_show_the_weights(variant: Prefill | Decode) -> None:
    """Row k of the identity gives column k of the weights, rounded: a layout fault is readable."""
    q = variant.quantization
    k = 2 * q.group_size + 64 - 64 % q.group_size if q.group_size <= 64 else 256
    p = Projection(1, 136, k, q, variant.dtype)
    weights = make_weights(np.random.default_rng(2), p)
    x = mx.eye(k).astype(weights.scales.dtype)
    exact = mx.array(grouped(np.eye(k, dtype=np.float32), np.zeros(k, np.int32), weights))
    for shape in shapes_of(variant):
        out = multiply(variant, shape, x, mx.zeros((k,), mx.int32), weights)
        if isinstance(variant, Decode):  # which applies scale and bias in fp32 to sums that hold an offset
            check(out, array(exact), variant.dtype)
        else:
            np.testing.assert_array_equal(array(out), array(exact.astype(x.dtype)))


def subnormal_scales_count(variant: Prefill | Decode) -> None:
    """Scales and biases below the smallest normal number are values, not zeros."""
    p = Projection(1, 64, 2 * variant.quantization.group_size, variant.quantization, variant.dtype)
    weights = make_weights(np.random.default_rng(3), p)
    tiny = mx.array(2.0**-130 if variant.dtype == "bf16" else 2.0**-17, mx.float32)
    scale = (mx.ones_like(weights.scales).astype(mx.float32) * tiny).astype(weights.scales.dtype)
    top = 2**variant.quantization.bits - 1
    weights = ops.Weights(p, weights.weight, scale, (-scale.astype(mx.float32) * (top // 2)).astype(scale.dtype))
    x = mx.full((5, p.k), 2.0**100 if variant.dtype == "bf16" else 256.0, mx.float32).astype(scale.dtype)
    reference = grouped(array(x), np.zeros(5, np.int32), weights)
    assert (reference != 0).any()
    for shape in shapes_of(variant):
        check(multiply(variant, shape, x, mx.zeros((5,), mx.int32), weights), reference, variant.dtype, 4)


SOFTMAX, TOP_K = RouterForm(8, normalise=False), RouterForm(8)
SIGMOID = RouterForm(8, "sigmoid", eps=1e-6, scale=2.5)
V3 = RouterForm(8, "sigmoid", scale=2.5, groups=8, top_groups=4)
V2 = RouterForm(6, normalise=False, scale=16.0, groups=8, top_groups=3, best=1, dropped=-np.inf)
# Form, tokens, experts, dtype of the bias: around a block's tokens and a lane's experts, with ties.
ROUTERS = {
    "softmax over all": (SOFTMAX, 1, 128, None),
    "over the top-k": (TOP_K._replace(top_k=2), 4, 8, None),
    "all the lanes": (TOP_K._replace(top_k=32), 5, 33, None),
    "one of them": (SOFTMAX._replace(top_k=1), 9, 31, None),
    "all of them": (SOFTMAX._replace(top_k=2), 2, 2, None),
    "many tokens": (TOP_K._replace(top_k=4), 64, 60, None),
    "as many experts as fit": (TOP_K._replace(top_k=10), 3, 512, None),
    "softmax with a bias": (SOFTMAX._replace(scale=1.5), 5, 67, "fp32"),
    "softmax with a bias, normalised": (TOP_K._replace(eps=1e-3), 5, 96, "fp16"),
    "sigmoid": (SIGMOID, 4, 40, None),
    "sigmoid with a bias": (SIGMOID._replace(eps=1e-20), 3, 256, "fp32"),
    "sigmoid with a 16-bit bias": (SIGMOID._replace(normalise=False), 2, 64, "bf16"),
    "every limit": (SIGMOID._replace(top_k=32, groups=32, top_groups=5), 2, 512, "fp32"),
    "groups": (V3, 5, 256, "fp32"),
    "groups without a bias": (V3._replace(dropped=-np.inf), 3, 64, None),
    "groups of two": (V3._replace(top_k=3, groups=6, top_groups=1), 40, 12, "fp32"),
    "more than the groups have": (V3._replace(top_k=12, groups=5, top_groups=2, dropped=-np.inf), 3, 25, "fp32"),
    "no fewer groups": (V3._replace(top_groups=8), 2, 64, "fp32"),
    "groups by softmax": (V3._replace(score="softmax", groups=4, top_groups=2), 3, 128, None),
    "groups by their best": (V2, 3, 160, None),
}


def router_inputs(name: str, dtype: str) -> tuple[mx.array, mx.array | None]:
    """Logits of a case of ROUTERS, some of them equal, and biases, by some of which a choice is less than 0."""
    rng = np.random.default_rng(8)
    _, tokens, experts, kind = ROUTERS[name]
    logits = mx.array(rng.standard_normal((tokens, experts)) * 3).astype(ops.NUMBERS[dtype])
    logits[0] = mx.round(logits[0] / 2)  # ties, zeros of both signs
    bias = None if kind is None else mx.array(rng.standard_normal(experts) * 0.3 - 0.4).astype(ops.NUMBERS[kind])
    return logits, bias


def router_is_the_formula(dtype: str, name: str) -> None:
    """Experts and weights of a case of ROUTERS."""
    form, (logits, bias) = ROUTERS[name][0], router_inputs(name, dtype)
    ids, weights = ops.router(logits, form, bias)
    expected, shares = router_reference(array(logits), form, None if bias is None else array(bias))
    np.testing.assert_array_equal(array(ids), expected)
    np.testing.assert_allclose(array(weights), shares, rtol=1e-5)


def router_sees_small_differences() -> None:
    """A choice that hangs on a few steps of fp32 in scores that are near 1, or on a bias of that size."""
    logits, bias = np.full((2, 64), -4, np.float32), np.zeros(64, np.float32)
    logits[0, [5, 37]] = 4, np.nextafter(np.float32(4), np.float32(5)) + 1e-4
    logits[1, [5, 37]], bias[37] = 4, 3e-7
    for form in (RouterForm(1, "sigmoid"), V3._replace(top_k=1, groups=2, top_groups=1)):
        ids, _ = ops.router(mx.array(logits), form, mx.array(bias))
        assert array(ids).tolist() == [[37], [37]]


def router_bears_bad_logits(dtype: str) -> None:
    """NaN and infinities: ids stay different and in range, and only the token's own weights are touched."""
    logits = np.random.default_rng(9).standard_normal((6, 40)).astype(np.float32)
    logits[0, 7], logits[1], logits[2, 3], logits[3, 5:] = np.nan, np.nan, np.inf, -np.inf
    logits[4] = -np.inf
    given, bias = mx.array(logits).astype(ops.NUMBERS[dtype]), mx.zeros((40,))
    limited = {"groups": 4, "top_groups": 2}
    forms = RouterForm(6), RouterForm(6, "sigmoid"), RouterForm(6, "sigmoid", **limited), RouterForm(6, **limited)
    for form in (*forms, RouterForm(6, normalise=False, best=1, dropped=-np.inf, **limited)):
        for b in (None, bias):
            ids, weights = map(array, ops.router(given, form, b))
            for row in ids:
                assert len(set(row)) == 6 and (0 <= row).all() and (row < 40).all()
            assert np.isnan(weights[:2]).any(axis=1).all() and np.isfinite(weights[5]).all()
            if form.score == "softmax":
                assert np.isnan(weights[[2, 4]]).any(axis=1).all()
            if form.groups == 1 and (b is None or form.score == "sigmoid"):
                assert ids[0, 0] == 7 and ids[2, 0] == 3 and set(ids[3, :5]) == {0, 1, 2, 3, 4}
                np.testing.assert_allclose(weights[[3, 5]].sum(axis=1), 1, rtol=1e-5)


def block_is_its_parts(quantization: Quantization, dtype: str, bits_down: int | None = None) -> None:
    """Router, experts and combination together against NumPy, few and many experts, token by token the same bits."""
    down = Quantization(bits_down, quantization.group_size) if bits_down else None
    g = quantization.group_size
    shapes = [(1, 8, 256, 128, 16), (7, 2, 2 * g + 128, 128 + g, 4), (9, 4, 384, 128, 7), (33, 1, 128, 256, 5)]
    for tokens, top_k, hidden, features, experts in shapes:
        case = Case(tokens, top_k, hidden, features, experts, quantization, dtype, has_bias=tokens == 9, down=down)
        x, _, gate, up, last = case.arrays()
        logits = floats(np.random.default_rng(tokens), (tokens, experts), dtype)
        bias = mx.array(np.random.default_rng(tokens).standard_normal(experts).astype(np.float32))
        for form, b in ((RouterForm(top_k), None), (RouterForm(top_k, "sigmoid", eps=1e-20, scale=2.5), bias)):
            out = ops.moe_block(x, logits, b, form, gate, up, last)
            ids, shares = router_reference(array(logits), form, None if b is None else array(b))
            rows = moe_glu(array(x).repeat(top_k, axis=0), ids.flatten(), gate, up, last)
            reference = (rows.reshape(tokens, top_k, hidden) * shares[..., None]).sum(axis=1)
            check(out, reference.astype(np.float32), dtype, 4)
        one = ops.moe_block(x[:1], logits[:1].astype(mx.float32), b, form, gate, up, last)
        np.testing.assert_array_equal(array(one), array(out[:1]))
