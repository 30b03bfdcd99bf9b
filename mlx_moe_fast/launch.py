"""Launches a kernel on MLX's own stream, inside its graph. The only module that touches MLX's kernel interface."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from . import device, jit
from .errors import KernelBuildError
from .variants import Variant

SUPPORTED = hasattr(mx.fast, "precompiled_cuda_kernel")
poison: float | None = None  # what outputs hold before a kernel writes them; for tests


class Loaded(NamedTuple):
    """A kernel as MLX is told of it."""

    name: str
    code: bytes
    threads: int
    shared_bytes: int


_loaded: dict[str, Loaded] = {}


def _load(variant: Variant) -> Loaded:
    target = device.current()
    if target is None:
        raise KernelBuildError("There is no CUDA device to launch on.", "Install MLX's CUDA build and a driver.")
    kernel = jit.load(variant, target.arch)
    return _loaded.setdefault(variant.id, Loaded(kernel.name, kernel.cubin, kernel.threads, kernel.shared_bytes))


def bind(
    variant: Variant,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    scalars: Sequence[int],
    blocks: int,
    contiguous: bool = False,
) -> Callable[..., list[mx.array]]:
    """`launch` as a function of `inputs`, a keyword argument: for calls that come again and again."""
    name, code, threads, shared_bytes = _loaded.get(variant.id) or _load(variant)
    return partial(
        mx.fast.precompiled_cuda_kernel,
        name=name,
        compiled_source=code,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        scalars=scalars,
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        shared_memory=shared_bytes,
        init_value=poison,
        ensure_row_contiguous=contiguous,
    )


def launch(
    variant: Variant,
    inputs: Sequence[mx.array],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    scalars: Sequence[int],
    blocks: int,
    contiguous: bool = False,
) -> list[mx.array]:
    """Lazily runs `blocks` blocks of a variant.

    Args:
        inputs: arrays, passed as pointers in this order, before the outputs and the scalars.
        outputs: shape and dtype of each; none of size 0. Uninitialised before the kernel writes them.
        scalars: 32-bit integers.
        contiguous: copy inputs that are not row-contiguous; else they must be.
    """
    return bind(variant, outputs, scalars, blocks, contiguous)(inputs=inputs)


# MLX copies and hashes the machine code at every launch, 0.4 us a KB, to look its module up. But it names a module
# after the kernel and that hash, and before it asks for code it looks for a file of that name in its own cache. So the
# code is put there once, for a kernel that brings none, under a name that says what it holds.
HASH_OF_NOTHING = 0x553E93901E462A6E  # std::hash of an empty std::string in libstdc++


def _cache_of_mlx() -> Path:
    default = Path(tempfile.gettempdir(), "mlx", mx.__version__, "ptx")  # type: ignore[attr-defined]
    return Path(os.environ.get("MLX_PTX_CACHE_DIR") or default)


@contextlib.contextmanager
def handed_over(variant: Variant) -> Iterator[bool]:
    """A block in which the variant has to be launched, and evaluated, for the first time: MLX keeps its machine code,
    and every later launch is spared it. Yields whether that is tried; if the block raises, launches bring their code
    along again."""
    whole = _load(variant)
    name = f"{whole.name}_{hashlib.sha256(whole.code).hexdigest()[:16]}_{os.getpid()}"
    module = _cache_of_mlx() / f"{name}_{HASH_OF_NOTHING:x}"
    files = {module.with_suffix(".ptx"): whole.code, module.with_suffix(".txt"): f"{name}\t{whole.name}\n".encode()}
    written = []
    try:
        module.parent.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            with path.open("xb") as file:
                written.append(path)
                file.write(content)
    except OSError:
        yield False
    else:
        _loaded[variant.id] = whole._replace(name=name, code=b"")
        try:
            yield True
        except BaseException:
            _loaded[variant.id] = whole
            raise
    finally:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
