"""Calls that have passed every check, remembered by shapes: a decode step waits for every microsecond of Python."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from . import device
from .eligibility import Seen


@dataclass(frozen=True, slots=True)
class Call:
    """What a call comes to as long as its layers hold the arrays in `seen`: `run` gets the inputs, and those."""

    seen: tuple[Seen, ...]
    run: Callable[..., mx.array]


class Calls(dict[tuple, Call]):
    """The calls of one layer, by shapes and dtypes. Copies start empty."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Calls, ()


NONE = Calls()  # what a class has; never written to


def remember(layer: nn.Module, key: tuple, parts: Sequence[nn.Module], run: Callable[..., mx.array]) -> None:
    """Has `again` answer for `key`. `parts` have just been described."""
    # Past Module's own setter, which would take a dictionary for parameters.
    calls = vars(layer).setdefault("_moe_fast_calls", Calls())
    calls[key] = Call(tuple(part._moe_fast_seen for part in parts), run)


def again(layer: nn.Module, key: tuple, parts: Sequence[nn.Module], inputs: tuple[mx.array, ...]) -> mx.array | None:
    """The result of a call of `layer` that is like one before; None if there was none, or something has changed since.
    `key` has all that the checks look at, but for the arrays of `parts` and what is asked here."""
    call = layer._moe_fast_calls.get(key)
    if call is None or layer._training or not device.on_gpu():
        return None
    arrays = []
    for part, seen in zip(parts, call.seen, strict=True):
        held = seen.arrays(part)
        if held is None or "scales" not in part._no_grad:
            return None
        arrays.append(held)
    return None if traced(inputs) else call.run(inputs, *arrays)


_traces = 0


def _note(*_: mx.array) -> tuple[()]:
    global _traces
    _traces += 1
    return ()


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
