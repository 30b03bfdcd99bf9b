"""THE table of MoE blocks of mlx-lm that run as a whole: how each class routes.

A block's own code is what decides that, so a block is known by its class and by the text of its call, and of what that
calls in turn: one that has changed runs its original code, whose expert layer is still fast, until someone has looked.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .problem import RouterForm

Block = Any  # one of mlx-lm's: its attributes are looked up by name
Logits = Callable[[Block, mx.array], mx.array]
Bias = Callable[[Block], mx.array | None]
Shared = Callable[[Block, mx.array, mx.array], mx.array]


def _gate(block: Block, x: mx.array) -> mx.array:
    return block["gate"](x)


def _no_bias(block: Block) -> None:
    return None


@dataclass(frozen=True)
class Form:
    """How a block class routes: its router's form (None if it has another), logits and bias, where its experts are, and
    what it adds to their sum. If the router is of a class of the same module and not just called, `gate` names it;
    `calls` names what else the text covers that `fingerprint` is of."""

    fingerprint: str
    routing: Callable[[Block], RouterForm | None]
    gate: str | None = None
    calls: tuple[str, ...] = ()
    router: str = "gate"
    logits: Logits = _gate
    bias: Bias = _no_bias
    experts: str = "switch_mlp"
    shared: Shared | None = None

    @property
    def text(self) -> tuple[str, ...]:
        """The names that `fingerprint` is asked for."""
        return (*((self.gate,) if self.gate else ()), *self.calls)


# Routers: logits.


def _router(block: Block, x: mx.array) -> mx.array:
    return block["router"](x)


def _inside(router: str, name: str) -> Logits:
    return lambda block, x: block[router][name](x)


def _product(block: Block, x: mx.array) -> mx.array:
    return x @ block["gate"]["weight"].T


def _product_fp32(block: Block, x: mx.array) -> mx.array:
    return x.astype(mx.float32) @ block["gate"]["weight"].astype(mx.float32).T


def _gate_fp32(block: Block, x: mx.array) -> mx.array:
    return block["gate"](x.astype(mx.float32))


def _capped(block: Block, x: mx.array) -> mx.array:
    gate = block["gate"]
    logits = gate["proj"](x)
    return logits if gate.softcap <= 0 else mx.tanh(logits.astype(mx.float32) / gate.softcap) * gate.softcap


# Routers: biases.


def _own(name: str) -> Bias:
    return lambda block: block.get(name)


def _of_gate(name: str) -> Bias:
    return lambda block: block["gate"].get(name)


# Routers: forms.


def _softmax(block: Block) -> RouterForm:
    return RouterForm(block.top_k, normalise=False)


def _softmax_normalised(block: Block) -> RouterForm:
    return RouterForm(block.top_k, normalise=block.norm_topk_prob)


def _softmax_of_top_k(block: Block) -> RouterForm:
    return RouterForm(block.num_experts_per_tok)


def _granite(block: Block) -> RouterForm:
    return RouterForm(block["router"].top_k)


def _ernie(block: Block) -> RouterForm | None:
    return RouterForm(block.k) if type(block["gate_act"]) is nn.Softmax else None


def _deepseek(block: Block) -> RouterForm:
    return RouterForm(block["gate"].top_k, normalise=False)


def _deepseek_v2(block: Block) -> RouterForm:
    g = block["gate"]
    limited = g.topk_method == "group_limited_greedy"
    groups, top_groups = (g.n_group, g.topk_group) if limited else (1, 1)
    return RouterForm(g.top_k, "softmax", False, 0.0, g.routed_scaling_factor, groups, top_groups, 1, -inf)


def _grouped(block: Block, eps: float = 0.0, dropped: float = 0.0, score: str | None = "sigmoid") -> RouterForm:
    """`group_expert_select` of DeepSeek-V3 and its copies. Score None: as the router says."""
    g = block["gate"]
    if score is None:
        score = "sigmoid" if g.score_function == "sigmoid" else "softmax"
    normalise = g.norm_topk_prob and g.top_k > 1
    return RouterForm(g.top_k, score, normalise, eps, g.routed_scaling_factor, g.n_group, g.topk_group, 2, dropped)


def _bailing_v3(block: Block) -> RouterForm:
    g = block["gate"]
    return RouterForm(g.top_k, "sigmoid", True, 1e-20, g.routed_scaling_factor, g.n_group, g.topk_group, 2, -inf)


def _afmoe(b: Block) -> RouterForm:
    score, k = "sigmoid" if b.score_func == "sigmoid" else "softmax", b.num_experts_per_tok
    return RouterForm(k, score, b.route_norm and k > 1, 0.0, b.route_scale, b.n_group, b.topk_group)


def _kimi(block: Block) -> RouterForm | None:
    a = block.args
    k, score = a.num_experts_per_token, a.moe_router_activation_func
    normalise, groups = a.moe_renormalize and k > 1, (a.num_expert_group, a.topk_group)
    known = score in ("sigmoid", "softmax")
    return RouterForm(k, score, normalise, 1e-20, a.routed_scaling_factor, *groups) if known else None


def _mistral4(block: Block) -> RouterForm:
    a, k = block.args, block.num_experts_per_tok
    return RouterForm(k, "softmax", a.norm_topk_prob, 1e-20, a.routed_scaling_factor, a.n_group, a.topk_group)


def _klear(block: Block) -> RouterForm:
    return RouterForm(block.top_k, "sigmoid", block.norm_topk_prob)


def _laguna(block: Block) -> RouterForm | None:
    g = block["gate"]
    return RouterForm(g.top_k, "sigmoid", True, 0.0, block.routed_scaling_factor) if g.score_func == "sigmoid" else None


def _lfm2(block: Block) -> RouterForm:
    return RouterForm(block.top_k, "sigmoid", block.norm_topk_prob, 1e-6, block.routed_scaling_factor)


def _minimax(block: Block) -> RouterForm:
    return RouterForm(block.num_experts_per_tok, "sigmoid", True, 1e-20)


def _step(block: Block) -> RouterForm:
    g = block["gate"]
    return RouterForm(g.top_k, "sigmoid", g.norm_topk_prob, 1e-20, g.routed_scaling_factor)


# What is added to the experts' sum.


def _added(name: str) -> Shared:
    """An expert for every token, which not every model of the family has."""

    def shared(block: Block, x: mx.array, y: mx.array) -> mx.array:
        expert = block.get(name)
        return y if expert is None else y + expert(x)

    return shared


def _gated_shared_expert(block: Block, x: mx.array, y: mx.array) -> mx.array:
    return y + mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)


def _weighed(block: Block, x: mx.array, y: mx.array) -> mx.array:
    coef = mx.softmax(block.coefficient(x), axis=-1, precise=True)
    return y * coef[..., :1] + block.shared_experts(x) * coef[..., 1:]


_SHARED = _added("shared_experts")
_V3 = partial(
    Form,
    gate="MoEGate",
    calls=("group_expert_select",),
    logits=_product,
    bias=_of_gate("e_score_correction_bias"),
    shared=_SHARED,
)
_BAILING = partial(
    Form,
    gate="Gate",
    calls=("group_expert_select",),
    logits=_inside("gate", "gate_proj"),
    bias=_of_gate("expert_bias"),
    shared=_SHARED,
)
_DEEPSEEK = partial(Form, gate="MoEGate", logits=_product, shared=_SHARED)
_GRANITE = partial(Form, router="router", logits=_inside("router", "layer"))
_EPS = partial(_grouped, eps=1e-20)

FORMS: dict[str, Form] = {
    "Klear.KlearSparseMoeBlock": Form(
        "c02c8cb35ee9c900", _klear, bias=_own("expert_bias"), experts="experts", shared=_weighed
    ),
    "afmoe.AfmoeMoE": Form(
        "b8b24a3a20ca1f54", _afmoe, "MoERouter", (), "router", _router, _own("expert_bias"), "experts", _SHARED
    ),
    "bailing_hybrid.SparseMoeBlock": _BAILING("01ce7e4fac82a16e", partial(_EPS, dropped=-inf, score=None), calls=()),
    "bailing_moe.BailingMoeSparseMoeBlock": _BAILING(
        "0186c04ab3d31c50",
        partial(_EPS, score=None),
        gate="BailingMoeGate",
        calls=("group_expert_select", "aggregate_expert_outputs"),
    ),
    "bailing_moe_linear.SparseMoeBlock": _BAILING("8e41584f9bc2a91e", partial(_grouped, score=None)),
    "bailing_moe_v3.BailingSparseMoE": _BAILING(
        "d179651a589a2d0d", _bailing_v3, gate="BailingGate", calls=("_group_expert_select",), logits=_product_fp32
    ),
    "deepseek.DeepseekMoE": _DEEPSEEK("f6f6f3356a75d1f4", _deepseek),
    "deepseek_v2.DeepseekV2MoE": _DEEPSEEK("483029e2595ca3c7", _deepseek_v2),
    "deepseek_v3.DeepseekV3MoE": _V3("509605fa95235289", _grouped),
    "deepseek_v32.DeepseekV32MoE": _V3("509605fa95235289", _grouped),
    "dots1.Dots1MoE": _V3("42feba3cbdc4c46d", _grouped, gate="Dots1TopkRouter", experts="experts"),
    "ernie4_5_moe.Ernie4_5_MoeMLP": Form("211148b74bf2b5d9", _ernie, shared=_SHARED),
    "exaone_moe.MoE": _V3("8b3440589ceeb3f4", _EPS),
    "glm4_moe.MoE": _V3("509605fa95235289", _grouped),
    "glm4_moe_lite.Glm4MoeLiteMoE": _V3("52b522690f6e65d0", _EPS),
    "granitemoe.GraniteMoeMoE": _GRANITE("489f64fa708ddf13", _granite, "GraniteMoeTopKGating"),
    "granitemoehybrid.GraniteMoeHybridMoE": _GRANITE("f7c16f6a284cdb35", _granite, "GraniteMoeHybridTopKGating"),
    "hunyuan.MoeBlock": Form("e41fe0ea0189f5f5", _softmax, "Gate", shared=_added("shared_mlp")),
    "jamba.JambaSparseMoeBlock": Form("dd75323b766b22fc", _softmax_of_top_k, router="router", logits=_router),
    "kimi_linear.KimiSparseMoE": Form(
        "133807a418e8ce9e", _kimi, calls=("_group_expert_select",), bias=_own("e_score_correction_bias"), shared=_SHARED
    ),
    "laguna.MoE": _DEEPSEEK(
        "3fed85ac255e937a",
        _laguna,
        logits=_capped,
        bias=_of_gate("e_score_correction_bias"),
        shared=_added("shared_expert"),
    ),
    "lfm2_moe.Lfm2MoeSparseMoeBlock": Form("01da0e616fa82561", _lfm2, bias=_own("expert_bias")),
    "mellum.MellumSparseMoeBlock": Form("c0a8c134b9ab4ecf", _softmax_normalised),
    "mimo_v2_flash.MoE": _V3("555fd4f73dc08d6a", _EPS),
    "minimax.MiniMaxSparseMoeBlock": Form(
        "bf222def1af640a7", _minimax, logits=_gate_fp32, bias=_own("e_score_correction_bias")
    ),
    "mistral4.Mistral4MoE": Form("737c56212417e366", _mistral4, calls=("mistral4_expert_select",), shared=_SHARED),
    "mixtral.MixtralSparseMoeBlock": Form("a3564398f1de81f2", _softmax_of_top_k),
    "olmoe.OlmoeSparseMoeBlock": Form("7d23d1173176464a", _softmax_normalised),
    "qwen2_moe.Qwen2MoeSparseMoeBlock": Form("c06452bbb5f267b1", _softmax, shared=_gated_shared_expert),
    "qwen3_moe.Qwen3MoeSparseMoeBlock": Form("4892bead17d73da0", _softmax_normalised),
    "qwen3_next.Qwen3NextSparseMoeBlock": Form("2c8de6ec6652dc7c", _softmax_normalised, shared=_gated_shared_expert),
    "step3p5.Step3p5MoE": Form(
        "bc38df7064ec22be",
        _step,
        "Step3p5MoEGate",
        ("moe_gate_select",),
        logits=_inside("gate", "gate"),
        bias=_of_gate("router_bias"),
        shared=_added("share_expert"),
    ),
}


def fingerprint(block: type[nn.Module], calls: tuple[str, ...] = ()) -> str:
    """Of the text of a class's call, and of classes and functions of its module that are named in `calls`, whatever
    the white space; empty if there is no text."""
    try:
        return hash_of(block.__call__, *(getattr(sys.modules[block.__module__], name) for name in calls))
    except (AttributeError, OSError, TypeError):
        return ""


def hash_of(*objects: Any) -> str:
    """Of the text of functions and classes, whatever the white space. Raises OSError or TypeError if there is none."""
    return hashlib.sha256(" ".join(map(_text, objects)).encode()).hexdigest()[:16]


@cache
def _text(a: Any) -> str:
    return " ".join(inspect.getsource(a).split())


def form_of(block: type[nn.Module]) -> Form | None:
    """The form of a class of mlx_lm.models, if it is in the table."""
    family, _, name = block.__module__.removeprefix("mlx_lm.models.").rpartition(".")
    return None if family else FORMS.get(f"{name}.{block.__qualname__}")
