"""Calls that are remembered: the same results, and nothing that has changed goes unnoticed."""

import copy
import pickle
import threading

import mlx.core as mx
import mlx.nn as nn
import mlx.utils
import pytest
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.lora import LoRASwitchLinear
from numerics import array, rel_rms
from test_layers import F, H, finish, floats, glu, ids, kernels, same, stock  # noqa: F401

from mlx_moe_fast import calls, device, eligibility, layers, ops
from mlx_moe_fast.patching import unpatch


def linear(bias=False, **kw):
    return finish(nn.Linear(H, F, bias=bias), **kw)


MAKERS = {"dense": lambda: (linear(), (floats(3, H),)), "experts": lambda: (glu(), (floats(3, H), ids(3, 2)))}


@pytest.fixture(params=MAKERS)
def known(request, kernels, monkeypatch):  # noqa: F811
    """A layer and inputs like those that it has been called with; `known.checks` counts the calls that are checked."""

    class Known:
        checks = 0

    found = Known()
    found.layer, found.inputs = MAKERS[request.param]()
    found.expected = found.layer(*found.inputs)
    mx.eval(found.inputs, found.expected)
    original = type(found.layer).check

    def check(self, *args):
        found.checks += 1
        return original(self, *args)

    monkeypatch.setattr(type(found.layer), "check", check)
    return found


def projection(layer):
    """A layer that holds arrays."""
    return layer if "weight" in layer else layer.gate_proj


def test_a_call_like_one_before_is_not_checked_again(known):
    assert same(known.layer(*known.inputs), known.expected) and known.checks == 0
    assert same(
        known.layer(known.inputs[0] * 2, *known.inputs[1:]), known.layer(known.inputs[0] * 2, *known.inputs[1:])
    )
    assert known.checks == 0


def test_other_rows_are_another_call(known):
    known.layer(*(a[:2] for a in known.inputs))
    assert known.checks == 1
    known.layer(*(a[:2] for a in known.inputs)), known.layer(*known.inputs)
    assert known.checks == 1


def test_another_dtype_is_another_call(known):
    x, *rest = known.inputs
    out = known.layer(x.astype(mx.float32), *rest)
    assert known.checks == 1 and out.dtype == mx.float32


@pytest.mark.parametrize("name", ["weight", "scales", "biases"])
def test_a_replaced_array_is_noticed(known, name):
    part = projection(known.layer)
    part[name] = part[name] + 1 if name != "weight" else mx.bitwise_xor(part[name], mx.full((), 0x11111111, mx.uint32))
    out = known.layer(*known.inputs)
    assert known.checks == 1 and not same(out, known.expected)
    assert rel_rms(array(out), array(stock(known.layer, *known.inputs))) < 2e-2


def test_a_bias_that_appears_is_noticed(kernels):  # noqa: F811
    layer, x = linear(), floats(3, H)
    before = layer(x)
    layer.bias = mx.ones((F,), mx.bfloat16)
    assert not same(layer(x), before) and same(layer(x), stock(layer, x)) or mx.allclose(layer(x), before + 1, atol=0.1)


def test_training_is_noticed(known):
    known.layer.train()
    known.layer(*known.inputs)
    assert known.checks == 1
    known.layer.eval()
    known.layer(*known.inputs)
    assert known.checks == 1


def test_scales_that_are_trained_are_noticed(known):
    projection(known.layer).unfreeze(keys=["scales"], recurse=False)
    assert same(known.layer(*known.inputs), stock(known.layer, *known.inputs)) and known.checks == 1


def test_another_device_is_noticed(known, monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: False)
    assert same(known.layer(*known.inputs), stock(known.layer, *known.inputs)) and known.checks == 1


def test_an_adapter_is_noticed(kernels):  # noqa: F811
    layer, inputs = MAKERS["experts"]()
    layer(*inputs)
    adapter = LoRASwitchLinear.from_base(layer.up_proj, r=2)
    adapter.lora_b = adapter.lora_b + 1
    layer.up_proj = adapter
    calls_before = len(kernels.calls)
    layer(*inputs)
    assert "moe_glu" not in [name for name, _ in kernels.calls[calls_before:]]


def test_a_projection_of_another_class_with_the_same_arrays_is_noticed(known):
    class Mine(type(projection(known.layer))):
        def __call__(self, *args, **kw):
            return super().__call__(*args, **kw) * 2

    part = projection(known.layer)
    if part is known.layer:
        pytest.skip("the layer itself is another one then")
    part.__class__ = Mine
    known.layer(*known.inputs)
    assert known.checks == 1


def test_another_activation_is_noticed(kernels):  # noqa: F811
    layer, inputs = MAKERS["experts"]()
    layer(*inputs)
    layer.activation = lambda up, gate: up * 0
    assert mx.abs(layer(*inputs)).max().item() == 0


def test_gradients_after_a_remembered_call_are_stocks(known):
    x, *rest = known.inputs
    found = mx.grad(lambda x: known.layer(x, *rest).astype(mx.float32).sum())(x)
    expected = mx.grad(lambda x: stock(known.layer, x, *rest).astype(mx.float32).sum())(x)
    assert known.checks == 1 and same(found, expected)


def test_a_compiled_function_after_a_remembered_call(known):
    """It would have the fakes' NumPy look at what is not there yet; a kernel is lazy."""
    seen = []
    original = calls.traced

    def traced(arrays):
        seen.append(original(arrays))
        return True

    layers.traced, before = traced, layers.traced
    try:
        with pytest.raises((ValueError, RuntimeError)):
            mx.compile(lambda *inputs: known.layer(*inputs))(*known.inputs)
    finally:
        layers.traced = before
    assert True in seen


def test_traced_knows_transformations_of_its_own_arrays():
    x, y = mx.ones(3), mx.ones(2)
    assert not calls.traced((x,)) and not calls.traced((x, y))
    found = []

    def look(a):
        found.append((calls.traced((a,)), calls.traced((x,)), calls.traced((x, a))))
        return a.sum()

    look(x)
    assert found.pop() == (False, False, False)
    for transformation in (mx.grad, mx.vmap, mx.compile):
        transformation(look)(mx.ones(3))
        traced, other, both = found.pop()
        assert traced and not other and both


def test_where_compilation_is_off_every_call_is_traced():
    """That is slower, and right."""
    mx.disable_compile()
    try:
        assert calls.traced((mx.ones(3),)) and calls.traced((mx.ones(3),))
    finally:
        mx.enable_compile()


def test_memory_is_no_parameter_and_is_not_copied(known):
    names = dict(mlx.utils.tree_flatten(known.layer.parameters()))
    assert all("moe_fast" not in name for name in names)
    for made in (copy.deepcopy(known.layer), pickle.loads(pickle.dumps(known.layer._moe_fast_calls))):
        assert len(getattr(made, "_moe_fast_calls", made)) == 0
    twin = copy.deepcopy(known.layer)
    assert same(twin(*known.inputs), known.expected) and known.checks == 1


def test_unpatched_layers_forget(known):
    holder = nn.Module()
    holder.layer = known.layer
    unpatch(holder)
    assert not hasattr(known.layer, "_moe_fast_calls")
    assert type(known.layer) in (nn.QuantizedLinear, SwitchGLU)


def test_layers_share_no_memory(kernels):  # noqa: F811
    (one, inputs), (other, _) = MAKERS["dense"](), MAKERS["dense"]()
    one(*inputs)
    assert len(one._moe_fast_calls) == 1 and len(other._moe_fast_calls) == 0 == len(calls.NONE)


def test_threads_may_call_one_layer(known):
    outs = []

    def call():
        out = known.layer(*known.inputs)
        outs.append(same(out, known.expected))  # a lazy array belongs to its thread

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outs == [True] * 4


def test_seen_is_about_these_arrays_of_this_class():
    layer = linear()
    seen = eligibility.Seen(layer, None)
    assert [
        a is b
        for a, b in zip(seen.arrays(layer), (layer.weight, layer.scales, layer.biases, layer.scales), strict=True)
    ]
    assert eligibility.NOTHING_SEEN.arrays(layer) is None
    layer.__class__ = nn.QuantizedLinear
    assert seen.arrays(layer) is None


# ---- compiled by MLX -------------------------------------------------------------------------------------------------


@pytest.fixture
def lazy(monkeypatch):
    """A dense layer whose kernel is MLX's own, remembered for three rows; `runs` counts how often its Python ran."""

    class Lazy:
        runs = 0

    found = Lazy()

    def product(x, weights):
        p = weights.projection.quantization
        arrays = weights.weight, weights.scales, weights.biases
        return mx.quantized_matmul(x, *arrays, transpose=True, group_size=p.group_size, bits=p.bits)

    def bind(projection, _):
        def run(x, *arrays):
            found.runs += 1
            return product(x, ops.Weights(projection, *arrays[:3]))

        return run

    monkeypatch.setattr(ops, "dense_qmm", product)
    monkeypatch.setattr(ops, "bind_dense", bind)
    monkeypatch.setattr(ops, "own_their_buffers", eligibility.contiguous_on_host)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    found.layer, found.x = linear(), floats(3, H)
    found.expected = found.layer(found.x)
    assert same(found.layer(found.x), found.expected) and found.runs == 1
    return found


def test_the_python_of_a_kernel_runs_once(lazy):
    for factor in (2, 4):
        assert same(lazy.layer(lazy.x * factor), lazy.expected * factor)
    assert lazy.runs == 1


def test_other_weights_are_not_those_of_the_first_call(lazy):
    lazy.layer.scales, lazy.layer.biases = lazy.layer.scales * 2, lazy.layer.biases * 2
    assert same(lazy.layer(lazy.x), lazy.expected * 2) and same(lazy.layer(lazy.x), lazy.expected * 2)


def test_layers_do_not_share_what_is_compiled(lazy):
    other = linear()
    other.scales, other.biases = other.scales * 4, other.biases * 4
    assert same(other(lazy.x), lazy.expected * 4) and same(other(lazy.x), lazy.expected * 4)
    assert same(lazy.layer(lazy.x), lazy.expected)


@pytest.mark.parametrize("transformation", ["grad", "compile"])
def test_a_transformation_that_looks_on_sees_a_checked_call(lazy, transformation):
    checks, check = [], type(lazy.layer).check
    lazy.layer.check = lambda x: checks.append(x.shape) or check(lazy.layer, x)
    if transformation == "grad":
        found = mx.grad(lambda x: lazy.layer(x).sum())(lazy.x)
        expected = mx.grad(lambda x: stock(lazy.layer, x).sum())(lazy.x)
    else:
        found, expected = mx.compile(lambda x: lazy.layer(x) * 2)(lazy.x), lazy.expected * 2
    assert same(found, expected) and len(checks) == 1
    assert same(lazy.layer(lazy.x), lazy.expected) and len(checks) == 1


def test_a_second_thread_and_a_second_stream_compile_for_themselves(lazy):
    outs, runs = [], []

    def call():
        for _ in range(4):
            outs.append(same(lazy.layer(lazy.x), lazy.expected))
            runs.append(lazy.runs)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert outs == [True] * 4 and 1 < runs[0] and runs[1] == runs[3]  # MLX may compile twice in a new thread
    with mx.stream(mx.new_stream(mx.cpu)):
        assert same(lazy.layer(lazy.x), lazy.expected)
    assert lazy.runs == runs[3] + 1 and same(lazy.layer(lazy.x), lazy.expected) and lazy.runs == runs[3] + 1


def test_where_compilation_is_off_results_are_the_same(lazy):
    mx.disable_compile()
    try:
        assert same(lazy.layer(lazy.x), lazy.expected)
    finally:
        mx.enable_compile()
