"""Puts the fast layers into a model and takes them out again.

Only `__class__` of a layer changes: the object, its parameters, their names and whatever else hangs on it stay, so
that saving, adapters and sharding see the model they know.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from . import blocks, device, dispatch, jit, masks, ops, selftest, variants
from .eligibility import Reason, Rejection, check_device, describe, forget, fuses
from .errors import KernelBuildError, NotAccelerated
from .layers import FAST, plan_experts, warn_once
from .problem import Projection
from .variants import Variant

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerReport:
    """One layer: its path in the model, its original class, whether it runs on our kernels, why not (a
    `Reason` value, with the fact behind it in `detail`), and the kernels that it launches."""

    path: str
    kind: str
    replaced: bool
    reason: str | None
    detail: str
    launches: str


@dataclass(frozen=True)
class PatchReport:
    """Every expert layer and quantized dense layer of a model, and every MoE block if asked for, in order."""

    layers: tuple[LayerReport, ...]

    @property
    def replaced(self) -> list[LayerReport]:
        """Layers that run on our kernels wherever a call allows it."""
        return [layer for layer in self.layers if layer.replaced]

    @property
    def skipped(self) -> list[LayerReport]:
        """Layers left on MLX's own."""
        return [layer for layer in self.layers if not layer.replaced]

    def to_dict(self) -> dict:
        """As plain data, for JSON."""
        return {"layers": [asdict(layer) for layer in self.layers]}

    def __str__(self) -> str:
        if not self.layers:
            return "patched nothing: the model has no mixture-of-experts layer and no quantized one"
        lines = [f"{len(self.replaced)} of {len(self.layers)} layers run on mlx_moe_fast"]
        alike: dict[tuple, list[LayerReport]] = {}
        for layer in self.layers:
            alike.setdefault((layer.kind, layer.replaced, layer.reason, layer.detail, layer.launches), []).append(layer)
        for group in alike.values():
            first, last = group[0], group[-1]
            where = first.path if len(group) == 1 else f"{first.path} ... {last.path} ({len(group)})"
            why = f"{first.reason}: {first.detail}" if first.reason else first.detail
            what = first.launches if first.replaced else f"MLX's own kernels, {why}"
            lines.append(f"  {where}  {first.kind}: {what}")
        return "\n".join(lines)


def _original(module: nn.Module) -> type[nn.Module]:
    """mlx-lm's class of a layer, patched or not."""
    return getattr(type(module), "original", type(module))


DENSE = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def _fast_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that would take the place of a layer's, whether or not it has."""
    original = _original(module)
    return blocks.fast(original) if blocks.form_of(original) else FAST.get(original)


def _is_block(module: nn.Module) -> bool:
    return blocks.form_of(_original(module)) is not None


def _candidates(
    model: nn.Module, dense: bool = True, block: bool = True
) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Expert layers of a model with their projections: MLPs as a whole, linear layers where they stand alone. And, if
    `block`, the blocks around them; if `dense`, quantized dense layers."""
    inside: set[int] = set()
    for path, module in model.named_modules():
        fast = FAST.get(_original(module))
        if fast and fast.parts:
            projections = [module[name] for name in fast.parts if name in module]
            inside.update(map(id, projections))
            yield path, module, projections
    for path, module in model.named_modules():
        if id(module) not in inside and _original(module) in (QuantizedSwitchLinear, SwitchLinear):
            yield path, module, []
        elif block and _is_block(module):
            yield path, module, []
        elif dense and _original(module) in DENSE:
            yield path, module, []


def _plan(module: nn.Module) -> list[Projection] | Rejection:
    """What a candidate would launch for, if the kernels take it."""
    rejection = check_device()
    if rejection:
        return rejection
    fast = FAST.get(_original(module))
    try:
        if _is_block(module):
            return blocks.plan_block(module)
        if fast and fast.parts:
            return plan_experts(module, fast.parts)
        found = describe(module)
    except KernelBuildError as error:
        return _unbuilt(error)
    return found if isinstance(found, Rejection) else [found]


def _is_one_kernel(module: nn.Module, plan: list[Projection]) -> bool:
    """Whether gate, up and activation of an expert MLP run as one kernel."""
    return _original(module) is SwitchGLU and fuses(plan[1], plan[0], module.activation)


def _variants(module: nn.Module, plan: list[Projection]) -> tuple[str, list[Variant]]:
    """What a layer launches, in words, and every variant behind it."""
    names = "/".join(dict.fromkeys(str(p.quantization) for p in plan)) + f" {plan[0].dtype}"
    if _original(module) in DENSE:
        return f"decode, up to {dispatch.DENSE_ROWS} rows ({names})", variants.needed_dense(plan[0])
    if _is_block(module):
        few, words = ops.few_variants(plan), "few rows: router, gate+up+SwiGLU, down+combination"
        return f"{words} ({names})", few
    if _is_one_kernel(module, plan):
        words = "gate+up+SwiGLU, down: decode, or route and prefill_sm80"
        return f"{words} ({names})", ops.variants_of(plan[1:], True)
    words = "decode, or route and prefill_sm80"
    words = words if len(plan) == 1 else f"{len(plan)} products, activation in MLX: {words}"
    return f"{words} ({names})", ops.variants_of(plan, False)


def _build(wanted: list[Variant]) -> Rejection | None:
    """Compiles, loads and runs each variant once, so that nothing can fail in the middle of a generation."""
    target = device.current()
    assert target is not None, "checked by the caller"
    try:
        jit.prepare(wanted, target.arch, lambda n: log.info("compiling %d kernels, once; they are cached", n))
        selftest.run(wanted)
    except KernelBuildError as error:
        return _unbuilt(error)
    return None


def _unbuilt(error: KernelBuildError) -> Rejection:
    warn_once(f"{Reason.BUILD.value}: {error}")
    return Rejection(Reason.BUILD, str(error).splitlines()[0])


def report(model: nn.Module) -> PatchReport:
    """How every expert layer and quantized dense layer of `model` runs now, and every MoE block if blocks are patched;
    changes nothing."""
    return _report(model, {}, block=any(isinstance(module, blocks.FastBlock) for module in model.modules()))


def _report(model: nn.Module, failed: dict[int, Rejection], dense: bool = True, block: bool = True) -> PatchReport:
    rows = []
    for path, module, parts in _candidates(model, dense, block):
        kind, fast = _original(module).__name__, getattr(type(module), "is_fast", False)
        plan = failed.get(id(module)) or _plan(module)
        if isinstance(plan, Rejection):
            alone = 0 if fast else sum(getattr(type(part), "is_fast", False) for part in parts)
            detail = plan.detail + (f"; {alone} of its projections run one by one on mlx_moe_fast" if alone else "")
            rows.append(LayerReport(path, kind, False, plan.reason.value, detail, ""))
        elif fast:
            rows.append(LayerReport(path, kind, True, None, "", _variants(module, plan)[0]))
        else:
            rows.append(LayerReport(path, kind, False, None, "not patched", ""))
    return PatchReport(tuple(sorted(rows, key=lambda row: _natural(row.path))))


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key by which layers.9 comes before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def patch(model: nn.Module, *, strict: bool = False, dense: bool = True, block: bool = True) -> PatchReport:
    """Replaces the quantized layers of `model` by fast ones, in place: those of experts, for any number of rows, and
    dense ones, for the rows of a decode step.

    Copies no weight and changes no parameter. Compiles what the layers need (once: it is cached) and evaluates
    everything it makes before it returns. Patch after loading, sharding and adapters. Doing it twice is the same
    as once.

    Args:
        model: any mlx_lm model.
        strict: raise NotAccelerated, and leave the model as it was, if no layer could be replaced or an expert layer
            was not.
        dense: replace QuantizedLinear and QuantizedEmbedding (as an output layer) too.
        block: replace whole MoE blocks of known families too, for the rows of a decode step: router, experts and
            combination in three launches.

    While a patched model is around, the cache that mlx-lm makes for a batch of sequences gives decode steps no mask if
    no sequence is padded: the same results, by MLX's fused attention.

    Returns:
        What was replaced and what was not, with the reasons.
    """
    accepted: list[tuple[nn.Module, list[nn.Module], list[Projection]]] = []
    failed: dict[int, Rejection] = {}
    for _, module, parts in _candidates(model, dense, block):
        plan = _plan(module)
        if isinstance(plan, Rejection):
            # The projections of an MLP that cannot run as one may still run each for itself.
            plans = [(part, _plan(part)) for part in parts]
            accepted += [(part, [], found) for part, found in plans if not isinstance(found, Rejection)]
        else:
            accepted.append((module, parts, plan))
    wanted = list(dict.fromkeys(v for module, _, plan in accepted for v in _variants(module, plan)[1]))
    rejection = _build(wanted) if wanted else None
    if rejection:
        failed = {id(module): rejection for module, _, _ in accepted}
        accepted = []
    before = [(m, type(m)) for module, parts, _ in accepted for m in (module, *parts)]
    for module, parts, plan in accepted:
        for layer in (module, *parts):
            kind = _fast_class(layer)
            if kind and type(layer) is not kind:
                layer.__class__ = kind
                layer.few_rows = dispatch.few_rows(plan[0].n, plan[0].k, _original(layer) in DENSE)
        if _is_block(module) or _is_one_kernel(module, plan):
            module.few_rows = 0  # two launches of ours instead of seven operations of MLX
    result = _report(model, failed, dense, block)
    if strict and (_complaints(result) or not result.replaced):
        for module, kind in before:
            if not getattr(kind, "is_fast", False):
                _restore(module)
        raise NotAccelerated(*_complaint(result))
    if result.replaced:
        masks.hold(model)
    return result


def _complaints(result: PatchReport) -> list[LayerReport]:
    """Expert layers that were left out."""
    others = {kind.__name__ for kind in DENSE} | {name.rpartition(".")[2] for name in blocks.FORMS}
    return [layer for layer in result.skipped if layer.kind not in others]


def _complaint(result: PatchReport) -> tuple[str, str]:
    if not result.skipped:
        return "The model has no quantized layer to accelerate.", "Run it without `require`."
    first = (_complaints(result) or result.skipped)[0]
    return (
        f"{first.path} ({first.kind}) stays on MLX's own kernels, {first.reason}: {first.detail}.",
        "Use `auto` to run it so.",
    )


def unpatch(model: nn.Module) -> int:
    """Gives every layer of `model` its original class back; returns how many that were."""
    masks.release(model)
    fast = _fast_layers(model)
    for module in fast:
        _restore(module)
    return len(fast)


def _fast_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(type(module), "is_fast", False)]


def _restore(module: nn.Module) -> None:
    module.__class__ = _original(module)
    forget(module)


@contextmanager
def patched(model: nn.Module, *, strict: bool = False, dense: bool = True, block: bool = True) -> Iterator[PatchReport]:
    """`patch` for the duration of a `with` block; layers that were patched before stay so after it."""
    before = _fast_layers(model)
    try:
        yield patch(model, strict=strict, dense=dense, block=block)
    finally:
        kept = set(map(id, before))
        if not kept:
            masks.release(model)
        for module in _fast_layers(model):
            if id(module) not in kept:
                _restore(module)
