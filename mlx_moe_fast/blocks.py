"""Whole MoE blocks of mlx-lm in three launches: router, gate + up + SwiGLU, down + combination.

A block's own code is what decides how it routes, so a block is known by its class and by the text of its call: one that
has changed runs its original code, whose expert layer is still fast, until someone has looked at it.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from . import calls, device, dispatch, envs, ops, variants
from .calls import again, remember, traced
from .eligibility import DTYPES, Reason, Rejection, check_call, check_first, fuses, weights
from .errors import KernelBuildError
from .layers import FastSwitchGLU, plan_experts, warn_once
from .problem import Projection

Shared = Callable[[Any, mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Form:
    """How a block class routes: the names of its router, its experts and its top-k, whether the weights are the softmax
    over all experts (else over the top-k), what it adds to the experts' sum, and the text of its call."""

    fingerprint: str
    top_k: str = "top_k"
    router: str = "gate"
    experts: str = "switch_mlp"
    over_all: Callable[[Any], bool] = lambda block: False
    shared: Shared | None = None


def _gated_shared_expert(block: Any, x: mx.array, y: mx.array) -> mx.array:
    return y + mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)


def _not_normalised(block: Any) -> bool:
    return not block.norm_topk_prob


FORMS = {
    "qwen3_moe.Qwen3MoeSparseMoeBlock": Form("4892bead17d73da0", over_all=_not_normalised),
    "qwen3_next.Qwen3NextSparseMoeBlock": Form(
        "2c8de6ec6652dc7c", over_all=_not_normalised, shared=_gated_shared_expert
    ),
    "qwen2_moe.Qwen2MoeSparseMoeBlock": Form(
        "c06452bbb5f267b1", over_all=lambda block: True, shared=_gated_shared_expert
    ),
    "olmoe.OlmoeSparseMoeBlock": Form("7d23d1173176464a", over_all=_not_normalised),
    "mellum.MellumSparseMoeBlock": Form("c0a8c134b9ab4ecf", over_all=_not_normalised),
    "jamba.JambaSparseMoeBlock": Form("dd75323b766b22fc", top_k="num_experts_per_tok", router="router"),
    "mixtral.MixtralSparseMoeBlock": Form("a3564398f1de81f2", top_k="num_experts_per_tok"),
}


def fingerprint(block: type[nn.Module]) -> str:
    """Of the text of a class's call, whatever its white space; empty if there is no text."""
    try:
        text = inspect.getsource(block.__call__)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def form_of(block: type[nn.Module]) -> Form | None:
    """The form of a class of mlx_lm.models, if it is in the table."""
    family, _, name = block.__module__.removeprefix("mlx_lm.models.").rpartition(".")
    return None if family else FORMS.get(f"{name}.{block.__qualname__}")


def plan_block(block: nn.Module) -> list[Projection] | Rejection:
    """What the up, gate and down projections of a block hold, if it can run as a whole."""
    original = getattr(type(block), "original", type(block))
    form = form_of(original)
    assert form is not None, "asked of blocks in the table"
    if fingerprint(original) != form.fingerprint:
        return Rejection(Reason.TYPE, f"{original.__name__} is not the one that was looked at")
    if getattr(block, "sharding_group", None) is not None:
        return Rejection(Reason.TYPE, "a sharded block")
    experts = block[form.experts]
    if type(experts) not in (SwitchGLU, FastSwitchGLU):
        return Rejection(Reason.TYPE, f"{form.experts} is a {type(experts).__name__}")
    plan = plan_experts(experts, FastSwitchGLU.parts)
    if isinstance(plan, Rejection):
        return plan
    if not fuses(plan[1], plan[0], experts.activation):
        return Rejection(Reason.TYPE, "gate, up and activation are not one kernel")
    top_k, most = getattr(block, form.top_k), plan[0].experts
    if not 1 <= top_k <= min(variants.ROUTER_TOP_K, most) or most > variants.ROUTER_EXPERTS:
        return Rejection(Reason.SHAPE, f"top {top_k} of {most} experts")
    return plan


class FastBlock(nn.Module):
    """A MoE block of which a decode step is three launches besides its router's product and its shared expert."""

    is_fast = True
    original: type[nn.Module]
    form: Form
    parts: tuple[str, ...] = ()
    few_rows = 0
    _moe_fast_calls = calls.NONE

    def check(self, x: mx.array, logits: mx.array) -> list[Projection] | Rejection:
        """What this call would launch for, or why it takes the original path."""
        form = self.form
        plan = check_first(self, x.size) or plan_block(self)
        if isinstance(plan, Rejection):
            return plan
        up, gate, _ = plan
        lead = x.shape[:-1]
        if logits.shape != (*lead, up.experts) or DTYPES.get(logits.dtype) != gate.dtype:
            return Rejection(Reason.SHAPE, f"router logits {logits.shape} of {logits.dtype}")
        if not dispatch.is_few(logits.size // up.experts * getattr(self, form.top_k), gate):
            return Rejection(Reason.SLOWER, "more rows than a decode step has")
        return check_call([self[form.experts][name] for name in FastSwitchGLU.parts], plan, x) or plan

    def __call__(self, x: mx.array) -> mx.array:
        form = self.form
        experts, top_k, over_all = self[form.experts], getattr(self, form.top_k), form.over_all(self)
        if not self._may_be_fast(x, top_k):
            return self.original.__call__(self, x)
        parts = [experts.get(name) for name in FastSwitchGLU.parts]
        logits = self[form.router](x)
        activation = type(getattr(experts, "activation", None))
        key = x.shape, x.dtype, logits.shape, logits.dtype, top_k, over_all, type(experts), activation, envs.TILE.get()
        y = again(self, key, parts, (x, logits))
        if y is None:
            y = self._first(x, logits, key, parts, top_k, over_all)
        if y is None:
            return self.original.__call__(self, x)
        return form.shared(self, x, y) if form.shared else y

    def _may_be_fast(self, x: mx.array, top_k: int) -> bool:
        """What can be told before the router's product is made."""
        if self._training or x.ndim < 2 or getattr(self, "sharding_group", None) is not None:
            return False
        return x.size // max(1, x.shape[-1]) * top_k <= dispatch.MOST_DECODE_ROWS and device.on_gpu()

    def _first(
        self, x: mx.array, logits: mx.array, key: tuple, parts: list[nn.Module], top_k: int, over_all: bool
    ) -> mx.array | None:
        """A call that is not remembered; None: the original call."""
        plan = self.check(x, logits)
        if isinstance(plan, Rejection) or traced((x, logits)):
            return None
        up, gate, down = (weights(part, p) for part, p in zip(parts, plan, strict=True))
        try:
            y = ops.moe_block(x, logits, top_k, over_all, gate, up, down)
            remember(self, key, parts, ops.bind_block(gate.projection, down.projection, x, top_k, over_all))
        except KernelBuildError as error:
            warn_once(f"{Reason.BUILD.value}: {error}")
            return None
        return y


@cache
def fast(block: type[nn.Module]) -> type[nn.Module]:
    """The fast class of a block class in the table."""
    return type(f"Fast{block.__name__}", (FastBlock, block), {"original": block, "form": form_of(block)})
