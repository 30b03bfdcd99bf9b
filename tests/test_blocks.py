"""Whole MoE blocks: every family in the table against its own code, and everything that sends a call back to it."""

import importlib
import re
from dataclasses import replace
from pathlib import Path
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
QWEN = "qwen3_moe.Qwen3MoeSparseMoeBlock"
V3 = "deepseek_v3.DeepseekV3MoE"
ARGS = {
    "hidden_size": H, "intermediate_size": F, "moe_intermediate_size": F, "shared_expert_intermediate_size": F,
    "num_experts": E, "num_local_experts": E, "n_routed_experts": E, "moe_num_experts": E, "num_experts_per_tok": K,
    "num_experts_per_token": K, "moe_k": K, "moe_topk": K, "moe_top_k": K, "mlp_bias": False, "use_bias": False,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "num_shared_expert": 1,
    "use_mixed_mlp_moe": True, "moe_router_enable_shared_expert": True, "moe_shared_expert_intermediate_size": F,
    "share_expert_dim": F, "swiglu_limits": None, "swiglu_limits_shared": None,
    "n_group": 4, "topk_group": 2, "num_expert_group": 4, "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5, "moe_routed_scaling_factor": 2.5, "moe_router_scaling_factor": 2.5,
    "route_scale": 2.5, "score_function": "sigmoid", "score_func": "sigmoid", "moe_router_score_func": "sigmoid",
    "moe_router_activation_func": "sigmoid", "moe_gate_act": "softmax", "moe_router_enable_expert_bias": True,
    "moe_router_enable_routed_scaling": True, "use_expert_bias": True, "moe_router_logit_softcapping": 0.0,
    "hidden_act": "silu",
}  # fmt: skip
NORMS = ("norm_topk_prob", "route_norm", "moe_renormalize", "norm_expert_weight")
OF_FAMILY = {
    "deepseek_v2.DeepseekV2MoE": {"topk_method": "group_limited_greedy"},
    "step3p5.Step3p5MoE": {"layer_idx": 0},
}
CAST = ("minimax.MiniMaxSparseMoeBlock", "lfm2_moe.Lfm2MoeSparseMoeBlock")  # mlx-lm casts their bias as all the rest
BIASES = ("expert_bias", "e_score_correction_bias", "router_bias")


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


def make(name=QWEN, norm=True, kind=None, **changed):
    """A model of one block of a family, quantized, most routers not."""
    mx.random.seed(0)
    changed = {**dict.fromkeys(NORMS, norm), **OF_FAMILY.get(name, {}), **changed}
    extra = {key: changed.pop(key) for key in ("layer_idx",) if key in changed}
    model = Model((kind or class_of(name))(SimpleNamespace(**ARGS | changed), **extra))
    model.update(mlx.utils.tree_map(lambda a: mx.random.normal(a.shape) * 0.1, model.parameters()))
    routing = FORMS[name].routing(model.mlp)
    softmax = routing is not None and routing.score == "softmax"
    for path, a in mlx.utils.tree_flatten(model.mlp[FORMS[name].router].parameters()):
        if path.endswith("weight"):  # rounded probabilities must not be equal: MLX chooses among these
            model.mlp[FORMS[name].router].update(mlx.utils.tree_unflatten([(path, a * (20 if softmax else 3))]))
    kept = [(path, a) for path, a in mlx.utils.tree_flatten(model.parameters()) if path.endswith(BIASES)]
    model.set_dtype(mx.bfloat16)
    if name not in CAST:
        model.update(mlx.utils.tree_unflatten(kept))
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
    is_what_its_own_code_gives(kernels, make(name, norm), name)


def is_what_its_own_code_gives(kernels, model, name):  # noqa: F811
    x = inputs(1, 5)
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
    form = FORMS[name]
    assert form_of(kind) is form and fingerprint(kind, form.text) == form.fingerprint
    assert fast(kind) is fast(kind) and issubclass(fast(kind), kind) and fast(kind).original is kind


def test_the_page_has_every_family():
    page = (Path(__file__).resolve().parents[1] / "docs" / "batched-decode.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+\.\w+)` \|", page, re.M)) == sorted(FORMS)


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
    monkeypatch.setitem(FORMS, QWEN, replace(FORMS[QWEN], fingerprint="another"))
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
    report = mlx_moe_fast.patch(model, dense=False, block=False)
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
    monkeypatch.setitem(FORMS, QWEN, replace(FORMS[QWEN], fingerprint="another"))
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


def of_another_size(model):
    model.mlp.gate = nn.Linear(H, E + 1)


CHANGES = [sharded, adapted, activated, unquantized, in_training, of_another_size]


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


VARIANTS = {
    "no groups": (V3, {"n_group": 1, "topk_group": 1}),
    "one expert": (V3, {"num_experts_per_tok": 1}),
    "all groups": ("dots1.Dots1MoE", {"n_group": 1, "topk_group": 1}),
    "no group limit": ("deepseek_v2.DeepseekV2MoE", {"topk_method": "greedy"}),
    "no shared expert": ("bailing_moe.BailingMoeSparseMoeBlock", {"num_shared_experts": 0}),
    "no bias": ("bailing_moe_linear.SparseMoeBlock", {"moe_router_enable_expert_bias": False}),
    "no bias, no groups": ("lfm2_moe.Lfm2MoeSparseMoeBlock", {"use_expert_bias": False}),
    "softmax with a bias": ("bailing_hybrid.SparseMoeBlock", {"score_function": "softmax"}),
    "softmax, AFM": ("afmoe.AfmoeMoE", {"score_func": "softmax"}),
    "softmax, Kimi": ("kimi_linear.KimiSparseMoE", {"moe_router_activation_func": "softmax"}),
    "softcap": ("laguna.MoE", {"moe_router_logit_softcapping": 2.0}),
}


@pytest.mark.parametrize(("name", "changed"), VARIANTS.values(), ids=VARIANTS)
def test_what_a_family_may_have(kernels, name, changed):  # noqa: F811
    is_what_its_own_code_gives(kernels, make(name, **changed), name)


OTHERS = {
    "sigmoid": ("ernie4_5_moe.Ernie4_5_MoeMLP", {"moe_gate_act": "sigmoid"}, "type"),
    "softplus": ("laguna.MoE", {"moe_router_score_func": "sqrtsoftplus"}, "type"),
    "clamped": ("step3p5.Step3p5MoE", {"swiglu_limits": [7.0]}, "type"),
    "uneven groups": (V3, {"n_group": 3, "topk_group": 1}, "shape"),
    "groups of one": (V3, {"n_group": 8}, "shape"),
    "no group": (V3, {"topk_group": 0}, "shape"),
}


@pytest.mark.parametrize(("name", "changed", "reason"), OTHERS.values(), ids=OTHERS)
def test_forms_that_are_not_ours(kernels, name, changed, reason):  # noqa: F811
    row = patch(make(name, **changed)).layers[0]
    assert (row.kind, row.replaced, row.reason) == (class_of(name).__name__, False, reason)


def test_a_gate_that_has_changed_keeps_the_code(kernels, monkeypatch):  # noqa: F811
    def group_expert_select(*args):
        raise AssertionError("never called")

    monkeypatch.setattr("mlx_lm.models.deepseek_v3.group_expert_select", group_expert_select)
    row = patch(make(V3)).layers[0]
    assert (row.replaced, row.reason) == (False, "type") and "looked at" in row.detail


def test_another_gate_is_noticed(kernels):  # noqa: F811
    model, x = make(V3), inputs(1, 3)
    patch(model)
    model(x), model(x)
    kernels.calls.clear()

    class Mine(type(model.mlp.gate)):
        def __call__(self, x):
            inds, scores = super().__call__(x)
            return inds, -scores

    gate = model.mlp.gate
    gate.__class__ = Mine
    assert rel_rms(array(model(x)), array(stock(model, x))) < NOISE
    assert "moe_block" not in [call for call, _ in kernels.calls]
    row = mlx_moe_fast.report(model).layers[0]
    assert (row.replaced, row.reason) == (False, "type") and "Mine" in row.detail


@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16])
def test_another_bias_is_noticed(kernels, kind):  # noqa: F811
    """The array changed in place, and another one."""
    model, x = make(V3), inputs(1, 3)
    gate = model.mlp.gate
    gate.e_score_correction_bias = mx.arange(E).astype(kind)
    patch(model)
    outs = [array(model(x)), array(stock(model, x))]
    gate.e_score_correction_bias[:] = -mx.arange(E)
    outs += [array(model(x)), array(stock(model, x))]
    gate.e_score_correction_bias = mx.zeros((E,), kind)
    outs += [array(model(x)), array(stock(model, x))]
    assert all(rel_rms(ours, theirs) < NOISE for ours, theirs in zip(outs[::2], outs[1::2], strict=True))
    assert rel_rms(outs[0], outs[2]) > NOISE < rel_rms(outs[2], outs[4])
    assert [call for call, _ in kernels.calls] == ["moe_block"] * 3
    gate.e_score_correction_bias = mx.zeros((1,), kind)  # which MLX broadcasts
    assert rel_rms(array(model(x)), outs[4]) < NOISE and kernels.calls[-1][0] != "moe_block"


def test_a_router_in_fp32(kernels):  # noqa: F811
    model, x = make(), inputs(1, 3)
    model.mlp.gate.set_dtype(mx.float32)
    expected = model(x)
    patch(model)
    assert rel_rms(array(model(x)), array(expected)) < NOISE and kernels.calls[0][0] == "moe_block"


def test_gradients_of_a_gate_are_those_of_its_own_code(kernels):  # noqa: F811
    model, x = make(V3), inputs(1, 3)
    patch(model)
    model(x)

    def loss(weight):
        model.mlp.gate.weight = weight
        return model(x).astype(mx.float32).sum()

    weight = model.mlp.gate.weight
    found = mx.grad(loss)(weight)
    mlx_moe_fast.unpatch(model)
    assert rel_rms(array(found), array(mx.grad(loss)(weight))) < NOISE


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
    assert {Router("bf16"), Router("fp32")} <= set(asked)
