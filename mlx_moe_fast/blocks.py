"""Whole MoE blocks of mlx-lm in three launches: router, gate + up + SwiGLU, down + combination."""

import sys
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from . import calls, device, dispatch, envs, ops, variants
from .calls import checked, remember, traced
from .eligibility import Reason, Rejection, check_call, check_first, fuses, weights
from .errors import KernelBuildError
from .forms import FORMS, Form, fingerprint, form_of
from .layers import FastSwitchGLU, plan_experts, warn_once
from .problem import Projection, RouterForm

NUMBERS = tuple(ops.NUMBERS.values())  # of logits and biases


def _gate_is_known(block: nn.Module, original: type[nn.Module], form: Form) -> bool:
    return form.gate is None or type(block[form.router]) is getattr(sys.modules[original.__module__], form.gate, None)


def plan_block(block: nn.Module) -> list[Projection] | Rejection:
    """What the up, gate and down projections of a block hold, if it can run as a whole."""
    original = getattr(type(block), "original", type(block))
    form = form_of(original)
    assert form is not None, "asked of blocks in the table"
    if fingerprint(original, form.text) != form.fingerprint:
        return Rejection(Reason.TYPE, f"{original.__name__} is not the one that was looked at")
    if getattr(block, "sharding_group", None) is not None:
        return Rejection(Reason.TYPE, "a sharded block")
    if not _gate_is_known(block, original, form):
        return Rejection(Reason.TYPE, f"{form.router} is a {type(block[form.router]).__name__}")
    experts = block[form.experts]
    if type(experts) not in (SwitchGLU, FastSwitchGLU):
        return Rejection(Reason.TYPE, f"{form.experts} is a {type(experts).__name__}")
    plan = plan_experts(experts, FastSwitchGLU.parts)
    if isinstance(plan, Rejection):
        return plan
    if not fuses(plan[1], plan[0], experts.activation):
        return Rejection(Reason.TYPE, "gate, up and activation are not one kernel")
    routing = form.routing(block)
    if routing is None:
        return Rejection(Reason.TYPE, "a router of another form")
    return _check_router(routing, plan[0].experts) or plan


def _check_router(routing: RouterForm, experts: int) -> Rejection | None:
    """Whether the kernel takes so many experts and groups."""
    top_k, groups, top_groups = routing.top_k, routing.groups, routing.top_groups
    if not 1 <= top_k <= min(variants.ROUTER_TOP_K, experts) or experts > variants.ROUTER_EXPERTS:
        return Rejection(Reason.SHAPE, f"top {top_k} of {experts} experts")
    fit = groups <= variants.ROUTER_GROUPS and experts % groups == 0 and experts // groups >= routing.best
    if not (fit and top_groups >= 1) and top_groups < groups:
        return Rejection(Reason.SHAPE, f"top {top_groups} of {groups} groups of {experts} experts")
    return None


class FastBlock(nn.Module):
    """A MoE block of which a decode step is three launches besides its router's product and its shared expert."""

    is_fast = True
    original: type[nn.Module]
    form: Form
    parts: tuple[str, ...] = ()
    few_rows = 0
    _moe_fast_calls = calls.NONE

    def check(self, x: mx.array, logits: mx.array, bias: mx.array | None, top_k: int) -> list[Projection] | Rejection:
        """What this call would launch for, or why it takes the original path."""
        plan = check_first(self, x.size) or plan_block(self)
        if isinstance(plan, Rejection):
            return plan
        up, gate, _ = plan
        if logits.shape != (*x.shape[:-1], up.experts) or logits.dtype not in NUMBERS:
            return Rejection(Reason.SHAPE, f"router logits {logits.shape} of {logits.dtype}")
        if bias is not None and (bias.shape != (up.experts,) or bias.dtype not in NUMBERS):
            return Rejection(Reason.SHAPE, f"router bias {bias.shape} of {bias.dtype}")
        if not dispatch.is_few(logits.size // up.experts * top_k, gate):
            return Rejection(Reason.SLOWER, "more rows than a decode step has")
        return check_call([self[self.form.experts][name] for name in FastSwitchGLU.parts], plan, x) or plan

    def __call__(self, x: mx.array) -> mx.array:
        form = self.form
        routing = form.routing(self) if self._may_be_fast(x) else None
        if routing is None or x.size // max(1, x.shape[-1]) * routing.top_k > dispatch.MOST_DECODE_ROWS:
            return self.original.__call__(self, x)
        experts = self[form.experts]
        parts = [experts.get(name) for name in FastSwitchGLU.parts]
        logits, bias = form.logits(self, x), form.bias(self)
        inputs = (x, logits) if bias is None else (x, logits, bias)
        activation = type(getattr(experts, "activation", None))
        arrays = x.shape, x.dtype, logits.shape, logits.dtype, None if bias is None else (bias.shape, bias.dtype)
        key = arrays, routing, type(experts), activation, envs.TILE.get()
        call = self._moe_fast_calls.get(key)
        y = call and call(self, parts, *inputs)
        if y is None:
            y = self._first(inputs, key, parts, bias, routing)
        if y is None:
            return self.original.__call__(self, x)
        return form.shared(self, x, y) if form.shared else y

    def _may_be_fast(self, x: mx.array) -> bool:
        """What can be told before the router's product is made."""
        if self._training or x.ndim < 2 or getattr(self, "sharding_group", None) is not None:
            return False
        return device.on_gpu() and _gate_is_known(self, self.original, self.form)

    def _first(
        self,
        inputs: tuple[mx.array, ...],
        key: tuple,
        parts: list[nn.Module],
        bias: mx.array | None,
        routing: RouterForm,
    ) -> mx.array | None:
        """A call that is not remembered; None: the original call."""
        x, logits = inputs[:2]
        plan = self.check(x, logits, bias, routing.top_k)
        if isinstance(plan, Rejection) or traced(inputs):
            return None
        up, gate, down = (weights(part, p) for part, p in zip(parts, plan, strict=True))
        try:
            y = ops.moe_block(x, logits, bias, routing, gate, up, down)
            run = ops.bind_block(gate.projection, down.projection, x, logits, bias, routing)
            remember(self, key, checked(parts, run))
        except KernelBuildError as error:
            warn_once(f"{Reason.BUILD.value}: {error}")
            return None
        return y


@cache
def fast(block: type[nn.Module]) -> type[nn.Module]:
    """The fast class of a block class in the table."""
    return type(f"Fast{block.__name__}", (FastBlock, block), {"original": block, "form": form_of(block)})


__all__ = ["FORMS", "FastBlock", "fast", "fingerprint", "form_of", "plan_block"]
