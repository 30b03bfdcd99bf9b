"""Whole MoE blocks: every family in the table against its own code, and everything that sends a call back to it."""

import importlib
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx.utils
import pytest
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.lora import LoRASwitchLinear
from numerics import array, rel_rms
from test_layers import kernels, kinds, launches  # noqa: F401

import mlx_moe_fast
from mlx_moe_fast import blocks, device, jit, layers, selftest
from mlx_moe_fast.blocks import FORMS, FastBlock, fast, fingerprint, form_of
from mlx_moe_fast.errors import KernelBuildError
from mlx_moe_fast.layers import FastSwitchGLU
from mlx_moe_fast.problem import Device
from mlx_moe_fast.variants import Router

H, F, E, K = 64, 128, 8, 2
NOISE = (
    3e-2  # MLX rounds every step to bf16, the stand-ins for our kernels only the last; a wrong expert is ten times it
)
ARGS = {
    "hidden_size": H, "intermediate_size": F, "moe_intermediate_size": F, "shared_expert_intermediate_size": F,
    "num_experts": E, "num_local_experts": E, "num_experts_per_tok": K, "mlp_bias": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU, as far as `patch` can tell, on which every kernel compiles."""
    monkeypatch.setattr(device, "current", lambda: Device("fake", (9, 0)))
    monkeypatch.setattr(jit, "prepare", lambda *args: None)
    monkeypatch.setattr(selftest, "run", lambda variants: None)
    layers.warn_once.cache_clear()


def class_of(name):
    family, _, block = name.partition(".")
    return getattr(importlib.import_module(f"mlx_lm.models.{family}"), block)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.mlp = block

    def __call__(self, x):
        return self.mlp(x)


def make(name="qwen3_moe.Qwen3MoeSparseMoeBlock", norm=True, kind=None, **changed):
    """A model of one block of a family, quantized, its router not."""
    mx.random.seed(0)
    model = Model((kind or class_of(name))(SimpleNamespace(**ARGS | {"norm_topk_prob": norm} | changed)))
    model.update(mlx.utils.tree_map(lambda a: mx.random.normal(a.shape) * 0.1, model.parameters()))
    router = model.mlp[FORMS[name].router]
    router.weight = router.weight * 20  # so that rounded probabilities are not equal: MLX chooses among these
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "gate" not in path[-5:])
    model.eval()
    mx.eval(model.parameters())
    return model


def inputs(*lead):
    return mx.random.normal((*lead, H), key=mx.random.key(1)).astype(mx.bfloat16)


def patch(model, **kw):
    return mlx_moe_fast.patch(model, block=True, dense=False, **kw)


def stock(model, x):
    """The block's own code with mlx-lm's own layers."""
    with_ours = [(m, type(m)) for m in model.modules()]
    mlx_moe_fast.unpatch(model)
    out = model(x)
    for module, kind in with_ours:
        module.__class__ = kind
    return out


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_a_block_gives_what_its_own_code_gives(kernels, name, norm):  # noqa: F811
    model, x = make(name, norm), inputs(1, 5)
    expected = model(x)
    report = patch(model)
    assert isinstance(model.mlp, FastBlock) and report.layers[0].kind == class_of(name).__name__
    for _ in range(2):  # the second call is remembered
        out = model(x)
        assert out.dtype == expected.dtype and out.shape == expected.shape
        assert rel_rms(array(out), array(expected)) < NOISE
    assert [call for call, _ in kernels.calls] == ["moe_block"] * 2


@pytest.mark.parametrize("name", FORMS)
def test_the_table_is_about_the_installed_blocks(name):
    kind = class_of(name)
    assert form_of(kind) is FORMS[name] and fingerprint(kind) == FORMS[name].fingerprint
    assert fast(kind) is fast(kind) and issubclass(fast(kind), kind) and fast(kind).original is kind


def test_a_fingerprint_is_about_words_not_spaces(tmp_path, monkeypatch):
    texts = {"one": "(a + x)", "same": "(a  +\n            x)", "other": "(a - x)"}
    for name, text in texts.items():
        (tmp_path / f"block_{name}.py").write_text(f"class B:\n    def __call__(self, a, x):\n        return {text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {name: fingerprint(importlib.import_module(f"block_{name}").B) for name in texts}
    assert found["one"] == found["same"] != found["other"] and len(found["one"]) == 16
    assert fingerprint(type("NoText", (), {"__call__": print})) == ""


def test_a_block_is_three_launches(launches):  # noqa: F811
    model = make()
    patch(model)
    model(inputs(1, 3))
    assert kinds(launches) == ["router_bf16", "decode_glu m8", "decode_plain m8"]
    launches.clear()
    model(inputs(1, 3))
    assert kinds(launches) == ["router_bf16", "decode_glu m8", "decode_plain m8"]


def test_a_block_that_has_changed_keeps_its_code(kernels, monkeypatch):  # noqa: F811
    model, x = make(), inputs(1, 3)
    expected = model(x)
    monkeypatch.setitem(FORMS, "qwen3_moe.Qwen3MoeSparseMoeBlock", blocks.Form("another"))
    row = patch(model).layers[0]
    assert (row.replaced, row.reason) == (False, "type") and "looked at" in row.detail
    assert type(model.mlp) is Qwen3MoeSparseMoeBlock and type(model.mlp.switch_mlp) is FastSwitchGLU
    assert rel_rms(array(model(x)), array(expected)) < NOISE


def test_a_subclass_is_not_in_the_table(kernels):  # noqa: F811
    class Mine(Qwen3MoeSparseMoeBlock):
        pass

    model = make(kind=Mine)
    report = patch(model)
    assert type(model.mlp) is Mine and [row.kind for row in report.layers] == ["SwitchGLU"]


def test_without_block_the_blocks_stay(kernels):  # noqa: F811
    model = make()
    report = mlx_moe_fast.patch(model, dense=False)
    assert type(model.mlp) is Qwen3MoeSparseMoeBlock and [row.kind for row in report.layers] == ["SwitchGLU"]
    assert mlx_moe_fast.report(model) == report


def test_patching_is_reported_and_undone(kernels):  # noqa: F811
    model = make()
    report = patch(model)
    assert [(row.kind, row.replaced) for row in report.layers] == [
        ("Qwen3MoeSparseMoeBlock", True), ("SwitchGLU", True),
    ]  # fmt: skip
    assert "router" in report.layers[0].launches and mlx_moe_fast.report(model) == report
    assert patch(model) == report
    model(inputs(1, 2))
    names = dict(mlx.utils.tree_flatten(model.parameters()))
    mlx_moe_fast.unpatch(model)
    assert type(model.mlp) is Qwen3MoeSparseMoeBlock and type(model.mlp.switch_mlp) is SwitchGLU
    assert dict(mlx.utils.tree_flatten(model.parameters())).keys() == names.keys()
    assert not any("moe_fast" in name for name in vars(model.mlp))
    with mlx_moe_fast.patched(model, block=True):
        assert isinstance(model.mlp, FastBlock)
    assert type(model.mlp) is Qwen3MoeSparseMoeBlock


def test_strict_is_about_expert_layers(kernels, monkeypatch):  # noqa: F811
    monkeypatch.setitem(FORMS, "qwen3_moe.Qwen3MoeSparseMoeBlock", blocks.Form("another"))
    assert patch(make(), strict=True).replaced


SIZES = {
    "too many experts": {"num_experts": 513},
    "too many of them": {"num_experts": 40, "num_experts_per_tok": 33},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_the_router_does_not_take(kernels, sizes):  # noqa: F811
    model = make(**sizes)
    row = patch(model).layers[0]
    assert (row.replaced, row.reason) == (False, "shape") and "top" in row.detail


def sharded(model):
    model.mlp.sharding_group = mx.distributed.init()


def adapted(model):
    part = LoRASwitchLinear.from_base(model.mlp.switch_mlp.up_proj, r=2)
    model.mlp.switch_mlp.up_proj = part


def activated(model):
    model.mlp.switch_mlp.activation = lambda up, gate: up


def unquantized(model):
    model.mlp.switch_mlp = SwitchGLU(H, F, E)


def in_training(model):
    model.train()


def fp32_router(model):
    model.mlp.gate.set_dtype(mx.float32)


CHANGES = [sharded, adapted, activated, unquantized, in_training, fp32_router]


@pytest.mark.parametrize("known", [False, True], ids=["first call", "a known one"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_after_patching_is_noticed(kernels, change, known):  # noqa: F811
    model, x = make(), inputs(1, 3)
    patch(model)
    if known:
        model(x), model(x)
    kernels.calls.clear()
    change(model)
    out = model(x)
    assert "moe_block" not in [call for call, _ in kernels.calls]
    expected = model.mlp.original.__call__(model.mlp, x)
    assert rel_rms(array(out), array(expected)) < 1e-6


def test_another_top_k_is_noticed(kernels):  # noqa: F811
    model, x = make(), inputs(1, 3)
    patch(model)
    model(x)
    model.mlp.top_k = 3
    assert rel_rms(array(model(x)), array(stock(model, x))) < NOISE


def test_many_rows_take_the_block_s_own_code(kernels):  # noqa: F811
    model, x = make(), inputs(1, 300)
    patch(model)
    model(x)
    assert [call for call, _ in kernels.calls] == ["moe_glu"]


def test_gradients_are_those_of_its_own_code(kernels):  # noqa: F811
    model, x = make(), inputs(1, 3)
    patch(model)
    model(x)
    found = mx.grad(lambda x: model(x).astype(mx.float32).sum())(x)
    expected = mx.grad(lambda x: stock(model, x).astype(mx.float32).sum())(x)
    assert rel_rms(array(found), array(expected)) < NOISE


def test_a_kernel_that_cannot_be_built_is_the_original_call(kernels, monkeypatch, caplog):  # noqa: F811
    model, x = make(), inputs(1, 3)
    expected = model(x)
    patch(model)

    def fail(*args):
        raise KernelBuildError("no compiler", "install one")

    monkeypatch.setattr(blocks.ops, "moe_block", fail)
    assert rel_rms(array(model(x)), array(expected)) < NOISE and "no compiler" in caplog.text


def test_the_router_is_compiled_and_tried_with_the_rest(kernels, monkeypatch):  # noqa: F811
    asked = []
    monkeypatch.setattr(selftest, "run", asked.extend)
    patch(make())
    assert Router("bf16") in asked
