"""The layers and their conditions: fallbacks on MLX's own kernels, and shapes with kernels made of NumPy."""

import logging
import re

import mlx.core as mx
import mlx.nn as nn
import mlx.utils
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.lora import LoRASwitchLinear
from numerics import array, dequantize, grouped, moe_glu, rel_rms, router_reference

import mlx_moe_fast
from mlx_moe_fast import calls, device, dispatch, eligibility, envs, jit, launch, layers, ops, variants
from mlx_moe_fast.eligibility import HELP, Reason, Rejection, check_chain, check_device, describe
from mlx_moe_fast.errors import KernelBuildError
from mlx_moe_fast.layers import FAST
from mlx_moe_fast.problem import Device, Projection, Quantization

H, F, E = 64, 128, 4


def finish(layer, bits=4, group_size=64, dtype=mx.bfloat16, fast=True):
    """Random in every parameter, quantized, for inference; `fast`: with our classes."""
    mx.random.seed(0)
    layer.update(mlx.utils.tree_map(lambda a: mx.random.normal(a.shape) * 0.1, layer.parameters()))
    layer.set_dtype(dtype)
    holder = nn.Module()
    holder.layer = layer
    nn.quantize(holder, group_size, bits)
    holder.eval()
    mx.eval(holder.parameters())
    for module in holder.modules():
        if fast and type(module) in FAST:
            module.__class__ = FAST[type(module)]
    return holder.layer


def linear(n=F, k=H, bias=False, **kw):
    return finish(SwitchLinear(k, n, E, bias=bias), **kw)


def glu(**kw):
    settings = {name: kw.pop(name) for name in ("bits", "group_size", "dtype", "fast") if name in kw}
    return finish(SwitchGLU(H, F, E, **kw), **settings)


def stock(layer, *args, **kw):
    """The call of mlx-lm's own class."""
    return type(layer).original.__call__(layer, *args, **kw)


def floats(*shape, seed=1):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)


def ids(*shape, seed=2):
    return mx.random.randint(0, E, shape, key=mx.random.key(seed))  # with duplicates


def same(a, b):
    return mx.array_equal(a, b).item()


def dense_product(x, weights):
    """W x^T + bias of one matrix, in NumPy."""
    out = array(x) @ dequantize(weights).T
    return out if weights.bias is None else out + array(weights.bias)


def held(projection, arrays):
    """Weights of a projection from arrays in the kernels' order."""
    return ops.Weights(projection, *arrays[:3], arrays[3] if projection.has_bias else None)


class Kernels:
    """`ops` in NumPy; `calls` has the name and the number of rows of each call."""

    def __init__(self):
        self.calls = []

    def _x(self, x, ids):
        """A row of x for each id. Few rows may come in any shape."""
        assert (x.ndim, ids.ndim) == (2, 1) or dispatch.is_few(ids.size, projection())
        rows = x.size // x.shape[-1]
        assert ids.size % rows == 0
        return np.repeat(array(x).reshape(rows, -1), ids.size // rows, axis=0)

    def grouped_qmm(self, x, ids, weights, shape=None):
        assert x.ndim == 2 and ids.ndim == 1
        self.calls.append(("grouped_qmm", ids.size))
        return mx.array(grouped(self._x(x, ids), array(ids), weights)).astype(x.dtype)

    def dense_qmm(self, x, weights, choice=None):
        rows = x.size // x.shape[-1]
        assert 1 <= rows <= dispatch.DENSE_ROWS
        self.calls.append(("dense_qmm", rows))
        return mx.array(dense_product(x, weights)).astype(x.dtype)

    def bind_dense(self, projection, x):
        return lambda x, *arrays: self.dense_qmm(x, held(projection, arrays))

    def bind_glu(self, gate, down, x, ids):
        def run(x, ids, *arrays):
            up_part, gate_part, down_part = arrays[:4], arrays[4:8], arrays[8:]
            return self.moe_glu(x, ids, held(gate, gate_part), held(gate, up_part), held(down, down_part))

        return run

    def moe_block(self, x, logits, bias, form, gate, up, down):
        rows = logits.size // logits.shape[-1]
        bias = None if bias is None else array(bias)
        ids, shares = router_reference(array(logits).reshape(rows, -1), form, bias)
        self.calls.append(("moe_block", ids.size))
        out = moe_glu(self._x(x, ids), ids.flatten(), gate, up, down).reshape(rows, form.top_k, -1)
        return mx.array((out * shares[..., None]).sum(axis=1)).astype(x.dtype).reshape(x.shape)

    def bind_block(self, gate, down, x, logits, bias, form):
        def run(x, logits, *arrays):
            parts = held(gate, arrays[-8:-4]), held(gate, arrays[-12:-8]), held(down, arrays[-4:])
            return self.moe_block(x, logits, None if bias is None else arrays[0], form, *parts)

        return run

    def moe_glu(self, x, ids, gate, up, down, shape=None):
        self.calls.append(("moe_glu", ids.size))
        out = moe_glu(self._x(x, ids), array(ids).flatten(), gate, up, down)
        return mx.array(out).astype(x.dtype).reshape(*ids.shape, -1)

    def moe_mlp(self, x, ids, first, activation, down, shape=None):
        self.calls.append(("moe_mlp", ids.size))
        rows, flat = self._x(x, ids), array(ids).flatten()
        order = np.argsort(flat, kind="stable")
        projected = [grouped(rows, flat, w)[order][:, None] for w in first]
        hidden = activation(*(mx.array(p).astype(x.dtype) for p in projected)).squeeze(1)
        unsorted = np.empty(hidden.shape, np.float32)
        unsorted[order] = array(hidden)
        return mx.array(grouped(unsorted, flat, down)).astype(x.dtype).reshape(*ids.shape, -1)


def not_compiled(run):
    """`calls.compiled` for functions that look at their arrays, which a transformation has yet to make."""

    def function(*arrays):
        if calls.traced(arrays):
            calls._note()
            return arrays[0]  # nobody takes it
        return run(*arrays)

    return function


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the kernels, and a CPU that counts as a GPU."""
    found = Kernels()
    monkeypatch.setattr(calls, "compiled", not_compiled)
    for name in ("grouped_qmm", "moe_glu", "moe_mlp", "dense_qmm", "bind_dense", "bind_glu", "moe_block", "bind_block"):
        monkeypatch.setattr(ops, name, getattr(found, name))
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(ops, "own_their_buffers", eligibility.contiguous_on_host)
    monkeypatch.setattr(dispatch, "MIN_WORK", 0)
    layers.warn_once.cache_clear()
    return found


@pytest.fixture
def gather_rows(monkeypatch):
    """How many rows each call of MLX's gather_qmm has."""
    rows, original = [], mx.gather_qmm

    def counted(x, *args, rhs_indices, **kw):
        rows.append(rhs_indices.size)
        return original(x, *args, rhs_indices=rhs_indices, **kw)

    monkeypatch.setattr(mx, "gather_qmm", counted)
    return rows


# Leading axes of x, M, axes of the indices.
GATHERS = {
    "tokens share their row": ((5, 1), 1, (5, 3)),
    "a batch of them": ((2, 3, 1), 1, (2, 3, 3)),
    "top-1": ((5, 1), 1, (5, 1)),
    "a row for each index": ((5, 3), 1, (5, 3)),
    "rows in one axis": ((7,), 1, (7,)),
    "one row for all": ((), 1, (7,)),
    "one index for all": ((5,), 1, ()),
    "groups, the same for all tokens": ((5, 3), 1, (1, 3)),
    "groups, an axis less": ((5, 3), 1, (3,)),
    "both broadcast": ((5, 1), 1, (1, 3)),
    "x repeats in front": ((1, 3), 1, (5, 3)),  # no run of equal rows: copied
    "x repeats in the middle": ((2, 1, 3), 1, (2, 4, 3)),
    "many rows an index": ((3,), 5, (3,)),
    "many rows, shared": ((5, 1), 2, (5, 3)),
    "many rows, one matrix": ((), 5, ()),
    "a single row": ((1,), 1, (1,)),
    "more than mlx-lm sorts": ((40, 1), 1, (40, 2)),
}


def gather_reference(layer, x, indices):
    """gather_qmm by its definition: axes before the last two of x broadcast with those of the indices."""
    weights = eligibility.weights(layer, describe(layer))
    batch = np.broadcast_shapes(x.shape[:-2], indices.shape)
    chosen = np.broadcast_to(array(indices), batch)
    out = np.broadcast_to(array(x), (*batch, *x.shape[-2:])) @ dequantize(weights)[chosen].swapaxes(-1, -2)
    return out if weights.bias is None else out + array(weights.bias)[chosen][..., None, :]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", GATHERS.values(), ids=GATHERS)
def test_a_linear_layer_broadcasts_as_gather_qmm(kernels, case, bias):
    lead, m, index_shape = case
    layer, x, indices = linear(bias=bias), floats(*lead, m, H), ids(*index_shape)
    out, own = layer(x, indices), stock(layer, x, indices)
    assert [name for name, _ in kernels.calls] == ["grouped_qmm"]
    assert out.shape == own.shape and out.dtype == own.dtype
    assert rel_rms(array(out), gather_reference(layer, x, indices)) < 5e-3
    assert rel_rms(array(out), array(own)) < 2e-2  # MLX on the CPU accumulates in bf16


@pytest.mark.parametrize("hint", [False, True])
def test_sorted_indices_are_a_hint(kernels, hint):
    # Indices that are sorted, and such that only claim to be.
    layer = linear()
    for indices in (mx.sort(ids(70)), ids(70)):
        x = floats(70, 1, H)
        assert rel_rms(array(layer(x, indices, hint)), gather_reference(layer, x, indices)) < 5e-3
    assert len(kernels.calls) == 2


def test_rows_are_shared_and_not_copied(kernels, monkeypatch):
    shapes = []

    def record(x, ids, weights):
        shapes.append((x.shape, ids.shape))
        return mx.zeros((ids.size, F))

    monkeypatch.setattr(ops, "grouped_qmm", record)
    linear()(floats(5, 1, 1, H), ids(5, 3))
    assert shapes == [((5, H), (15,))]


shapes = st.lists(st.integers(1, 3), max_size=4).map(tuple)


@st.composite
def broadcasts(draw):
    """(lead, batch): axes of x and what they broadcast to."""
    batch = draw(shapes)
    lead = tuple(draw(st.sampled_from((1, axis))) for axis in batch[draw(st.integers(0, len(batch))) :])
    return lead, batch


@settings(max_examples=300)
@given(broadcasts())
def test_rows_repeat_in_runs_where_numpys_broadcast_does(case):
    lead, batch = case
    rows = np.arange(np.prod(lead, dtype=int)).reshape(lead)
    reads = np.broadcast_to(rows, batch).flatten()
    in_runs = (reads == np.repeat(rows.flatten(), len(reads) // rows.size)).all()
    assert layers._repeats_in_runs(lead, batch) == in_runs


# Leading axes of x, top-k: as in mlx-lm's models; top-1; more than the 64 rows from which mlx-lm sorts.
MLPS = [((2, 3), 2), ((7,), 2), ((1, 1), 1), ((5,), 1), ((2, 20), 4), ((1, 2, 3), 2)]


@pytest.mark.parametrize("lead, top_k", MLPS)
@pytest.mark.parametrize(
    "make, op",
    [
        (lambda: glu(), "moe_glu"),
        (lambda: glu(bias=True), "moe_glu"),
        (lambda: glu(activation=SwigluOAI(), bias=True), "moe_mlp"),
        (lambda: finish(SwitchMLP(H, F, E, bias=True)), "moe_mlp"),
    ],
    ids=["SwitchGLU", "SwitchGLU bias", "SwigluOAI", "SwitchMLP"],
)
def test_an_expert_mlp_is_one_call(kernels, make, op, lead, top_k):
    layer, x, indices = make(), floats(*lead, H), ids(*lead, top_k)
    out = layer(x, indices)
    assert kernels.calls == [(op, indices.size)]
    own = stock_parts(layer, x, indices)
    assert out.shape == own.shape == (*lead, top_k, H) and out.dtype == own.dtype
    assert rel_rms(array(out), array(own)) < 3e-2  # MLX on the CPU accumulates in bf16


def stock_parts(layer, x, indices):
    """mlx-lm's call with mlx-lm's projections."""
    try:
        mlx_moe_fast.unpatch(layer)
        return layer(x, indices)
    finally:
        for module in layer.modules():
            module.__class__ = FAST.get(type(module), type(module))


def test_gate_and_up_that_differ_in_groups_are_two_products(kernels):
    layer = glu()
    layer.gate_proj = linear(group_size=32)
    x, indices = floats(5, H), ids(5, 2)
    assert rel_rms(array(layer(x, indices)), array(stock_parts(layer, x, indices))) < 3e-2
    assert kernels.calls[0][0] == "moe_mlp"


def test_a_down_projection_of_its_own_bits_is_still_one_call(kernels):
    layer = glu()
    layer.down_proj = linear(n=H, k=F, bits=8)
    x, indices = floats(5, H), ids(5, 2)
    assert rel_rms(array(layer(x, indices)), array(stock_parts(layer, x, indices))) < 3e-2
    assert kernels.calls == [("moe_glu", 10)]


# The kernels have no gradient of their own: it is that of MLX's call.


def test_the_gradient_through_a_linear_layer_is_stocks(kernels):
    layer, x, indices, cotangent = linear(), floats(5, 1, 1, H), ids(5, 2), floats(5, 2, 1, F, seed=3)
    found = mx.grad(lambda x: (layer(x, indices) * cotangent).sum())(x)
    assert kernels.calls == [("grouped_qmm", 10)]
    assert same(found, mx.grad(lambda x: (stock(layer, x, indices) * cotangent).sum())(x))
    assert mx.abs(found).max().item() > 0


def test_the_gradient_through_an_expert_mlp_is_stocks(kernels):
    # Not to the bit: what the projections compute on the way back comes from the kernels again.
    layer, x, indices, cotangent = glu(), floats(5, H), ids(5, 2), floats(5, 2, H, seed=3)
    found = mx.grad(lambda x: (layer(x, indices) * cotangent).sum())(x)
    assert kernels.calls[0] == ("moe_glu", 10)
    expected = mx.grad(lambda x: (stock_parts(layer, x, indices) * cotangent).sum())(x)
    assert rel_rms(array(found), array(expected)) < 2e-2


def test_a_bias_that_is_not_frozen_gets_its_gradient(kernels):
    layer, x, indices = linear(bias=True), floats(5, 1, 1, H), ids(5, 2)
    assert "bias" in layer.trainable_parameters()  # mlx-lm freezes before it puts the bias back
    loss = lambda: layer(x, indices).astype(mx.float32).sum()  # noqa: E731
    _, gradient = nn.value_and_grad(layer, loss)()
    assert mx.abs(gradient["bias"]).sum().item() > 0


def test_unfrozen_scales_take_the_original_path(kernels):
    layer = glu()
    layer.up_proj.unfreeze(keys="scales")
    layer(floats(5, H), ids(5, 2))
    assert kernels.calls == [("grouped_qmm", 10)] * 2  # the two projections that are frozen


def test_training_takes_the_original_path(kernels):
    layer = glu()
    layer.train()
    x, indices = floats(5, H), ids(5, 2)
    assert same(layer(x, indices), stock_parts(layer, x, indices))
    assert kernels.calls == []


@pytest.mark.parametrize("make, x_shape", [(glu, (5, H)), (linear, (5, 1, 1, H))])
def test_a_kernel_that_fails_to_build_at_a_call_is_one_warning_and_stocks_result(
    kernels, monkeypatch, caplog, make, x_shape
):
    def fail(*args):
        raise KernelBuildError("did not compile")

    for name in ("grouped_qmm", "moe_glu"):
        monkeypatch.setattr(ops, name, fail)
    layer, x, indices = make(), floats(*x_shape), ids(5, 2)
    with caplog.at_level(logging.WARNING):
        found = [layer(x, indices) for _ in range(2)]
    assert all(same(out, stock_parts(layer, x, indices)) for out in found)
    assert len(caplog.records) == 1 and "did not compile" in caplog.text


def double(x, indices):
    """Something with the shapes of an expert layer: [..., D], [..., k] -> [..., k, D]."""
    return x[..., None, :] * indices[..., None]


@settings(max_examples=60, deadline=None)
@given(lead=st.lists(st.integers(1, 4), min_size=1, max_size=3), top_k=st.integers(1, 3), most=st.integers(3, 20))
def test_chunks_make_the_whole(lead, top_k, most):
    tokens = int(np.prod(lead))
    x = mx.arange(tokens * 2).reshape(*lead, 2)
    indices = mx.arange(tokens * top_k).reshape(*lead, top_k)
    pieces = []

    def call(x, indices):
        pieces.append(indices.size)
        return double(x, indices)

    assert same(layers.in_chunks(call, x, indices, most), double(x, indices))
    assert max(pieces) <= most and sum(pieces) == indices.size
    assert len(pieces) == (1 if indices.size <= most else -(-tokens // (most // top_k)))


def test_a_large_batch_runs_on_the_kernels_in_chunks(kernels, monkeypatch):
    layer, x, indices = glu(), floats(3, 7, H), ids(3, 7, 2)
    whole = layer(x, indices)
    monkeypatch.setattr(layers, "MAX_ROWS", 10)
    kernels.calls.clear()
    assert same(glu()(x, indices), whole)
    assert [rows for _, rows in kernels.calls] == [10, 10, 10, 10, 2]


@pytest.mark.parametrize("rows", [4, 5, 6])  # below, at and above the limit, in tokens of two rows
def test_what_is_too_much_for_one_launch_of_mlx_is_chunked(kernels, gather_rows, monkeypatch, rows):
    layer, x, indices = glu(), floats(rows, H), ids(rows, 2)
    whole = stock_parts(layer, x, indices)
    gather_rows.clear()
    monkeypatch.setattr(layers, "MAX_STOCK_ROWS", 10)
    layer.train()
    assert same(layer(x, indices), whole)
    assert gather_rows == ([2 * rows] * 3 if rows <= 5 else [10] * 3 + [2] * 3)


@pytest.mark.parametrize("case", GATHERS.values(), ids=GATHERS)
def test_a_linear_layer_is_chunked_too(kernels, gather_rows, monkeypatch, case):
    lead, m, index_shape = case
    layer, x, indices = linear(bias=True), floats(*lead, m, H), ids(*index_shape)
    whole = stock(layer, x, indices)
    gather_rows.clear()
    monkeypatch.setattr(layers, "MAX_STOCK_ROWS", 4)
    layer.train()
    assert same(layer(x, indices), whole)
    size = np.prod(np.broadcast_shapes(lead, index_shape), dtype=int)
    assert max(gather_rows) <= 4 and len(gather_rows) == -(-size // 4)


def test_on_the_cpu_nothing_is_chunked(gather_rows, monkeypatch):
    monkeypatch.setattr(layers, "MAX_STOCK_ROWS", 4)
    glu()(floats(9, H), ids(9, 2))
    assert gather_rows == [18] * 3


@pytest.mark.parametrize("on_gpu", [False, True])
def test_no_rows(kernels, monkeypatch, on_gpu):
    monkeypatch.setattr(device, "on_gpu", lambda: on_gpu)
    assert glu()(floats(0, H), ids(0, 2)).shape == (0, 2, H)
    assert linear()(floats(0, 1, H), ids(0)).shape == (0, 1, F)
    assert kernels.calls == []


def dense(bias=False, k=H, n=F, **kw):
    """An nn.Linear, quantized."""
    return finish(nn.Linear(k, n, bias=bias), **kw)


def embedding(**kw):
    return finish(nn.Embedding(F, H), **kw)


# A layer with H inputs and F outputs, and its product.
DENSE = {
    "linear": (dense, lambda layer: layer),
    "linear with a bias": (lambda **kw: dense(bias=True, **kw), lambda layer: layer),
    "tied output layer": (embedding, lambda layer: layer.as_linear),
}
denses = pytest.mark.parametrize("make, product", DENSE.values(), ids=DENSE)


def stock_product(layer, x):
    """The product of MLX's own class."""
    own = type(layer).original
    return (own.as_linear if own is nn.QuantizedEmbedding else own.__call__)(layer, x)


@denses
@pytest.mark.parametrize("lead", [(), (1,), (32,), (3, 4), (1, 1), (2, 1, 3), (1, 32, 1)], ids=str)
def test_a_dense_layer_takes_x_of_any_rank(kernels, make, product, lead):
    layer, x = make(), floats(*lead, H)
    out, own = product(layer)(x), stock_product(layer, x)
    assert kernels.calls == [("dense_qmm", np.prod(lead, dtype=int))]
    assert out.shape == own.shape == (*lead, F) and out.dtype == own.dtype
    assert rel_rms(array(out), dense_product(x, eligibility.weights(layer, describe(layer)))) < 5e-3
    assert rel_rms(array(out), array(own)) < 2e-2  # MLX on the CPU accumulates in bf16


@denses
@pytest.mark.parametrize("bits", variants.BITS)
@pytest.mark.parametrize("dtype", eligibility.DTYPES)
def test_dense_layers_of_every_format(kernels, make, product, bits, dtype):
    layer, x = make(bits=bits, group_size=32, dtype=dtype), floats(5, H).astype(dtype)
    out = product(layer)(x)
    assert kernels.calls == [("dense_qmm", 5)] and out.dtype == dtype
    assert rel_rms(array(out), array(stock_product(layer, x))) < 2e-2


@denses
def test_a_dense_layer_takes_a_strided_x(kernels, make, product):
    wide = floats(3, 7, 2 * H)
    for x in (wide[:, ::2, H:], wide.swapaxes(0, 1)[..., ::2], wide[:, -1:, :H]):
        assert same(product(make())(x), product(make())(mx.contiguous(x)))
    assert [rows for _, rows in kernels.calls] == [12, 12, 21, 21, 3, 3]


# A layer or x with which a call of 5 rows takes the original path. Of those arrays that `make` makes, both layers have
# the values.
STOCK_DENSE = {
    "33 rows": (Reason.SLOWER, lambda make: (make(), floats(33, H))),
    "33 rows in two axes": (Reason.SLOWER, lambda make: (make(), floats(3, 11, H))),
    "little work": (Reason.SLOWER, lambda make: (with_few_rows(make(), 6), floats(5, H))),
    "no rows": (Reason.EMPTY, lambda make: (make(), floats(0, H))),
    "no rows in two axes": (Reason.EMPTY, lambda make: (make(), floats(3, 0, H))),
    "training": (Reason.TRAINING, lambda make: (train(make()), floats(5, H))),
    "unfrozen scales": (Reason.TRAINING, lambda make: (unfrozen(make()), floats(5, H))),
    "float32 x": (Reason.DTYPE, lambda make: (make(), floats(5, H).astype(mx.float32))),
    "float16 x": (Reason.DTYPE, lambda make: (make(), floats(5, H).astype(mx.float16))),
    "float32 weights": (Reason.DTYPE, lambda make: (make(dtype=mx.float32), floats(5, H))),
    "6 bits": (Reason.BITS, lambda make: (make(bits=6), floats(5, H))),
}


def with_few_rows(layer, rows):
    layer.few_rows = rows
    return layer


def unfrozen(layer):
    layer.unfreeze(keys="scales")
    return layer


@denses
@pytest.mark.parametrize("reason, case", STOCK_DENSE.values(), ids=STOCK_DENSE)
def test_what_a_dense_layer_leaves_to_mlx(kernels, make, product, reason, case):
    layer, x = case(make)
    found = layer.check(x)
    assert isinstance(found, Rejection) and found.reason is reason and found.detail
    out, own = product(layer)(x), stock_product(layer, x)
    assert out.shape == own.shape == (*x.shape[:-1], F) and out.dtype == own.dtype
    assert x.size == 0 or same(out, own)  # MLX divides by zero on the CPU if it has to compute no rows
    assert kernels.calls == []


@denses
def test_on_the_cpu_a_dense_layer_is_mlxs(kernels, monkeypatch, make, product):
    monkeypatch.setattr(device, "on_gpu", lambda: False)
    layer, x = make(), floats(5, H)
    assert layer.check(x).reason is Reason.DEVICE
    assert same(product(layer)(x), stock_product(layer, x)) and kernels.calls == []


@pytest.mark.parametrize("shape", [(5, H + 64), (5, F), (0,)], ids=str)
def test_x_that_does_not_fit_a_dense_layer_is_mlxs_error(kernels, shape):
    layer, x = dense(), floats(*shape)
    with pytest.raises(Exception) as own:
        stock_product(layer, x)
    with pytest.raises(type(own.value)):
        layer(x)
    assert isinstance(layer.check(x), Rejection) and kernels.calls == []


@denses
def test_the_gradient_through_a_dense_layer_is_stocks(kernels, make, product):
    layer, x, cotangent = make(), floats(2, 3, H), floats(2, 3, F, seed=3)
    found = mx.grad(lambda x: (product(layer)(x) * cotangent).sum())(x)
    assert kernels.calls == [("dense_qmm", 6)]
    assert same(found, mx.grad(lambda x: (stock_product(layer, x) * cotangent).sum())(x))
    assert mx.abs(found).max().item() > 0


def test_a_bias_of_a_dense_layer_that_is_not_frozen_gets_stocks_gradient(kernels):
    layer, x = dense(bias=True), floats(5, H)
    layer.unfreeze(keys="bias")
    bias = layer.bias

    def gradient(product):
        _, found = nn.value_and_grad(layer, lambda: (product(layer, x).astype(mx.float32) ** 2).sum())()
        return found["bias"]

    found = gradient(lambda layer, x: layer(x))
    assert kernels.calls == [("dense_qmm", 5)] and same(layer.bias, bias)
    # The square's own gradient depends on the product, which is the kernel's.
    assert rel_rms(array(found), array(gradient(stock_product))) < 2e-2
    layer.freeze()
    layer(x)
    assert len(kernels.calls) == 2


def test_looking_up_tokens_is_mlxs(kernels):
    layer, tokens = embedding(), mx.array([[3, 0], [7, 3]])
    assert same(layer(tokens), nn.QuantizedEmbedding.__call__(layer, tokens))
    assert kernels.calls == [] and "__call__" not in vars(type(layer))
    layer.as_linear(layer(tokens))
    assert kernels.calls == [("dense_qmm", 4)]


@denses
def test_a_dense_kernel_that_fails_to_build_at_a_call_is_one_warning_and_stocks_result(
    kernels, monkeypatch, caplog, make, product
):
    def fail(*args):
        raise KernelBuildError("did not compile")

    monkeypatch.setattr(ops, "dense_qmm", fail)
    layer, x = make(), floats(5, H)
    with caplog.at_level(logging.WARNING):
        assert all(same(product(layer)(x), stock_product(layer, x)) for _ in range(2))
    assert len(caplog.records) == 1 and "did not compile" in caplog.text


@denses
def test_a_dense_layer_compiles(kernels, monkeypatch, make, product):
    # Inside a compiled function only shapes are known: nothing of x may be looked at.
    layer, x = make(), floats(5, H)
    describe(layer)
    monkeypatch.setattr(ops, "dense_qmm", lambda x, w: stock_product(layer, x))
    assert same(mx.compile(product(layer))(x), stock_product(layer, x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", variants.BITS)
def test_describe_takes_a_dense_layer_for_one_expert(bits, bias):
    expected = Projection(1, F, H, Quantization(bits, 64), "bf16", bias)
    assert describe(dense(bias=bias, bits=bits)) == expected
    assert describe(dense(bias=bias, bits=bits, fast=False)) == expected


@pytest.mark.parametrize("name", ["weight", "scales", "biases"])
def test_an_array_of_a_dense_layer_that_was_replaced_is_looked_at(kernels, name):
    layer, x = dense(), floats(5, H)
    layer(x)
    assert kernels.calls == [("dense_qmm", 5)]
    layer[name] = layer[name][None]  # of an expert
    assert layer.check(x).reason is Reason.SHAPE


def test_a_dense_layer_of_few_outputs_is_mlxs(kernels):
    layer, x = dense(n=12), floats(5, H)
    assert layer.check(x).reason is Reason.SHAPE
    assert same(layer(x), stock_product(layer, x)) and kernels.calls == []


@pytest.fixture
def launches(monkeypatch):
    """The variants that are launched, on a CPU that counts as a GPU; results are zeros."""
    found = []

    def launch(variant, inputs, outputs, numbers, **kw):
        found.append(variant)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    monkeypatch.setattr(ops, "launch", launch)
    monkeypatch.setattr(ops, "bind", lambda variant, *rest, **kw: lambda inputs: launch(variant, inputs, *rest, **kw))
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(ops, "own_their_buffers", eligibility.contiguous_on_host)
    monkeypatch.delenv(envs.TILE.name, raising=False)
    return found


def kinds(launches):
    """What was launched, without quantization and dtype."""
    return [re.sub("_affine.*_m|_affine.*", " m", variant.id) for variant in launches]


def test_few_rows_are_one_launch_a_product(launches):
    x, indices = floats(5, H), ids(5, 2)
    assert glu()(x, indices).shape == (5, 2, H)
    assert kinds(launches) == ["decode_glu m8", "decode_plain m8"]
    launches.clear()
    assert glu(activation=SwigluOAI(), bias=True)(x, indices).shape == (5, 2, H)
    assert kinds(launches) == ["decode_plain m8"] * 3
    launches.clear()
    assert linear()(floats(5, 1, 1, H), indices).shape == (5, 2, 1, F)
    assert kinds(launches) == ["decode_plain m8"]


def test_many_rows_are_routed_first(launches):
    assert glu()(floats(40, H), ids(40, 2)).shape == (40, 2, H)
    assert kinds(launches) == ["route_4bit", "prefill_sm80_glu m32", "prefill_sm80_plain m32"]
    launches.clear()
    linear()(floats(40, 1, 1, H), ids(40, 2))
    assert kinds(launches) == ["route_4bit", "prefill_sm80_plain m32"]


@pytest.mark.parametrize("name, tile", dispatch.FORCIBLE.items())
def test_a_forced_tile_is_the_prefill_kernel_for_few_rows(launches, monkeypatch, name, tile):
    monkeypatch.setenv(envs.TILE.name, name)
    for rows in (1, 5):
        launches.clear()
        glu()(floats(rows, H), ids(rows, 2))
        assert kinds(launches) == ["route_4bit", *(f"{tile.kernel}_{kind} m{tile.m}" for kind in ("glu", "plain"))]


@pytest.mark.parametrize("rows, m", [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_dense_rows_are_one_launch(launches, rows, m):
    assert dense()(floats(rows, H)).shape == (rows, F)
    assert kinds(launches) == [f"decode_dense m{m}"]


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint8])
def test_ids_of_any_integers_become_those_of_the_kernels(dtype):
    found = ops._words(mx.array([3, 0, 7], dtype))
    assert found.dtype in (mx.int32, mx.uint32) and found.tolist() == [3, 0, 7]


def projection(**changes):
    return Projection(**{"experts": E, "n": F, "k": H, "quantization": Quantization(4, 64), "dtype": "bf16"} | changes)


def with_array(name, value):
    layer = linear()
    layer[name] = value
    mx.eval(layer.parameters())
    return layer


def with_attribute(name, value):
    layer = linear()
    setattr(layer, name, value)
    return layer


def halves():
    """The second half of a fused gate and up projection, as mlx-lm makes it out of a checkpoint."""
    layer, both = linear(fast=False), linear(n=2 * F, fast=False)
    for name in ("weight", "scales", "biases"):
        layer[name] = mx.split(both[name], 2, axis=1)[1]
    mx.eval(layer.parameters())
    return layer


def build_failure(monkeypatch):
    def fail(*args):
        raise KernelBuildError("no")

    monkeypatch.setattr(device, "current", lambda: Device("fake", (9, 0)))
    monkeypatch.setattr(jit, "load", fail)
    holder = nn.Module()
    holder.layer = glu(fast=False)
    (row,) = mlx_moe_fast.patch(holder).layers
    return Rejection(Reason(row.reason), row.detail)


def current(monkeypatch, found):
    monkeypatch.setattr(device, "current", lambda: found)
    return check_device()


def without_launch(monkeypatch):
    monkeypatch.setattr(launch, "SUPPORTED", False)
    return check_device()


def call(layer, x, indices):
    """Why a call would not run on the kernels, if so."""
    found = layer.check(x, indices)
    return found if isinstance(found, Rejection) else None


def slower(monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    layer = glu()
    layer.few_rows = 11
    return call(layer, floats(5, H), ids(5, 2))


def empty(monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    return call(glu(), floats(0, H), ids(0, 2))


def train(layer):
    layer.train()
    return layer


# One construction for each reason.
REASONS = {
    Reason.NOT_QUANTIZED: lambda _: describe(SwitchLinear(H, F, E)),
    Reason.TYPE: lambda _: describe(LoRASwitchLinear.from_base(linear())),
    Reason.MODE: lambda _: describe(QuantizedSwitchLinear(H, F, E, False, 32, 4, mode="mxfp4")),
    Reason.BITS: lambda _: describe(linear(bits=6)),
    Reason.GROUP_SIZE: lambda _: describe(with_attribute("group_size", 16)),
    Reason.DTYPE: lambda _: describe(linear(dtype=mx.float32)),
    Reason.SHAPE: lambda _: describe(linear(n=12)),
    Reason.STRIDES: lambda _: describe(halves()),
    Reason.TRAINING: lambda _: call(train(glu()), floats(5, H), ids(5, 2)),
    Reason.DEVICE: lambda _: call(glu(), floats(5, H), ids(5, 2)),
    Reason.MLX_VERSION: without_launch,
    Reason.BUILD: build_failure,
    Reason.SLOWER: slower,
    Reason.EMPTY: empty,
}


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_is_given(monkeypatch, reason):
    monkeypatch.setattr(ops, "own_their_buffers", eligibility.contiguous_on_host)
    found = REASONS[reason](monkeypatch)
    assert isinstance(found, Rejection) and found.reason is reason
    assert str(found) == f"{reason.value}: {found.detail}" and found.detail


def test_no_reason_is_without_a_construction():
    assert set(REASONS) == set(Reason)


def test_every_reason_is_explained():
    assert set(HELP) == set(Reason) and all(HELP.values())


# What else gives a reason.
MORE = {
    "global scale": (Reason.MODE, lambda: with_attribute("global_scale", 1.0)),
    "2 bits": (Reason.BITS, lambda: linear(bits=2)),
    "scales of another dtype than biases": (
        Reason.DTYPE,
        lambda: with_array("biases", floats(E, F, 1).astype(mx.float16)),
    ),
    "bias of another dtype": (Reason.DTYPE, lambda: with_array("bias", mx.zeros((E, F)))),
    "weight of one matrix": (Reason.SHAPE, lambda: with_array("weight", linear()["weight"][0])),
    "weight of another type": (
        Reason.SHAPE,
        lambda: with_array("weight", linear()["weight"].astype(mx.int32)),
    ),
    "scales of fewer experts": (Reason.SHAPE, lambda: with_array("scales", floats(E - 1, F, 1))),
    "biases of other groups": (Reason.SHAPE, lambda: with_array("biases", floats(E, F, 2))),
    "bias of another width": (Reason.SHAPE, lambda: with_array("bias", floats(E, F + 8))),
    "expert of 2 GiB": (Reason.SHAPE, lambda: huge()),
    "every second expert": (Reason.STRIDES, lambda: with_array("weight", linear_of(2 * E)["weight"][::2])),
    "broadcast scales": (
        Reason.STRIDES,
        lambda: with_array("scales", mx.broadcast_to(floats(1, F, 1), (E, F, 1))),
    ),
}


def linear_of(experts):
    return finish(SwitchLinear(H, F, experts, bias=False))


def huge():
    """Shapes alone: nothing of it is ever evaluated."""
    layer, n, k = linear(), 1 << 17, 1 << 15
    layer.weight = mx.zeros((1, n, k // 8), mx.uint32)
    layer.scales = layer.biases = mx.zeros((1, n, k // 64), mx.bfloat16)
    return layer


@pytest.mark.parametrize("reason, make", MORE.values(), ids=MORE)
def test_describe_rejects(reason, make):
    found = describe(make())
    assert isinstance(found, Rejection) and found.reason is reason, found


@pytest.mark.parametrize("bits", variants.BITS)
@pytest.mark.parametrize("group_size", variants.GROUP_SIZES)
@pytest.mark.parametrize("dtype", eligibility.DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_describe_accepts_whatever_has_a_kernel(bits, group_size, dtype, bias):
    layer = linear(k=128, bits=bits, group_size=group_size, dtype=dtype, bias=bias)
    expected = Projection(E, F, 128, Quantization(bits, group_size), eligibility.DTYPES[dtype], bias)
    assert describe(layer) == expected


def test_an_array_that_another_layer_shares_is_no_view():
    layer = linear()
    other = linear()
    other.weight = layer.weight
    assert isinstance(describe(other), Projection)


def test_what_was_found_fit_is_not_looked_at_again(monkeypatch):
    layer = linear()
    found = describe(layer)
    monkeypatch.setattr(eligibility, "_inspect", None)
    assert describe(layer) is found


@pytest.mark.parametrize("name", ["weight", "scales", "biases"])
def test_an_array_that_was_replaced_is_looked_at(name):
    layer = linear()
    describe(layer)
    layer[name] = layer[name][: E - 1]
    assert describe(layer).reason is Reason.SHAPE


def test_a_bias_that_comes_later_is_seen():
    layer = linear()
    assert not describe(layer).has_bias
    layer.bias = mx.zeros((E, F), mx.bfloat16)
    assert describe(layer).has_bias


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"up": projection(quantization=Quantization(4, 32))}, None),  # fused no more, grouped still
        ({"up": projection(has_bias=True)}, None),
        ({"down": projection(n=H, k=F, quantization=Quantization(8, 32))}, None),
        ({"up": projection(quantization=Quantization(8, 64))}, Reason.BITS),
        ({"up": projection(n=2 * F)}, Reason.SHAPE),
        ({"up": projection(experts=E + 1)}, Reason.SHAPE),
        ({"up": projection(dtype="fp16")}, Reason.SHAPE),
        ({"down": projection(n=H, k=2 * F)}, Reason.SHAPE),
        ({"down": projection(n=H, k=F, experts=2 * E)}, Reason.SHAPE),
        ({"down": projection(n=H, k=F, dtype="fp16")}, Reason.SHAPE),
    ],
)
def test_projections_that_can_follow_each_other(changes, reason):
    parts = {"up": projection(), "gate": projection(), "down": projection(n=H, k=F)} | changes
    found = check_chain(list(parts.values()))
    assert (found.reason if found else None) == reason


@pytest.mark.parametrize(
    "x, indices, reason",
    [
        ((5, H), (5, 2), None),
        ((5, H + 64), (5, 2), Reason.SHAPE),
        ((4, H), (5, 2), Reason.SHAPE),
        ((1, 5, H), (5, 2), Reason.SHAPE),
        ((0, H), (0, 2), Reason.EMPTY),
        ((5, H), (5, 0), Reason.EMPTY),
    ],
)
def test_calls_of_an_expert_mlp(kernels, x, indices, reason):
    found = call(glu(), floats(*x), ids(*indices))
    assert (found.reason if found else None) == reason


@pytest.mark.parametrize(
    "x, indices, reason",
    [
        ((5, 1, H), (5,), None),
        ((H,), (5,), Reason.SHAPE),
        ((5, 1, F), (5,), Reason.SHAPE),
        ((5, 0, H), (5,), Reason.EMPTY),
        ((0, 1, H), (1,), Reason.EMPTY),
    ],
)
def test_calls_of_a_linear_layer(kernels, x, indices, reason):
    found = call(linear(), floats(*x), ids(*indices))
    assert (found.reason if found else None) == reason


def test_activations_of_another_dtype_take_the_original_path(kernels):
    x, indices = floats(5, H).astype(mx.float32), ids(5, 2)
    assert call(glu(), x, indices).reason is Reason.DTYPE
    assert glu()(x, indices).shape == (5, 2, H) and kernels.calls == []


@pytest.mark.parametrize(
    "found, reason",
    [
        (None, Reason.DEVICE),
        (Device("old", (7, 5)), Reason.DEVICE),
        (Device("oldest", (8, 0)), None),
        (Device("newest", (12, 1)), None),
    ],
)
def test_devices(monkeypatch, found, reason):
    rejection = current(monkeypatch, found)
    assert (rejection.reason if rejection else None) == reason


@pytest.mark.parametrize(
    "capability, arch",
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 1), "sm_121a")],
)
def test_architectures(capability, arch):
    assert Device("", capability).arch == arch
