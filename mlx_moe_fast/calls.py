"""Calls that have passed every check, remembered by shapes: a decode step waits for every microsecond of Python."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from . import device

Call = Callable[..., mx.array | None]


class Calls(dict[tuple, Call]):
    """The calls of one layer, by shapes and dtypes. Copies start empty."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Calls, ()


NONE = Calls()  # what a class has; never written to


def remember(layer: nn.Module, key: tuple, call: Call) -> None:
    """Keeps what `checked` or `alone` made as the layer's call for `key`, which has all that they do not ask."""
    # Past Module's own setter, which would take a dictionary for parameters.
    vars(layer).setdefault("_moe_fast_calls", Calls())[key] = call


def checked(parts: Sequence[nn.Module], run: Callable[..., mx.array]) -> Call:
    """run(*inputs, *arrays of the parts), as a function of a layer, its parts and the inputs; None if something has
    changed since the parts have been described, just now."""
    all_seen, run = [part._moe_fast_seen for part in parts], compiled(run)

    def call(layer: nn.Module, parts: Sequence[nn.Module], *inputs: mx.array) -> mx.array | None:
        if layer._training or not device.on_gpu():
            return None
        arrays = inputs
        for part, seen in zip(parts, all_seen, strict=True):
            held = seen.arrays(part)
            if held is None or "scales" not in part._no_grad:
                return None
            arrays += held
        before = _traces
        out = run(*arrays)
        return None if _traces != before and traced(inputs) else out

    return call


def alone(layer: nn.Module, run: Callable[..., mx.array]) -> Call:
    """`checked` of a layer that has no other parts, as a function of it and its input: a model has hundreds of them,
    and each call in Python is felt."""
    seen, run = layer._moe_fast_seen, compiled(run)
    kind, (weight_of, scales_of, biases_of, bias_of) = seen.kind, seen.refs

    def call(layer: nn.Module, x: mx.array) -> mx.array | None:
        get = layer.get
        weight, scales, biases, bias = get("weight"), get("scales"), get("biases"), get("bias")
        if weight is not weight_of() or scales is not scales_of() or biases is not biases_of() or bias is not bias_of():
            return None
        if type(layer) is not kind or layer._training or "scales" not in layer._no_grad or not device.on_gpu():
            return None
        before = _traces
        out = run(x, weight, scales, biases, scales if bias is None else bias)
        return None if _traces != before and traced((x,)) else out

    return call


_traces = 0


def _note(*_: mx.array) -> tuple[()]:
    global _traces
    _traces += 1
    return ()


def compiled(run: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`run`, a function of arrays, without its Python: MLX repeats the operations that it made the first time. Where it
    is run all the same, which `_traces` tells, a transformation may be looking on."""

    def function(*arrays: mx.array) -> mx.array:
        _note()
        return run(*arrays)

    return mx.compile(function)


_probe = mx.compile(_note, shapeless=True)


def traced(arrays: tuple[mx.array, ...]) -> bool:
    """Whether a function transformation (grad, vmap, compile) is looking on. MLX runs the Python of a compiled function
    then, and otherwise only the first time that it meets such arrays."""
    before = _traces
    _probe(*arrays)
    if _traces == before:
        return False
    _probe(*arrays)
    return _traces != before + 1
