"""Subclasses of mlx-lm's expert layers and of MLX's quantized ones, put in their place by swapping `__class__`.

Signature, parameters and their names stay. Each call asks whether the kernels take it and else makes the original
call, whose projections ask again, each for itself; gradients are always those of the original call.
"""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchMLP

from . import calls, device, dispatch, envs, ops
from .calls import alone, checked, remember, traced
from .eligibility import Reason, Rejection, check_call, check_chain, check_first, describe, fuses, weights
from .errors import KernelBuildError
from .problem import Projection

log = logging.getLogger(__name__)
MAX_STOCK_ROWS = 65_528  # more in one gather_qmm and MLX's launch fails (its grid's z axis ends at 65,535)
MAX_ROWS = 1 << 20  # of one launch of ours: keeps grids and intermediate results in bounds

Call = Callable[[mx.array, mx.array], mx.array]


@cache
def warn_once(message: str) -> None:
    log.warning(message)


def in_chunks(call: Call, x: mx.array, indices: mx.array, most: int) -> mx.array:
    """call(x, indices), in pieces of at most `most` routed rows; x [..., D] and indices [..., k] lead alike."""
    if indices.size <= most:
        return call(x, indices)
    lead, top_k = indices.shape[:-1], indices.shape[-1]
    flat_x, flat_indices = x.reshape(-1, x.shape[-1]), indices.reshape(-1, top_k)
    step = max(1, most // top_k)
    parts = [call(flat_x[i : i + step], flat_indices[i : i + step]) for i in range(0, flat_x.shape[0], step)]
    return mx.concatenate(parts).reshape(*lead, *parts[0].shape[1:])


def attempt(
    fast: Callable[[mx.array], mx.array], stock: Callable[[mx.array], mx.array], x: mx.array, layers: list[nn.Module]
) -> mx.array:
    """fast(x) with the gradient of stock(x), or stock's result, after one warning, where a kernel cannot be built.
    Gradients are those of x and of any `bias` of `layers` that is not frozen."""
    biased = [layer for layer in layers if "bias" in layer and "bias" not in layer._no_grad]
    biases = [layer["bias"] for layer in biased]
    try:
        # A custom function costs more than a launch.
        return differentiable(fast, stock, x, biased, biases) if traced((x, *biases)) else fast(x)
    except KernelBuildError as error:
        warn_once(f"{Reason.BUILD.value}: {error}")
        return stock(x)


def differentiable(
    fast: Callable[[mx.array], mx.array],
    stock: Callable[[mx.array], mx.array],
    x: mx.array,
    biased: list[nn.Module],
    biases: list[mx.array],
) -> mx.array:
    """fast(x) with the gradient of stock(x), which reads `biases` from the layers `biased`."""

    def stock_of(x: mx.array, *values: mx.array) -> mx.array:
        for layer, value in zip(biased, values, strict=True):
            layer["bias"] = value
        try:
            return stock(x)
        finally:
            for layer, bias in zip(biased, biases, strict=True):
                layer["bias"] = bias

    function = mx.custom_function(lambda x, *_: fast(x))

    @function.vjp
    def vjp(primals: Any, cotangent: mx.array, _output: mx.array) -> Any:
        primals = primals if biased else (primals,)
        _, gradients = mx.vjp(stock_of, list(primals), [cotangent])
        return tuple(gradients) if biased else gradients[0]

    return function(x, *biases)  # type: ignore[return-value]


def plan_experts(layer: nn.Module, parts: tuple[str, ...]) -> list[Projection] | Rejection:
    """What the projections of an expert MLP hold, if they can run on the kernels as one. `parts` names them, the
    down projection last."""
    projections = []
    for name in parts:
        found = describe(layer[name])
        if isinstance(found, Rejection):
            return Rejection(found.reason, f"{name}: {found.detail}")
        projections.append(found)
    return check_chain(projections) or projections


class FastExperts(nn.Module):
    """What the two expert MLPs share; `parts` as in `plan_experts`."""

    is_fast = True
    original: type[nn.Module]
    parts: tuple[str, ...]
    few_rows = 0  # routed rows below which the original call is faster; `patch` sets it
    _moe_fast_calls = calls.NONE

    def check(self, x: mx.array, indices: mx.array) -> list[Projection] | Rejection:
        """What this call would launch for, or why it takes the original path."""
        plan = check_first(self, indices.size) or plan_experts(self, self.parts)
        if isinstance(plan, Rejection):
            return plan
        if x.ndim != indices.ndim or x.shape[:-1] != indices.shape[:-1]:
            return Rejection(Reason.SHAPE, f"x {x.shape} and indices {indices.shape} do not belong together")
        return check_call([self[name] for name in self.parts], plan, x) or plan

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if indices.size < self.few_rows:
            return self.original.__call__(self, x, indices)
        key = x.shape, x.dtype, indices.shape, indices.dtype, type(self.activation), envs.TILE.get()
        layers = [self[name] for name in self.parts]
        call = self._moe_fast_calls.get(key)
        out = call and call(self, layers, x, indices)
        if out is not None:
            return out
        indices = mx.stop_gradient(indices)

        def stock(x: mx.array, indices: mx.array) -> mx.array:
            most = MAX_STOCK_ROWS if device.on_gpu() else indices.size
            return in_chunks(lambda x, i: self.original.__call__(self, x, i), x, indices, most)

        plan = self.check(x, indices)
        if isinstance(plan, Rejection):
            return stock(x, indices)

        def fast(x: mx.array, indices: mx.array) -> mx.array:
            if not dispatch.is_few(indices.size, plan[0]):
                out = self.experts(x.reshape(-1, x.shape[-1]), indices.flatten(), plan)
                return out.reshape(*indices.shape, out.shape[-1])
            out = self.experts(x, indices, plan)  # a reshape costs as much as a small kernel
            run = self.launches(x, indices, plan)
            if run:
                remember(self, key, checked(layers, run))
            return out

        return attempt(lambda x: in_chunks(fast, x, indices, MAX_ROWS), lambda x: stock(x, indices), x, layers)

    def launches(self, x: mx.array, ids: mx.array, plan: list[Projection]) -> Callable[..., mx.array] | None:
        """`experts` for these shapes and few rows, as a function of (x, ids) and the arrays of each of `parts`."""
        return None

    def experts(self, x: mx.array, ids: mx.array, plan: list[Projection]) -> mx.array:
        """x [T, D], ids [T * k] -> [T * k, D]; few rows in any shape: x [..., D], ids [..., k] -> [..., k, D]."""
        *first, down = (weights(self[name], p) for name, p in zip(self.parts, plan, strict=True))
        return ops.moe_mlp(x, ids, first, self.activation, down)


class FastSwitchGLU(FastExperts, SwitchGLU):
    """SwitchGLU whose projections run grouped; gate, up and SwiGLU as one kernel."""

    original = SwitchGLU
    parts = ("up_proj", "gate_proj", "down_proj")  # the order in which `activation` takes the first two

    def launches(self, x: mx.array, ids: mx.array, plan: list[Projection]) -> Callable[..., mx.array] | None:
        up, gate, down = plan
        return ops.bind_glu(gate, down, x, ids) if fuses(gate, up, self.activation) else None

    def experts(self, x: mx.array, ids: mx.array, plan: list[Projection]) -> mx.array:
        up, gate, down = (weights(self[name], p) for name, p in zip(self.parts, plan, strict=True))
        if fuses(gate.projection, up.projection, self.activation):
            return ops.moe_glu(x, ids, gate, up, down)
        return ops.moe_mlp(x, ids, [up, gate], self.activation, down)


class FastSwitchMLP(FastExperts, SwitchMLP):
    """SwitchMLP whose two projections run grouped, its activation in MLX between them."""

    original = SwitchMLP
    parts = ("fc1", "fc2")


class FastQuantizedSwitchLinear(QuantizedSwitchLinear):
    """QuantizedSwitchLinear as one grouped product, whether or not its indices are sorted."""

    is_fast = True
    original = QuantizedSwitchLinear
    parts: tuple[str, ...] = ()
    few_rows = 0

    def check(self, x: mx.array, indices: mx.array) -> Projection | Rejection:
        """What this call would launch for, or why it takes the original path."""
        if x.ndim < 2:
            return Rejection(Reason.SHAPE, f"x {x.shape} has no row axis")
        plan = check_first(self, _rows(x, indices)) or describe(self)
        if isinstance(plan, Rejection):
            return plan
        return check_call([self], [plan], x) or plan

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if x.ndim >= 2 and _rows(x, indices) < self.few_rows:
            return super().__call__(x, indices, sorted_indices)
        super_call = super().__call__

        def stock(x: mx.array, indices: mx.array) -> mx.array:
            most = MAX_STOCK_ROWS if device.on_gpu() else indices.size * x.size
            return broadcast_in_chunks(lambda x, i: super_call(x, i, sorted_indices), x, indices, most)

        plan = self.check(x, indices)
        if isinstance(plan, Rejection):
            return stock(x, indices)

        def fast(x: mx.array, indices: mx.array) -> mx.array:
            # gather_qmm: x [..., M, K] against matrices picked by indices [...], the leading axes broadcast.
            batch = mx.broadcast_shapes(x.shape[:-2], indices.shape)
            m, k = x.shape[-2:]
            ids = mx.broadcast_to(indices[..., None], (*batch, m)).flatten()
            if m > 1 or not _repeats_in_runs(x.shape[:-2], batch):
                x = mx.broadcast_to(x, (*batch, m, k))
            return ops.grouped_qmm(x.reshape(-1, k), ids, weights(self, plan)).reshape(*batch, m, plan.n)

        most = max(1, MAX_ROWS // x.shape[-2])
        return attempt(lambda x: broadcast_in_chunks(fast, x, indices, most), lambda x: stock(x, indices), x, [self])


class FastDense(nn.Module):
    """A quantized matrix for the rows of a decode step; the original call for more."""

    is_fast = True
    original: type[nn.Module]
    parts: tuple[str, ...] = ()
    few_rows = 0
    _moe_fast_calls = calls.NONE

    def check(self, x: mx.array) -> Projection | Rejection:
        """What this call would launch for, or why it takes the original path."""
        rows = x.size // x.shape[-1] if x.ndim and x.size else 0
        if rows > dispatch.DENSE_ROWS:
            return Rejection(Reason.SLOWER, f"{rows} rows, ours are for at most {dispatch.DENSE_ROWS}")
        plan = check_first(self, rows) or describe(self)
        if isinstance(plan, Rejection):
            return plan
        return check_call([self], [plan], x) or plan

    def multiply(self, x: mx.array, stock: Callable[[mx.array], mx.array]) -> mx.array:
        """x [..., K] -> [..., N]."""
        shape = x.shape
        if shape and x.size < self.few_rows * shape[-1]:  # at once: MLX's thread is what a single sequence waits for
            return stock(x)
        key = shape, x.dtype
        call = self._moe_fast_calls.get(key)
        out = call and call(self, x)
        if out is not None:
            return out
        plan = self.check(x)
        if isinstance(plan, Rejection):
            return stock(x)

        def fast(x: mx.array) -> mx.array:
            out = ops.dense_qmm(x, weights(self, plan))
            remember(self, key, alone(self, ops.bind_dense(plan, x)))
            return out

        return attempt(fast, stock, x, [self])


class FastQuantizedLinear(FastDense, nn.QuantizedLinear):
    """QuantizedLinear that reads its weights once for up to 32 rows."""

    original = nn.QuantizedLinear

    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x, super().__call__)


class FastQuantizedEmbedding(FastDense, nn.QuantizedEmbedding):
    """QuantizedEmbedding whose `as_linear`, a tied output layer, reads its weights once for up to 32 rows."""

    original = nn.QuantizedEmbedding

    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x, super().as_linear)


def broadcast_in_chunks(call: Call, x: mx.array, indices: mx.array, most: int) -> mx.array:
    """call(x, indices) with gather_qmm's broadcasting, in pieces of at most `most` matrices."""
    batch = mx.broadcast_shapes(x.shape[:-2], indices.shape)
    size = math.prod(batch)
    if size <= most:
        return call(x, indices)
    x = mx.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(size, *x.shape[-2:])
    indices = mx.broadcast_to(indices, batch).reshape(size)
    parts = [call(x[i : i + most], indices[i : i + most]) for i in range(0, size, most)]
    return mx.concatenate(parts).reshape(*batch, *parts[0].shape[1:])


def _rows(x: mx.array, indices: mx.array) -> int:
    """Routed rows of gather_qmm(x, ..., rhs_indices=indices)."""
    return math.prod(mx.broadcast_shapes(x.shape[:-2], indices.shape)) * x.shape[-2]


def _repeats_in_runs(lead: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    """Whether x, whose leading axes are `lead`, broadcasts to `batch` by repeating each of its rows in a run, so that
    row r of the result is row r // run of x."""
    lead = (1,) * (len(batch) - len(lead)) + tuple(lead)
    own = len(batch)
    while own and lead[own - 1] == 1:
        own -= 1
    return lead[:own] == tuple(batch[:own])


FAST: dict[type[nn.Module], type[FastExperts] | type[FastQuantizedSwitchLinear] | type[FastDense]] = {
    cls.original: cls
    for cls in (FastSwitchGLU, FastSwitchMLP, FastQuantizedSwitchLinear, FastQuantizedLinear, FastQuantizedEmbedding)
}
