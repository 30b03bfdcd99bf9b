"""Patched layers and models on a GPU against MLX's own and against NumPy."""

import subprocess
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from cases import Case, floats, make_ids
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchMLP
from numerics import array, check, grouped, moe_glu, rel_rms

import mlx_moe_fast
from mlx_moe_fast import device, dispatch, eligibility, envs, launch, layers, ops
from mlx_moe_fast.problem import Quantization
from mlx_moe_fast.variants import WGMMA, WGMMA_ARCH

pytestmark = pytest.mark.gpu
H, F, E = 256, 128, 6


def make(kind, dtype=mx.bfloat16, bits=4, **kw):
    """A quantized layer of mlx-lm, frozen and in inference mode, with the bias not zero."""
    mx.random.seed(0)
    layer = kind(H, F, E, **kw)
    layer.set_dtype(dtype)
    for _, part in layer.named_modules():
        if "bias" in part:
            part.bias = mx.random.normal(part.bias.shape).astype(dtype)
    holder = nn.Module()
    holder.layer = layer
    nn.quantize(holder, 64, bits)
    holder.freeze()
    holder.eval()
    mx.eval(holder.parameters())
    return holder


def inputs(*lead, top_k=2, kind="distinct", dtype="bf16"):
    rng = np.random.default_rng(3)
    rows = int(np.prod(lead))
    ids = make_ids(rng, rows, top_k, E, kind).reshape(*lead, top_k)
    return floats(rng, (*lead, H), dtype), mx.array(ids)


def weights_of(layer):
    found = eligibility.describe(layer)
    assert not isinstance(found, eligibility.Rejection), found
    return eligibility.weights(layer, found)


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    """Our kernels run where MLX's own would be faster, too."""
    monkeypatch.setattr(dispatch, "MIN_WORK", 0)


def test_mlx_keeps_the_machine_code_of_what_a_patched_layer_launches():
    holder = make(SwitchGLU)
    assert mlx_moe_fast.patch(holder).replaced
    plan = layers.plan_experts(holder.layer, holder.layer.parts)
    wanted = ops.variants_of(plan[1:], True)
    assert {launch._loaded[v.id].code for v in wanted} == {b""}


def test_a_remembered_call_gives_the_same_bits():
    holder, (x, ids) = make(SwitchGLU), inputs(5)
    mlx_moe_fast.patch(holder)
    first = holder.layer(x, ids)
    assert len(holder.layer._moe_fast_calls) == 1
    for _ in range(3):
        assert mx.array_equal(holder.layer(x, ids), first)


@pytest.fixture
def no_stock(monkeypatch):
    """Any call of MLX's gather_qmm is a failure."""

    def fail(*args, **kw):
        raise AssertionError("the stock path ran")

    monkeypatch.setattr(mx, "gather_qmm", fail)


@pytest.mark.parametrize("lead", [(1, 1), (1, 7), (3, 40), (90,)], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_switch_glu(lead, top_k, bias, no_stock):
    model = make(SwitchGLU, bias=bias)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(*lead, top_k=top_k)
    out = model.layer(x, ids)
    assert out.shape == (*lead, top_k, H) and out.dtype == x.dtype
    rows = array(x).reshape(-1, H).repeat(top_k, axis=0)
    parts = [weights_of(model.layer[name]) for name in ("gate_proj", "up_proj", "down_proj")]
    check(out.reshape(-1, H), moe_glu(rows, array(ids).flatten(), *parts), "bf16", 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_switch_mlp(dtype, no_stock):
    model = make(SwitchMLP, {"bf16": mx.bfloat16, "fp16": mx.float16}[dtype], activation=nn.ReLU(), bias=True)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(2, 30, dtype=dtype)
    rows, flat = array(x).reshape(-1, H).repeat(2, axis=0), array(ids).flatten()
    hidden = np.maximum(grouped(rows, flat, weights_of(model.layer.fc1)), 0)
    check(model.layer(x, ids).reshape(-1, H), grouped(hidden, flat, weights_of(model.layer.fc2)), dtype, 2)


def test_other_activation(no_stock):
    model = make(SwitchGLU, activation=SwigluOAI(), bias=True)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(2, 30)
    rows, flat = array(x).reshape(-1, H).repeat(2, axis=0), array(ids).flatten()
    up, gate, down = (weights_of(model.layer[name]) for name in ("up_proj", "gate_proj", "down_proj"))
    hidden = model.layer.activation(mx.array(grouped(rows, flat, up)), mx.array(grouped(rows, flat, gate)))
    check(model.layer(x, ids).reshape(-1, H), grouped(array(hidden), flat, down), "bf16", 3)


@pytest.mark.parametrize("kind", ["sorted", "duplicates"])
@pytest.mark.parametrize(
    "x_lead, ids_lead", [((90,), (90,)), ((5, 1), (5, 4)), ((6, 5), (1, 5)), ((1,), (7,))], ids=str
)
@pytest.mark.parametrize("m", [1, 3])
def test_switch_linear_alone(x_lead, ids_lead, m, kind, no_stock):
    """gather_qmm's own contract: x [..., M, K], indices [...], leading axes broadcast."""
    model = make(QuantizedSwitchLinear, bias=True)
    mlx_moe_fast.patch(model, strict=True)
    rng = np.random.default_rng(4)
    x = floats(rng, (*x_lead, m, H), "bf16")
    ids = make_ids(rng, int(np.prod(ids_lead)), 1, E, kind).reshape(ids_lead)
    out = model.layer(x, mx.array(ids), sorted_indices=kind == "sorted")
    batch = np.broadcast_shapes(x_lead, ids_lead)
    rows = np.broadcast_to(array(x), (*batch, m, H)).reshape(-1, H)
    flat = np.broadcast_to(ids[..., None], (*batch, m)).flatten()
    assert out.shape == (*batch, m, F)
    check(out.reshape(-1, F), grouped(rows, flat, weights_of(model.layer)), "bf16")


def test_ids_out_of_range_give_zeros(no_stock):
    model = make(SwitchGLU)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(1, 50, kind="bad")
    out, flat = array(model.layer(x, ids)).reshape(-1, H), array(ids).flatten()
    bad = (flat < 0) | (flat >= E)
    assert bad.any() and (out[bad] == 0).all() and (out[~bad] != 0).any(axis=1).all()


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint8], ids=str)
def test_index_dtypes(dtype, no_stock):
    model = make(SwitchGLU)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(1, 20)
    assert mx.array_equal(model.layer(x, ids.astype(dtype)), model.layer(x, ids))


def test_no_rows():
    model = make(SwitchGLU)
    mlx_moe_fast.patch(model, strict=True)
    assert model.layer(mx.zeros((1, 0, H), mx.bfloat16), mx.zeros((1, 0, 2), mx.int32)).shape == (1, 0, 2, H)


def test_strided_inputs(no_stock):
    model = make(SwitchGLU)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(4, 20)
    wide = mx.concatenate([x, x + 1], axis=-1)[..., :H]
    turned = mx.contiguous(ids.swapaxes(0, 1)).swapaxes(0, 1)
    assert mx.array_equal(model.layer(wide, turned), model.layer(x, ids))


@pytest.mark.parametrize("name", ["weight", "scales", "biases"])
def test_views_are_found(name):
    """Only an array that owns its buffer is given to the kernels."""
    part = make(SwitchGLU).layer.up_proj
    whole = part[name]
    views = [
        mx.split(mx.concatenate([whole, whole], axis=1), 2, axis=1)[0],
        mx.concatenate([mx.zeros((1000, *whole.shape[1:]), whole.dtype), whole])[1000:],
        mx.contiguous(whole.swapaxes(1, 2)).swapaxes(1, 2),
    ]
    for view in views:
        part[name] = view
        assert eligibility.describe(part).reason is eligibility.Reason.STRIDES
    part[name] = whole + 0 if name == "weight" else mx.abs(whole)
    assert not isinstance(eligibility.describe(part), eligibility.Rejection)


def test_more_rows_than_stock_takes():
    """65,536 rows: MLX's own call fails, so the stock path is taken in pieces and ours as it is."""
    model = make(SwitchGLU)
    x, ids = inputs(1, 33_000)
    mlx_moe_fast.patch(model, strict=True)
    ours = model.layer(x, ids)
    some = mx.array([0, 1, 16_383, 16_384, 32_767, 32_768, 32_999])
    rows = array(x)[0][array(some)].repeat(2, axis=0)
    parts = [weights_of(model.layer[name]) for name in ("gate_proj", "up_proj", "down_proj")]
    reference = moe_glu(rows, array(ids)[0][array(some)].flatten(), *parts)
    check(ours[0][some].reshape(-1, H), reference, "bf16", 3)
    model.train()  # now MLX's own path
    assert rel_rms(array(model.layer(x, ids)[0][some]).reshape(-1, H), reference) < 0.02


def test_gradient_is_stocks():
    model = make(SwitchGLU)
    x, ids = inputs(1, 40)
    loss = lambda x: model.layer(x, ids).astype(mx.float32).square().sum()  # noqa: E731
    stock = mx.grad(loss)(x)
    mlx_moe_fast.patch(model, strict=True)
    ours = mx.grad(loss)(x)
    assert rel_rms(array(ours), array(stock)) < 0.01


def test_compiled_and_from_another_thread(no_stock):
    model = make(SwitchGLU)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(1, 40)
    expected = model.layer(x, ids)
    mx.eval(expected)
    assert mx.array_equal(mx.compile(lambda x, i: model.layer(x, i))(x, ids), expected)
    same = []

    def work():
        with mx.stream(mx.new_stream(mx.gpu)):
            same.append(mx.array_equal(model.layer(mx.array(array(x)).astype(x.dtype), ids), expected).item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert same == [True]


@pytest.mark.parametrize("tile", dispatch.FORCIBLE)
def test_forced_tile(tile, monkeypatch, no_stock):
    if dispatch.FORCIBLE[tile] is WGMMA and device.arch() != WGMMA_ARCH:
        pytest.skip("needs wgmma")
    monkeypatch.setenv(envs.TILE.name, tile)
    model = make(SwitchGLU)
    mlx_moe_fast.patch(model, strict=True)
    x, ids = inputs(1, 40)
    rows = array(x).reshape(-1, H).repeat(2, axis=0)
    parts = [weights_of(model.layer[name]) for name in ("gate_proj", "up_proj", "down_proj")]
    check(model.layer(x, ids).reshape(-1, H), moe_glu(rows, array(ids).flatten(), *parts), "bf16", 3)


def test_build_failure_falls_back(monkeypatch, tmp_path, caplog):
    from mlx_moe_fast import jit

    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "cache_dir", lambda: None)
    monkeypatch.setitem(jit.sources(), "route.cu", "this is no CUDA")
    layers.warn_once.cache_clear()
    model = make(SwitchGLU)
    result = mlx_moe_fast.patch(model)
    assert not result.replaced and result.skipped[0].reason == "build"
    assert sum("route" in r.message for r in caplog.records) == 1
    with pytest.raises(mlx_moe_fast.NotAccelerated, match="build"):
        mlx_moe_fast.patch(model, strict=True)


@pytest.fixture(scope="module")
def tiny(tiny_model_dir):
    return mlx_lm.load(str(tiny_model_dir))


def test_greedy_text_equals_stocks(tiny):
    model, tokenizer = tiny
    prompt = list(range(5, 300))
    texts = []
    for side in (mlx_moe_fast.unpatch, mlx_moe_fast.patch):
        side(model)
        texts.append(mlx_lm.generate(model, tokenizer, prompt, max_tokens=24))
    mlx_moe_fast.unpatch(model)
    assert texts[0] == texts[1]


def test_logits_of_a_model(tiny):
    model, _ = tiny
    tokens = mx.array([list(range(5, 200))])
    stock = array(model(tokens))
    with mlx_moe_fast.patched(model) as report:
        assert report.replaced and not report.skipped
        assert rel_rms(array(model(tokens)), stock) < 0.02
    np.testing.assert_array_equal(array(model(tokens)), stock)


def test_command_line(tiny_model_dir):
    command = [
        sys.executable,
        "-m",
        "mlx_moe_fast",
        "generate",
        "--model",
        str(tiny_model_dir),
        "-m",
        "4",
        "-p",
        "hi",
    ]
    run = subprocess.run([*command, "--moe-fast", "require", "--moe-fast-report"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "prefill_sm80" in run.stderr and "Generation" in run.stdout


def test_case_names():
    case = Case(2048, 8, 2048, 768, 64, Quantization(4, 64))
    assert str(case) == "T2048-A8-H2048-F768-E64-affine4g64-bf16"
