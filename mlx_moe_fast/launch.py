"""Launches a kernel on MLX's own stream, inside its graph. The only module that touches MLX's kernel interface."""

from collections.abc import Sequence

import mlx.core as mx

from . import device, jit
from .errors import KernelBuildError
from .variants import Variant

SUPPORTED = hasattr(mx.fast, "precompiled_cuda_kernel")
poison: float | None = None  # what outputs hold before a kernel writes them; for tests


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
    target = device.current()
    if target is None:
        raise KernelBuildError("There is no CUDA device to launch on.", "Install MLX's CUDA build and a driver.")
    kernel = jit.load(variant, target.arch)
    return mx.fast.precompiled_cuda_kernel(
        name=kernel.name,
        compiled_source=kernel.cubin,
        inputs=inputs,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        scalars=scalars,
        grid=(blocks * kernel.threads, 1, 1),
        threadgroup=(kernel.threads, 1, 1),
        shared_memory=kernel.shared_bytes,
        init_value=poison,
        ensure_row_contiguous=contiguous,
    )
