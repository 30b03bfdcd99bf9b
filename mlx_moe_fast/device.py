"""The CUDA device that MLX runs on. Reads it from MLX: no CUDA context is made here."""

import logging
from functools import cache

import mlx.core as mx

from .problem import Device

log = logging.getLogger(__name__)
OLDEST = (8, 0)  # cp.async, bf16 mma.sync


@cache
def current() -> Device | None:
    """MLX's CUDA device, or None where MLX has none (its CPU build, no driver, Metal)."""
    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        return None
    info = mx.device_info(mx.gpu)
    capability = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
    return Device(str(info.get("device_name", "NVIDIA GPU")), capability)


def arch() -> str:
    """The architecture that kernels are compiled for; empty if there is no device."""
    target = current()
    return target.arch if target else ""


def on_gpu() -> bool:
    """Whether an operation made now runs on the GPU."""
    return mx.default_device() == mx.gpu


@cache
def multiprocessors() -> int:
    """How many multiprocessors MLX's CUDA device has; 0 if there is none, or CuPy cannot say."""
    if current() is None:
        return 0
    try:
        from cupy.cuda import runtime

        return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, 0))
    except Exception as error:
        log.debug("the number of multiprocessors is unknown: %s", error)
        return 0
