"""A decode step of a batch in which no sequence is padded needs no mask: mlx-lm then gives none to attention.

With an array as mask, MLX's CUDA backend leaves its fused attention for some twenty operations a layer. While a patched
model is around, mlx-lm's cache of a batch therefore asks whether its mask would hide anything.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache

from .forms import hash_of

ORIGINAL = BatchKVCache.make_mask
FINGERPRINT = "3b4a612b30cb6249"  # of the text of ORIGINAL: another may mean something else
_held: dict[int, weakref.finalize] = {}  # by the id of a patched model


def _any(padding: mx.array) -> bool:
    """Whether there is padding, or no telling inside a function transformation. It waits for nothing but a few numbers'
    own computation, once after each change."""
    try:
        return any(padding.tolist())  # type: ignore[arg-type]
    except ValueError:
        return True


def make_mask(
    self: BatchKVCache, N: int, return_array: bool = False, window_size: int | None = None, **kwargs: Any
) -> mx.array | None:
    """BatchKVCache.make_mask, or None where one query sees all keys."""
    sees_all = N == 1 and not return_array and not kwargs and (window_size is None or self._idx < window_size)
    if sees_all and not _any(self.left_padding):
        return None
    return ORIGINAL(self, N, return_array, window_size=window_size, **kwargs)


@cache
def is_known() -> bool:
    """Whether mlx-lm's method is the one that has been looked at."""
    try:
        return hash_of(ORIGINAL) == FINGERPRINT
    except (OSError, TypeError):
        return False


def _install(method: Callable[..., mx.array | None]) -> None:
    setattr(BatchKVCache, "make_mask", method)  # noqa: B010 - mypy takes no assignment to a method


def hold(model: nn.Module) -> None:
    """Leaves masks out from now on, until `release` or the end of the model."""
    if is_known() and id(model) not in _held:
        _held[id(model)] = weakref.finalize(model, _drop, id(model))
        _install(make_mask)


def release(model: nn.Module) -> None:
    """The opposite of `hold`; mlx-lm has its own method back when no model needs it otherwise."""
    if id(model) in _held:
        _held[id(model)]()


def _drop(key: int) -> None:
    del _held[key]
    if not _held:
        _install(ORIGINAL)
