"""Why a layer or a call stays on MLX's own kernels: a closed list of reasons, and the checks that give them.

A layer's arrays are looked at when it is patched and again whenever one has been replaced; everything else is asked
at every call, because adapters, dtypes, devices and training mode change under a patched model.
"""

import weakref
from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU

from . import device, dispatch, launch
from .ops import Weights
from .problem import Projection, Quantization
from .variants import BITS, GROUP_SIZES

DTYPES = {mx.bfloat16: "bf16", mx.float16: "fp16"}
N_MULTIPLE = 8  # outputs are written 16 bytes at a time
MAX_EXPERT_BYTES = 2**31 - 1  # of one matrix: offsets inside it have 32 bits


class Reason(StrEnum):
    """Why MLX's own kernels run."""

    NOT_QUANTIZED = "not-quantized"
    TYPE = "type"
    MODE = "mode"
    BITS = "bits"
    GROUP_SIZE = "group-size"
    DTYPE = "dtype"
    SHAPE = "shape"
    STRIDES = "strides"
    TRAINING = "training"
    DEVICE = "device"
    MLX_VERSION = "mlx-version"
    BUILD = "build"
    SLOWER = "slower"
    EMPTY = "empty"


HELP = {
    Reason.NOT_QUANTIZED: "The projection is a plain SwitchLinear.",
    Reason.TYPE: "A subclass, an adapter or another module stands where MLX's own layer is expected.",
    Reason.MODE: "Quantization mode other than affine, or with a global scale.",
    Reason.BITS: f"Bits other than {' and '.join(map(str, BITS))}.",
    Reason.GROUP_SIZE: f"Group size other than {', '.join(map(str, GROUP_SIZES))}.",
    Reason.DTYPE: "Activations, scales, biases and bias are not all bf16 or all fp16.",
    Reason.SHAPE: "Output features no multiple of 8, or arrays that do not belong together.",
    Reason.STRIDES: "A weight is a strided view, or a slice of a larger array.",
    Reason.TRAINING: "`model.train()`, or unfrozen scales; gradients always take MLX's own path.",
    Reason.DEVICE: "No CUDA device of compute capability 8.0 or newer, or the CPU is MLX's default device.",
    Reason.MLX_VERSION: "This MLX has no `mx.fast.precompiled_cuda_kernel`.",
    Reason.BUILD: "A kernel did not compile or load; a warning has the details.",
    Reason.SLOWER: "MLX's own kernel is the faster one for this shape.",
    Reason.EMPTY: "No rows.",
}


@dataclass(frozen=True)
class Rejection:
    """A reason and the fact behind it."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


def check_device() -> Rejection | None:
    """Whether kernels can be built and launched here at all."""
    if not launch.SUPPORTED:
        return Rejection(Reason.MLX_VERSION, "this MLX cannot launch kernels; upgrade it")
    found = device.current()
    if found is None:
        return Rejection(Reason.DEVICE, "MLX sees no CUDA device")
    if found.compute_capability < device.OLDEST:
        major, minor = found.compute_capability
        return Rejection(Reason.DEVICE, f"{found.name} has compute capability {major}.{minor}, needed is 8.0")
    return None


class _Seen:
    """The arrays that `describe` last found fit, by weak reference, and what they are. Copies start empty."""

    def __init__(self) -> None:
        self.arrays: tuple[weakref.ref[mx.array], ...] = ()
        self.projection: Projection | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Seen, ()


def describe(layer: nn.Module) -> Projection | Rejection:
    """What a QuantizedSwitchLinear (or our subclass of it) holds, if the kernels take it."""
    if not getattr(type(layer), "is_fast", False) and type(layer) is not QuantizedSwitchLinear:
        kind = Reason.NOT_QUANTIZED if type(layer).__name__ == "SwitchLinear" else Reason.TYPE
        return Rejection(kind, f"a {type(layer).__name__}")
    arrays = [layer[name] for name in ("weight", "scales", "biases", "bias") if layer.get(name) is not None]
    seen = getattr(layer, "_moe_fast_seen", None)
    if seen and len(seen.arrays) == len(arrays) and all(r() is a for r, a in zip(seen.arrays, arrays, strict=True)):
        return seen.projection
    found = _inspect(layer, arrays)
    if isinstance(found, Projection):
        layer._moe_fast_seen = seen = _Seen()
        seen.arrays, seen.projection = tuple(weakref.ref(a) for a in arrays), found
    return found


def _inspect(layer: nn.Module, arrays: list[mx.array]) -> Projection | Rejection:
    weight, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    bias = layer.get("bias")
    if layer.mode != "affine" or biases is None:
        return Rejection(Reason.MODE, f"mode {layer.mode}")
    if layer.get("global_scale") is not None or getattr(layer, "global_scale", None) is not None:
        return Rejection(Reason.MODE, "a global scale")
    if layer.bits not in BITS:
        return Rejection(Reason.BITS, f"{layer.bits} bits")
    if layer.group_size not in GROUP_SIZES:
        return Rejection(Reason.GROUP_SIZE, f"groups of {layer.group_size}")
    dtype = DTYPES.get(scales.dtype)
    if dtype is None or any(a.dtype != scales.dtype for a in (biases, bias) if a is not None):
        return Rejection(Reason.DTYPE, "scales, biases and bias of " + ", ".join(str(a.dtype) for a in arrays[1:]))
    if weight.dtype != mx.uint32 or weight.ndim != 3:
        return Rejection(Reason.SHAPE, f"weight {weight.shape} of {weight.dtype}")
    experts, n, words = weight.shape
    k = words * 32 // layer.bits
    groups = (experts, n, k // layer.group_size)
    if k % layer.group_size or scales.shape != groups or biases.shape != groups:
        return Rejection(Reason.SHAPE, f"weight {weight.shape}, scales {scales.shape}, biases {biases.shape}")
    if bias is not None and bias.shape != (experts, n):
        return Rejection(Reason.SHAPE, f"bias {bias.shape}, needed is {(experts, n)}")
    if n % N_MULTIPLE or min(weight.shape) == 0:
        return Rejection(Reason.SHAPE, f"{n} output features, needed is a multiple of {N_MULTIPLE}")
    if n * words * 4 > MAX_EXPERT_BYTES:
        return Rejection(Reason.SHAPE, f"{n * words * 4} bytes an expert, at most {MAX_EXPERT_BYTES}")
    if not all(_owns_its_buffer(a) for a in arrays):
        return Rejection(Reason.STRIDES, "an array is a view that is strided or much smaller than its buffer")
    return Projection(experts, n, k, Quantization(layer.bits, layer.group_size), dtype, bias is not None)


def _owns_its_buffer(array: mx.array) -> bool:
    """Whether an array is row-contiguous from the start of its own buffer. MLX shows no strides in Python, but
    `contiguous` shares the buffer of exactly such an array, and takes memory for any other."""
    mx.eval(array)
    before = mx.get_active_memory()
    copy = mx.contiguous(array)
    mx.eval(copy)
    return mx.get_active_memory() <= before


def weights(layer: nn.Module, projection: Projection) -> Weights:
    """The arrays of a layer that `describe` accepted."""
    return Weights(projection, layer["weight"], layer["scales"], layer["biases"], layer.get("bias"))


def check_call(
    layer: nn.Module, layers: list[nn.Module], projections: list[Projection], x: mx.array, rows: int
) -> Rejection | None:
    """Whether this call of `layer`, whose `layers` hold `projections`, may run on the kernels.

    `x`: what the first projection is fed; `rows`: (token, expert) pairs.
    """
    if layer.training:
        return Rejection(Reason.TRAINING, "training mode")
    if any("scales" not in part._no_grad for part in layers):
        return Rejection(Reason.TRAINING, "the scales are not frozen")
    if not device.on_gpu():
        return Rejection(Reason.DEVICE, "MLX's default device is the CPU")
    first = projections[0]
    if DTYPES.get(x.dtype) != first.dtype:
        return Rejection(Reason.DTYPE, f"activations of {x.dtype}, scales of {first.dtype}")
    if x.shape[-1] != first.k:
        return Rejection(Reason.SHAPE, f"{x.shape[-1]} input features, needed is {first.k}")
    if rows == 0:
        return Rejection(Reason.EMPTY, "no rows")
    if not dispatch.pays(rows, first.n, first.k):
        return Rejection(Reason.SLOWER, f"{rows} rows of {first.n} x {first.k}")
    return None


def check_chain(projections: list[Projection]) -> Rejection | None:
    """Whether the projections of an expert MLP (the last is the down projection) can run in one sorted order."""
    *first, down = projections
    head = first[0]
    if any((p.experts, p.k, p.n, p.dtype) != (head.experts, head.k, head.n, head.dtype) for p in first):
        return Rejection(Reason.SHAPE, f"projections differ: {', '.join(map(str, first))}")
    if any(p.quantization.bits != head.quantization.bits for p in first):
        return Rejection(Reason.BITS, f"projections differ: {', '.join(map(str, first))}")
    if (down.experts, down.k, down.dtype) != (head.experts, head.n, head.dtype):
        return Rejection(Reason.SHAPE, f"down {down} does not follow {head}")
    return None


def fuses(gate: Projection, up: Projection, activation: nn.Module) -> bool:
    """Whether gate, up and activation can run as one kernel."""
    return type(activation) is SwiGLU and gate == up
