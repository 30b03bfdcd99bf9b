"""patch, unpatch, patched and report on real models of mlx-lm.

A device is pretended, so that kernels are compiled and classes swapped; MLX's default device is the CPU, so
that every call takes the stock path: a patched model must do exactly what it did before.
"""
# ruff: noqa: C408 - configurations read better as keywords

import copy
import importlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import mlx.utils
import pytest
from mlx_lm.models import switch_layers
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

import mlx_moe_fast
from mlx_moe_fast import device, dispatch, envs, jit, layers, masks, selftest
from mlx_moe_fast.eligibility import describe
from mlx_moe_fast.errors import KernelBuildError, NotAccelerated
from mlx_moe_fast.layers import (
    FastDense,
    FastQuantizedEmbedding,
    FastQuantizedLinear,
    FastQuantizedSwitchLinear,
    FastSwitchGLU,
    FastSwitchMLP,
    plan_experts,
)
from mlx_moe_fast.patching import DENSE
from mlx_moe_fast.problem import Device, Projection, Quantization
from mlx_moe_fast.variants import TILES, Prefill

H, F, E, TOP_K, VOCAB = 64, 128, 4, 2, 32
RUN_SELFTEST = selftest.run
DENSE_KINDS = {kind.__name__ for kind in DENSE}


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    """Layers count as worth a launch that in a real model would not be."""
    monkeypatch.setattr(dispatch, "MIN_WORK", 0)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A cache folder: what one test compiles, the next one finds."""
    before = os.environ.get(envs.CACHE_DIR.name)
    os.environ[envs.CACHE_DIR.name] = str(tmp_path_factory.mktemp("kernels"))
    jit.cache_dir.cache_clear()
    yield
    if before is None:
        del os.environ[envs.CACHE_DIR.name]
    else:
        os.environ[envs.CACHE_DIR.name] = before
    jit.cache_dir.cache_clear()


@pytest.fixture(autouse=True)
def gpu(kernels, monkeypatch):
    """A GPU, as far as `patch` can tell."""
    monkeypatch.setattr(device, "current", lambda: Device("fake", (9, 0)))
    monkeypatch.setattr(selftest, "run", lambda variants: None)
    layers.warn_once.cache_clear()
    mx.random.seed(0)


def finish(model, bits=4, group_size=64, dtype=mx.bfloat16):
    """Random in every parameter, quantized where mlx-lm would, ready for inference."""
    parameters = mlx.utils.tree_map(lambda a: mx.random.normal(a.shape) * 0.1, model.parameters())
    model.update(parameters)
    model.set_dtype(dtype)
    fits = lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % group_size == 0  # noqa: E731
    nn.quantize(model, group_size, bits, class_predicate=fits)
    model.eval()
    mx.eval(model.parameters())
    return model


class Holder(nn.Module):
    """A model that is one expert layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __call__(self, *args, **kw):
        return self.layer(*args, **kw)


def glu(**kw):
    return finish(Holder(SwitchGLU(H, F, E, **kw)))


def inputs(*lead, top_k=TOP_K, seed=1):
    key = mx.random.key(seed)
    return (
        mx.random.normal((*lead, H), key=key).astype(mx.bfloat16),
        mx.random.randint(0, E, (*lead, top_k), key=key),
    )


ATTENTION = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, hidden_size=H, vocab_size=VOCAB)
COMMON = dict(ATTENTION, rms_norm_eps=1e-5, max_position_embeddings=64, rope_theta=10000, num_hidden_layers=2)
COMMON |= dict(intermediate_size=F, num_experts_per_tok=TOP_K)

QWEN3 = dict(COMMON, moe_intermediate_size=F, num_experts=E, decoder_sparse_step=1, mlp_only_layers=[])
QWEN3 |= dict(tie_word_embeddings=False, norm_topk_prob=True)

LLAMA4 = dict(COMMON, num_hidden_layers=4, num_experts_per_tok=1, num_local_experts=E, use_qk_norm=True)
LLAMA4 |= dict(interleave_moe_layer_step=1, intermediate_size_mlp=F, attention_chunk_size=16)
LLAMA4 |= dict(attention_bias=False, rope_scaling=None, model_type="llama4_text")

DEEPSEEK = dict(COMMON, num_key_value_heads=2, moe_intermediate_size=F, n_shared_experts=1, n_routed_experts=E)
DEEPSEEK |= dict(kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=32, v_head_dim=32, qk_nope_head_dim=32)

NEMOTRON = dict(COMMON, attention_bias=False, mlp_bias=False, layer_norm_epsilon=1e-5, use_bias=False)
NEMOTRON |= dict(mamba_num_heads=2, mamba_head_dim=32, mamba_proj_bias=False, ssm_state_size=16)
NEMOTRON |= dict(conv_kernel=4, use_conv_bias=True, n_groups=1, hybrid_override_pattern=["M", "E", "*", "E"])
NEMOTRON |= dict(moe_intermediate_size=F, moe_shared_expert_intermediate_size=F, n_shared_experts=1)
NEMOTRON |= dict(n_routed_experts=E, norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1)

GPT_OSS = dict(COMMON, num_local_experts=E, layer_types=["sliding_attention", "full_attention"])
PHIXTRAL = dict(num_vocab=VOCAB, model_dim=H, num_heads=2, num_layers=2, rotary_dim=16, num_local_experts=E)

# Family: configuration, class of its expert layers, how many of them.
FAMILIES = {
    "qwen3_moe": (QWEN3, FastSwitchGLU, 2),
    "mixtral": (dict(COMMON, num_local_experts=E), FastSwitchGLU, 2),
    "olmoe": (dict(COMMON, num_experts=E), FastSwitchGLU, 2),  # x has two axes: all tokens in a row
    "gpt_oss": (GPT_OSS, FastSwitchGLU, 2),  # a bias, and an activation of its own
    "llama4": (dict(text_config=LLAMA4), FastSwitchGLU, 4),  # top-1, x scaled by the score beforehand
    "deepseek_v3": (dict(DEEPSEEK, first_k_dense_replace=1), FastSwitchGLU, 1),  # layer 0 is dense
    "phixtral": (PHIXTRAL, FastSwitchMLP, 2),  # GELU and a bias
    "nemotron_h": (NEMOTRON, FastSwitchMLP, 2),  # ReLU^2
}


def build(family, **changes):
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = FAMILIES[family][0] | changes
    return finish(module.Model(module.ModelArgs.from_dict(dict(config, model_type=family))))


def tokens(*shape):
    return mx.random.randint(0, VOCAB, shape, key=mx.random.key(2))


def snapshot(model):
    """Class, attributes and arrays of every module, by identity."""
    return [
        (path, type(m), {k: id(v) for k, v in vars(m).items()}, {k: id(v) for k, v in m.items()})
        for path, m in sorted(model.named_modules(), key=lambda item: item[0])
    ]


def same(a, b):
    return mx.array_equal(a, b, equal_nan=True).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_gives_the_stock_logits(family):
    _, fast, count = FAMILIES[family]
    model = build(family)
    batches = [tokens(1, 1), tokens(2, 5), tokens(1, 40)]  # mlx-lm sorts from 64 rows on
    stock = [model(batch) for batch in batches]
    assert all(mx.isfinite(logits).all().item() for logits in stock)
    report = mlx_moe_fast.patch(model, block=False)
    assert [type(m) for m in model.modules() if isinstance(m, fast.original)] == [fast] * count
    assert [row.replaced for row in report.layers if row.kind not in DENSE_KINDS] == [True] * count
    rows = {row.path: row for row in report.layers if row.kind in DENSE_KINDS}
    assert rows.keys() == {path for path, m in model.named_modules() if isinstance(m, DENSE) and "switch" not in path}
    for path, row in rows.items():  # routers have fewer outputs than a kernel writes at once
        fits = dict(model.named_modules())[path].weight.shape[0] % 8 == 0
        assert (row.replaced, row.reason) == ((True, None) if fits else (False, "shape"))
    for batch, logits in zip(batches, stock, strict=True):
        assert same(model(batch), logits)
    mlx_moe_fast.unpatch(model)
    assert same(model(batches[1]), stock[1])


def test_report_says_what_runs_where():
    experts = (
        "  model.layers.0.mlp.switch_mlp ... model.layers.1.mlp.switch_mlp (2)  SwitchGLU: "
        "gate+up+SwiGLU, down: decode, or route and prefill_sm80 (affine4g64 bf16)"
    )
    model = build("qwen3_moe")
    only = dict(dense=False, block=False)
    assert str(mlx_moe_fast.patch(model, **only)) == f"2 of 2 layers run on mlx_moe_fast\n{experts}"
    first, *lines = str(mlx_moe_fast.patch(model, block=False)).splitlines()
    assert first == "12 of 14 layers run on mlx_moe_fast" and experts in lines
    dense = "decode, up to 32 rows (affine4g64 bf16)"
    assert f"  model.embed_tokens  QuantizedEmbedding: {dense}" in lines
    assert f"  lm_head ... model.layers.1.self_attn.v_proj (9)  QuantizedLinear: {dense}" in lines
    assert len(lines) == 4 and "MLX's own kernels, shape: 4 output features" in lines[2]


def test_report_of_a_projection_that_stands_alone():
    (row,) = mlx_moe_fast.patch(finish(Holder(SwitchLinear(H, F, E, bias=False)))).layers
    assert row.launches == "decode, or route and prefill_sm80 (affine4g64 bf16)"


def test_report_of_an_activation_that_runs_in_mlx():
    (row,) = mlx_moe_fast.patch(glu(activation=SwigluOAI())).layers
    words = "3 products, activation in MLX: decode, or route and prefill_sm80"
    assert row.launches == f"{words} (affine4g64 bf16)"


def test_report_is_plain_data():
    report = mlx_moe_fast.patch(glu())
    assert report.to_dict()["layers"] == [
        dict(path="layer", kind="SwitchGLU", replaced=True, reason=None, detail="")
        | dict(launches=report.layers[0].launches)
    ]


def test_report_counts_layers_as_people_do():
    model = build("qwen3_moe", num_hidden_layers=12)
    paths = [layer.path for layer in mlx_moe_fast.patch(model, dense=False, block=False).layers]
    assert paths == [f"model.layers.{i}.mlp.switch_mlp" for i in range(12)]


def test_report_changes_nothing_and_tells_before_from_after():
    model = build("qwen3_moe")
    classes = [type(m) for m in model.modules()]
    rows = mlx_moe_fast.report(model).layers
    found = Counter((row.replaced, row.reason, row.detail) for row in rows)
    routers = (False, "shape", "4 output features, needed is a multiple of 8")
    assert found == {(False, None, "not patched"): 12, routers: 2}
    assert [type(m) for m in model.modules()] == classes
    patched = mlx_moe_fast.patch(model)
    assert mlx_moe_fast.report(model) == patched


NOTHING = "patched nothing: the model has no mixture-of-experts layer and no quantized one"


@pytest.mark.parametrize("quantized", [False, True])
def test_a_model_without_a_layer_of_ours_is_left_alone(quantized):
    # Quantized dense layers are none of ours if they are not asked for.
    model = nn.Sequential(nn.Linear(H, H), nn.Embedding(VOCAB, H))
    model = finish(model) if quantized else model
    before = snapshot(model)
    assert str(mlx_moe_fast.patch(model, dense=not quantized)) == NOTHING
    assert snapshot(model) == before
    with pytest.raises(NotAccelerated, match="no quantized layer"):
        mlx_moe_fast.patch(model, strict=True, dense=not quantized)
    assert snapshot(model) == before


def test_unpatch_gives_back_what_was_there():
    model = build("qwen3_moe")
    before = snapshot(model)
    mlx_moe_fast.patch(model)
    assert snapshot(model) != before
    # Two layers of a block, its experts and their three projections; the embedding, the output layer and four
    # projections of attention.
    assert mlx_moe_fast.unpatch(model) == 2 * 5 + 2 + 2 * 4
    assert snapshot(model) == before
    assert mlx_moe_fast.unpatch(model) == 0


def test_patch_keeps_every_parameter_itself():
    model = glu()
    before = dict(mlx.utils.tree_flatten(model.parameters()))
    mlx_moe_fast.patch(model)
    model(*inputs(2, 3))
    after = dict(mlx.utils.tree_flatten(model.parameters()))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(model.trainable_parameters()["layer"]) == list(glu().trainable_parameters()["layer"])


def test_patching_twice_is_patching_once():
    model = glu()
    first = mlx_moe_fast.patch(model)
    before = snapshot(model)
    assert mlx_moe_fast.patch(model) == first
    assert snapshot(model) == before


def test_patching_takes_no_memory():
    model = build("qwen3_moe")
    mlx_moe_fast.patch(model)  # whatever is made once
    mlx_moe_fast.unpatch(model)
    before = mx.get_active_memory()
    for _ in range(3):
        mlx_moe_fast.patch(model)
        assert mx.get_active_memory() == before
        mlx_moe_fast.unpatch(model)


def test_patched_is_for_the_block():
    model = glu()
    before = snapshot(model)
    with mlx_moe_fast.patched(model) as report:
        assert type(model.layer) is FastSwitchGLU and len(report.replaced) == 1
    assert snapshot(model) == before


def test_patched_ends_with_an_exception_too():
    model = glu()
    with pytest.raises(ZeroDivisionError), mlx_moe_fast.patched(model):
        raise ZeroDivisionError
    assert type(model.layer) is SwitchGLU


def test_patched_inside_patched_and_inside_patch():
    model = glu()
    with mlx_moe_fast.patched(model), mlx_moe_fast.patched(model):
        pass
    assert type(model.layer) is SwitchGLU and type(model.layer.up_proj) is QuantizedSwitchLinear
    with mlx_moe_fast.patched(model):
        with mlx_moe_fast.patched(model):
            pass
        assert type(model.layer) is FastSwitchGLU and type(model.layer.up_proj) is FastQuantizedSwitchLinear
    mlx_moe_fast.patch(model)
    with mlx_moe_fast.patched(model):
        pass
    assert type(model.layer) is FastSwitchGLU and type(model.layer.up_proj) is FastQuantizedSwitchLinear


def test_a_layer_may_leave_the_model_inside_patched():
    model = glu()
    mlx_moe_fast.patch(model)
    with mlx_moe_fast.patched(model):
        model.layer.up_proj = glu().layer.up_proj
    assert type(model.layer) is FastSwitchGLU


def test_extra_children_and_attributes_survive():
    model = glu()
    model.layer.shared = nn.Linear(H, H)
    model.layer.note = "mine"
    shared = model.layer.shared
    mlx_moe_fast.patch(model)
    assert model.layer.shared is shared and model.layer.note == "mine"
    assert any(name.startswith("layer.shared") for name, _ in mlx.utils.tree_flatten(model.parameters()))


def test_strict_accepts_a_model_that_is_replaced_as_a_whole():
    report = mlx_moe_fast.patch(build("qwen3_moe"), strict=True, dense=False)
    assert len(report.replaced) == len(report.layers) == 4


def test_strict_is_about_experts():
    report = mlx_moe_fast.patch(build("qwen3_moe"), strict=True)  # routers stay
    assert [layer.kind for layer in report.skipped] == ["QuantizedLinear"] * 2
    assert len(report.replaced) == 14


def test_strict_names_the_expert_layer_that_stays_and_not_a_dense_one():
    model = half_plain()
    model.layers.insert(0, finish(Holder(nn.Linear(H, 4))).layer)
    with pytest.raises(NotAccelerated, match=r"layers.2 \(SwitchGLU\)"):
        mlx_moe_fast.patch(model, strict=True)


def test_strict_wants_something_replaced():
    model = finish(Holder(nn.Linear(H, 4)))
    before = snapshot(model)
    with pytest.raises(NotAccelerated, match=r"layer \(QuantizedLinear\).*shape: 4 output features"):
        mlx_moe_fast.patch(model, strict=True)
    assert snapshot(model) == before
    model = finish(nn.Sequential(nn.Linear(H, H), nn.Linear(H, 4)))
    assert [layer.path for layer in mlx_moe_fast.patch(model, strict=True).replaced] == ["layers.0"]


def half_plain():
    """One layer that is fit, one that is not quantized."""
    model = nn.Sequential(SwitchGLU(H, F, E), SwitchGLU(H, F, E))
    nn.quantize(model.layers[0], 64, 4)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def test_one_layer_that_stays_is_reported_and_an_error_under_strict():
    model = half_plain()
    with pytest.raises(NotAccelerated, match=r"layers.1 \(SwitchGLU\).*not-quantized: up_proj: a SwitchLinear"):
        mlx_moe_fast.patch(model, strict=True)
    assert [type(layer) for layer in model.layers] == [SwitchGLU, SwitchGLU]
    report = mlx_moe_fast.patch(model)
    assert [layer.path for layer in report.replaced] == ["layers.0"]
    assert [(layer.path, layer.reason) for layer in report.skipped] == [("layers.1", "not-quantized")]
    assert "MLX's own kernels, not-quantized: up_proj: a SwitchLinear" in str(report)


def test_strict_leaves_no_trace():
    model = half_plain()
    before = snapshot(model)
    with pytest.raises(NotAccelerated):
        mlx_moe_fast.patch(model, strict=True)
    assert snapshot(model) == before


def test_report_leaves_no_trace():
    model = glu()
    before = snapshot(model)
    mlx_moe_fast.report(model)
    assert snapshot(model) == before


def test_strict_keeps_what_was_patched_before():
    model = half_plain()
    mlx_moe_fast.patch(model)
    with pytest.raises(NotAccelerated):
        mlx_moe_fast.patch(model, strict=True)
    assert type(model.layers[0]) is FastSwitchGLU


def broken(monkeypatch):
    def fail(variant, arch):
        raise KernelBuildError(f"{variant.id} did not compile.\nline 2", "a hint")

    monkeypatch.setattr(jit, "compile", fail)
    monkeypatch.setattr(jit, "load", fail)


def test_a_build_failure_is_one_warning_and_leaves_every_layer_stock(monkeypatch, caplog):
    model = build("qwen3_moe")
    stock = model(tokens(1, 8))
    broken(monkeypatch)
    with caplog.at_level(logging.WARNING):
        report = mlx_moe_fast.patch(model)
        mlx_moe_fast.patch(model)
    assert len(caplog.records) == 1 and "did not compile" in caplog.text and "a hint" in caplog.text
    assert Counter(layer.reason for layer in report.layers) == {"build": 14, "shape": 2}
    failed = [layer for layer in report.layers if layer.reason == "build"]
    assert all("did not compile" in layer.detail and "\n" not in layer.detail for layer in failed)
    assert not any(getattr(type(m), "is_fast", False) for m in model.modules())
    assert same(model(tokens(1, 8)), stock)
    with pytest.raises(NotAccelerated, match="build: "):
        mlx_moe_fast.patch(model, strict=True)


def test_a_selftest_that_fails_is_a_build_failure(monkeypatch):
    def fail(variants):
        raise KernelBuildError("computed 7.")

    monkeypatch.setattr(selftest, "run", fail)
    (layer,) = mlx_moe_fast.patch(glu()).layers
    assert (layer.replaced, layer.reason) == (False, "build")


def test_the_selftest_asks_each_kernel_once_a_process(monkeypatch):
    asked = []
    monkeypatch.setattr(selftest, "_passed", set())
    monkeypatch.setattr(selftest, "_wrong", asked.append)  # and finds nothing
    variant = Prefill(Quantization(4, 64), "bf16", True, TILES[16])
    for _ in range(2):
        RUN_SELFTEST([variant])
    assert asked == [variant]


def test_what_is_run_once_is_all_that_a_layer_may_launch(monkeypatch):
    seen = []
    monkeypatch.setattr(selftest, "run", seen.extend)
    mlx_moe_fast.patch(glu())
    kinds = sorted(v.id.rsplit("_m", 1)[0] for v in seen)
    names = [(f"prefill_sm80_{kind}", f"decode_{kind}") for kind in ("glu", "plain")]
    expected = [name for prefill, decode in names for name in (*[prefill] * len(TILES), decode)]
    assert kinds == sorted(["route_4bit", *(f"{name}_affine4g64_bf16" for name in expected)])
    seen.clear()
    mlx_moe_fast.patch(finish(Holder(nn.Linear(H, F))))
    assert [v.id for v in seen] == [f"decode_dense_affine4g64_bf16_m{m}" for m in (8, 16, 32)]


def reference(layer, x, indices):
    """What mlx-lm's own class computes on the same layer."""
    return SwitchGLU.__call__(layer, x, indices)


def test_lora_on_a_projection_after_patching_falls_back():
    model = glu()
    mlx_moe_fast.patch(model)
    assert isinstance(model.layer.up_proj, QuantizedSwitchLinear)  # what LoRA asks to find layers and to fuse
    model.layer.up_proj = LoRASwitchLinear.from_base(model.layer.up_proj, r=4)
    model.layer.up_proj.lora_b = mx.random.normal(model.layer.up_proj.lora_b.shape)
    model.eval()
    x, indices = inputs(3, 5)
    twin = glu()
    twin.layer.up_proj = LoRASwitchLinear.from_base(twin.layer.up_proj, r=4)
    twin.layer.up_proj.update(
        {name: model.layer.up_proj[name] for name in ("lora_a", "lora_b")}
        | {"linear": model.layer.up_proj.linear.parameters()}
    )
    twin.layer.update({name: model.layer[name].parameters() for name in ("gate_proj", "down_proj")})
    twin.eval()
    assert same(model(x, indices), twin(x, indices))
    row = mlx_moe_fast.report(model).layers[0]
    assert (row.reason, row.detail) == ("type", "up_proj: a LoRASwitchLinear")
    fused = model.layer.up_proj.fuse()
    assert type(fused) is QuantizedSwitchLinear


def test_the_report_of_a_layer_with_lora_says_that_mlx_runs_it():
    model = glu()
    mlx_moe_fast.patch(model)
    model.layer.up_proj = LoRASwitchLinear.from_base(model.layer.up_proj, r=4)
    text = str(mlx_moe_fast.report(model))
    assert "MLX's own kernels, type: up_proj: a LoRASwitchLinear" in text
    assert not text.startswith("2 of 2")  # the other one is what LoRA wraps, which does run


def test_a_projection_swapped_after_patching_is_noticed():
    model = glu()
    mlx_moe_fast.patch(model)
    model.layer.down_proj = finish(Holder(SwitchLinear(F, H, E, bias=False)), bits=8).layer
    x, indices = inputs(2, 3)
    assert plan_experts(model.layer, FastSwitchGLU.parts)[-1].quantization.bits == 8
    assert same(model(x, indices), reference(model.layer, x, indices))


def test_arrays_replaced_after_patching_are_noticed():
    model = glu()
    mlx_moe_fast.patch(model)
    other = glu()
    model.update(other.parameters())
    x, indices = inputs(2, 3)
    assert same(model(x, indices), other(x, indices))
    model.layer.up_proj.scales = model.layer.up_proj.scales.astype(mx.float16)
    assert plan_experts(model.layer, FastSwitchGLU.parts).reason == "dtype"


def test_plain_experts_stay():
    model = Holder(SwitchGLU(H, F, E))
    report = mlx_moe_fast.patch(model)
    assert [layer.reason for layer in report.layers] == ["not-quantized"]
    assert type(model.layer) is SwitchGLU and type(model.layer.up_proj) is SwitchLinear


def mixed_bits():
    """Gate of 4 bits, up of 8."""
    model = Holder(SwitchGLU(H, F, E))
    model.layer.gate_proj = finish(Holder(model.layer.gate_proj), bits=4).layer
    model.layer.up_proj = finish(Holder(model.layer.up_proj), bits=8).layer
    model.layer.down_proj = finish(Holder(model.layer.down_proj), bits=4).layer
    model.eval()
    return model


def test_gate_and_up_of_different_bits_run_each_for_itself():
    model = mixed_bits()
    x, indices = inputs(2, 40)
    stock = model(x, indices)
    (row,) = mlx_moe_fast.patch(model).layers
    assert (row.path, row.replaced, row.reason) == ("layer", False, "bits")
    assert "projections run one by one on mlx_moe_fast" in row.detail
    assert type(model.layer) is SwitchGLU
    assert all(type(model.layer[p]) is FastQuantizedSwitchLinear for p in ("gate_proj", "up_proj", "down_proj"))
    assert same(model(x, indices), stock)
    assert mlx_moe_fast.unpatch(model) == 3


def test_projections_of_a_class_that_is_not_mlx_lms_run_each_for_themselves():
    class Mine(SwitchGLU):
        pass

    model = finish(Holder(Mine(H, F, E)))
    report = mlx_moe_fast.patch(model)
    assert type(model.layer) is Mine
    assert [layer.path for layer in report.replaced] == [
        "layer.down_proj",
        "layer.gate_proj",
        "layer.up_proj",
    ]


def test_a_subclass_of_the_quantized_layer_stays():
    class Mine(QuantizedSwitchLinear):
        pass

    model = glu()
    model.layer.up_proj.__class__ = Mine
    (row,) = mlx_moe_fast.patch(model).layers
    assert (row.replaced, row.reason) == (False, "type")
    assert type(model.layer.up_proj) is Mine and type(model.layer.down_proj) is FastQuantizedSwitchLinear


def test_a_switch_mlp_is_one_layer():
    model = finish(Holder(SwitchMLP(H, F, E)))
    (row,) = mlx_moe_fast.patch(model).layers
    words = "2 products, activation in MLX: decode, or route and prefill_sm80"
    assert row.kind == "SwitchMLP" and row.launches == f"{words} (affine4g64 bf16)"


class Tied(nn.Module):
    """An embedding that is the output layer too, and a projection between."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.proj = nn.Linear(H, H, bias=True)

    def __call__(self, ids):
        return self.embed.as_linear(self.proj(self.embed(ids)))


def test_dense_layers_are_patched_and_restored():
    model = finish(Tied())
    before, names = snapshot(model), [name for name, _ in mlx.utils.tree_flatten(model.parameters())]
    trainable = [name for name, _ in mlx.utils.tree_flatten(model.trainable_parameters())]
    stock = model(tokens(2, 5))
    report = mlx_moe_fast.patch(model)
    assert [(row.path, row.kind, row.replaced) for row in report.layers] == [
        ("embed", "QuantizedEmbedding", True),
        ("proj", "QuantizedLinear", True),
    ]
    assert type(model.embed) is FastQuantizedEmbedding and type(model.proj) is FastQuantizedLinear
    assert same(model(tokens(2, 5)), stock)
    assert [name for name, _ in mlx.utils.tree_flatten(model.parameters())] == names
    assert [name for name, _ in mlx.utils.tree_flatten(model.trainable_parameters())] == trainable
    assert mlx_moe_fast.patch(model) == report == mlx_moe_fast.report(model)
    assert mlx_moe_fast.unpatch(model) == 2
    assert snapshot(model) == before


def test_dense_layers_are_left_and_not_listed_if_not_asked_for():
    model = build("qwen3_moe")
    report = mlx_moe_fast.patch(model, dense=False)
    kinds = ["Qwen3MoeSparseMoeBlock", "SwitchGLU"] * 2
    assert [row.kind for row in report.layers] == kinds
    assert not any(isinstance(m, FastDense) for m in model.modules())
    with mlx_moe_fast.patched(build("qwen3_moe"), dense=False) as report:
        assert [row.kind for row in report.layers] == kinds


def test_patched_restores_dense_layers_that_it_patched():
    model = build("qwen3_moe")
    mlx_moe_fast.patch(model, dense=False)
    with mlx_moe_fast.patched(model):
        assert sum(isinstance(m, FastDense) for m in model.modules()) == 10
    assert not any(isinstance(m, FastDense) for m in model.modules())
    assert sum(type(m) is FastSwitchGLU for m in model.modules()) == 2


def test_only_mlxs_own_dense_classes_are_patched():
    class Mine(nn.QuantizedLinear):
        pass

    model = finish(nn.Sequential(*(nn.Linear(H, H, bias=False) for _ in range(4)), nn.Embedding(VOCAB, H)))
    model.layers[1].__class__ = Mine
    model.layers[2] = LoRALinear.from_base(model.layers[2], r=4)
    model.layers[3] = nn.Linear(H, H)
    model.layers[4] = nn.Embedding(VOCAB, H)
    report = mlx_moe_fast.patch(model)
    kinds = [FastQuantizedLinear, Mine, LoRALinear, nn.Linear, nn.Embedding]
    assert [type(layer) for layer in model.layers] == kinds
    # What LoRA wraps is MLX's own layer.
    assert [row.path for row in report.layers] == ["layers.0", "layers.2.linear"]
    assert type(model.layers[2].linear) is FastQuantizedLinear
    assert type(model.layers[2].fuse()) is nn.QuantizedLinear


def test_lora_on_a_dense_layer_after_patching():
    model = finish(Holder(nn.Linear(H, H, bias=False)))
    x, stock = inputs(1)[0], LoRALinear.from_base(model.layer, r=4)
    mlx_moe_fast.patch(model)
    assert isinstance(model.layer, nn.QuantizedLinear)  # what LoRA asks to find layers
    mine = LoRALinear.from_base(model.layer, r=4)
    mine.update({name: stock[name] for name in ("lora_a", "lora_b")})
    mine.eval(), stock.eval()
    assert same(mine(x), stock(x))


@pytest.mark.parametrize("bits, reason", [(4, None), (8, None), (6, "bits"), (3, "bits")])
def test_bits_of_dense_layers(bits, reason):
    (row,) = mlx_moe_fast.patch(finish(Holder(nn.Linear(H, H)), bits=bits)).layers
    assert (row.replaced, row.reason) == (reason is None, reason)


def test_a_dense_layer_knows_from_how_many_rows_on_it_pays(monkeypatch):
    monkeypatch.setattr(dispatch, "MIN_WORK", 3 * H * F)
    model = finish(nn.Sequential(nn.Linear(H, H), nn.Linear(H, F)))
    mlx_moe_fast.patch(model)
    few = [dispatch.few_rows(H, H), dispatch.few_rows(F, H)]
    assert [layer.few_rows for layer in model.layers] == few and few[0] > few[1] > 1
    mlx_moe_fast.unpatch(model)
    assert not any(hasattr(layer, "few_rows") for layer in model.layers)


def test_an_expert_mlp_in_two_launches_always_pays(monkeypatch):
    monkeypatch.setattr(dispatch, "MIN_WORK", 10 * H * F)
    layer = finish(Holder(SwitchGLU(H, F, E)))
    mlx_moe_fast.patch(layer)
    assert layer.layer.few_rows == 0 and layer.layer.up_proj.few_rows == dispatch.few_rows(F, H)


def test_while_patched_a_batch_without_padding_has_no_mask():
    original, model = BatchKVCache.make_mask, finish(nn.Sequential(nn.Linear(H, H)))
    mlx_moe_fast.patch(model)
    assert BatchKVCache.make_mask is masks.make_mask
    mlx_moe_fast.unpatch(model)
    assert BatchKVCache.make_mask is original
    with mlx_moe_fast.patched(model):
        assert BatchKVCache.make_mask is masks.make_mask
    assert BatchKVCache.make_mask is original
    mlx_moe_fast.patch(nn.Sequential(nn.Linear(H, H)))  # nothing to replace
    assert BatchKVCache.make_mask is original


@pytest.mark.parametrize("name", ["weight", "scales", "biases", "bias"])
def test_an_array_of_a_dense_layer_replaced_after_patching_is_noticed(name):
    model, other = (finish(Holder(nn.Linear(H, H, bias=True))) for _ in range(2))
    mlx_moe_fast.patch(model)
    assert isinstance(describe(model.layer), Projection)
    x = inputs(3)[0]
    other.layer[name] = other.layer[name] + other.layer[name]
    model.layer[name] = other.layer[name]
    mx.eval(model.parameters())
    model.layer.update({n: other.layer[n] for n in ("weight", "scales", "biases", "bias")})
    assert same(model(x), other(x)) and isinstance(describe(model.layer), Projection)
    model.layer[name] = model.layer[name][: H // 2]
    assert describe(model.layer).reason == "shape"
    assert mlx_moe_fast.report(model).layers[0].reason == "shape"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_patched_dense_layer_is_patched_and_its_own(copied):
    model = finish(Tied())
    mlx_moe_fast.patch(model)
    twin = copied(model)
    assert type(twin.embed) is FastQuantizedEmbedding and type(twin.proj) is FastQuantizedLinear
    assert same(twin(tokens(3)), model(tokens(3)))


def test_weights_saved_after_patching_load_into_either(tmp_path):
    model, file = glu(), str(tmp_path / "weights.safetensors")
    mlx_moe_fast.patch(model)
    x, indices = inputs(2, 3)
    expected = model(x, indices)
    model.save_weights(file)
    for patched in (False, True):
        other = glu()
        other.update(mlx.utils.tree_map(mx.zeros_like, other.parameters()))
        if patched:
            mlx_moe_fast.patch(other)
        other.load_weights(file, strict=True)
        assert same(other(x, indices), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_patched_layer_is_patched_and_its_own(copied):
    layer = glu().layer
    mlx_moe_fast.patch(Holder(layer))
    x, indices = inputs(2, 3)
    expected = layer(x, indices)
    twin = copied(layer)
    assert type(twin) is FastSwitchGLU and type(twin.up_proj) is FastQuantizedSwitchLinear
    assert same(twin(x, indices), expected)
    assert plan_experts(twin, twin.parts) == plan_experts(layer, layer.parts)
    twin.up_proj.scales = twin.up_proj.scales * 2
    assert same(layer(x, indices), expected) and not same(twin(x, indices), expected)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_gradient_is_stocks(training):
    model = glu()
    model.train(training)
    x, indices = inputs(2, 3)
    loss = lambda x: (model(x, indices) ** 2).sum()  # noqa: E731
    stock = mx.grad(loss)(x)
    assert mx.abs(stock).max().item() > 0
    mlx_moe_fast.patch(model)
    assert same(mx.grad(loss)(x), stock)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_lora_parameters_of_a_patched_model_get_stocks_gradient(training):
    def step(patch):
        mx.random.seed(0)
        model = glu()
        if patch:
            mlx_moe_fast.patch(model)
        model.freeze()
        model.layer.down_proj = LoRASwitchLinear.from_base(model.layer.down_proj, r=4)
        model.train(training)
        x, indices = inputs(2, 3)
        return nn.value_and_grad(model, lambda: (model(x, indices) ** 2).sum())()

    (value, gradients), (stock_value, stock_gradients) = step(True), step(False)
    assert same(value, stock_value)
    found, expected = (dict(mlx.utils.tree_flatten(g)) for g in (gradients, stock_gradients))
    assert set(found) == set(expected) == {f"layer.down_proj.lora_{ab}" for ab in "ab"}
    assert all(same(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_patched_model_compiles_with_its_state_as_input(training):
    # As mlx_lm.lora trains: mx.compile(step, inputs=[model.state, ...]) replaces every parameter by a tracer.
    model = glu()
    model.train(training)
    x, indices = inputs(2, 3)
    stock = model(x, indices)
    mlx_moe_fast.patch(model)
    compiled = mx.compile(lambda x, indices: model(x, indices), inputs=model.state)
    assert same(compiled(x, indices), stock)


def test_a_patched_model_compiles():
    model = glu()
    x, indices = inputs(2, 3)
    stock = model(x, indices)
    mlx_moe_fast.patch(model)
    assert same(mx.compile(lambda x: model(x, indices))(x), stock)


def test_a_worker_thread_may_call_what_the_main_thread_patched():
    # MLX's streams belong to threads: whatever `patch` left unevaluated, the worker could not evaluate.
    model = build("qwen3_moe")
    batch = tokens(1, 40)
    stock = model(batch)
    mx.eval(batch, stock)
    mlx_moe_fast.patch(model)
    found = []

    def work():
        found.append(same(model(batch), stock))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]


def test_import_is_light(tmp_path):
    code = (
        "import sys, mlx_moe_fast; from mlx_moe_fast import cli, bench;"
        "print(sorted(m for m in ('cupy', 'cuda', 'torch', 'matplotlib') if m in sys.modules))"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUPY", "XDG", envs.CACHE_DIR.name))}
    env |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == "[]"
    assert list(tmp_path.iterdir()) == []


def test_stock_is_what_these_tests_ran(monkeypatch):
    # Guards the premise of this file: on the CPU the patched call ends in MLX's gather_qmm.
    calls = []
    original = mx.gather_qmm

    def counted(*args, **kw):
        calls.append(1)
        return original(*args, **kw)

    monkeypatch.setattr(switch_layers.mx, "gather_qmm", counted)
    model = glu()
    mlx_moe_fast.patch(model)
    model(*inputs(2, 3))
    assert len(calls) == 3
