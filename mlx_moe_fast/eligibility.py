"""Why a layer or a call stays on MLX's own kernels: a closed list of reasons, and the checks that give them.

A layer's arrays are looked at when it is patched and again whenever one has been replaced; everything else is asked
at every call, because adapters, dtypes, devices and training mode change under a patched model.
"""

import weakref
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU

from . import device, launch, ops
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


ARRAYS = ("weight", "scales", "biases", "bias")


class Seen:
    """The arrays that `describe` last looked at, by weak reference, and what it found. Copies start empty."""

    def __init__(self, layer: nn.Module | None = None, found: Projection | Rejection | None = None) -> None:
        self.found, self.kind = found, type(layer)
        arrays = [layer.get(name) for name in ARRAYS] if layer is not None else [None] * 4
        self.refs = tuple((lambda: None) if a is None else weakref.ref(a) for a in arrays)

    def arrays(self, layer: nn.Module) -> tuple[Any, ...] | None:
        """The layer's arrays in the kernels' order, as `Weights.arrays`; None if one, or the class, is another now."""
        if type(layer) is not self.kind:
            return None
        get, refs = layer.get, self.refs
        weight, scales, biases, bias = get("weight"), get("scales"), get("biases"), get("bias")
        if weight is refs[0]() and scales is refs[1]() and biases is refs[2]() and bias is refs[3]():
            return weight, scales, biases, scales if bias is None else bias
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Seen, ()


NOTHING_SEEN = Seen()


def check_first(layer: nn.Module, rows: int) -> Rejection | None:
    """What is asked before the arrays are looked at, which training replaces all the time. `rows`: (token, expert)
    pairs of the call."""
    if layer.training:
        return Rejection(Reason.TRAINING, "training mode")
    if not device.on_gpu():
        return Rejection(Reason.DEVICE, "MLX's default device is the CPU")
    if rows == 0:
        return Rejection(Reason.EMPTY, "no rows")
    if rows < layer.few_rows:
        return Rejection(Reason.SLOWER, f"{rows} rows, ours pay from {layer.few_rows} on")
    return None


QUANTIZED = (QuantizedSwitchLinear, nn.QuantizedLinear, nn.QuantizedEmbedding)


def describe(layer: nn.Module) -> Projection | Rejection:
    """What a quantized layer (or our subclass, which remembers the answer) holds, if the kernels take it. A dense one
    counts as one expert."""
    fast = getattr(type(layer), "is_fast", False)
    if not fast and type(layer) not in QUANTIZED:
        kind = Reason.NOT_QUANTIZED if type(layer).__name__ == "SwitchLinear" else Reason.TYPE
        return Rejection(kind, f"a {type(layer).__name__}")
    seen: Seen = getattr(layer, "_moe_fast_seen", NOTHING_SEEN)
    if seen.found and seen.arrays(layer):
        return seen.found
    found = _inspect(layer, [layer[name] for name in ARRAYS if layer.get(name) is not None])
    if fast:
        layer._moe_fast_seen = Seen(layer, found)
    return found


def forget(layer: nn.Module) -> None:
    """Drops what we put on a layer."""
    for name in ("_moe_fast_seen", "_moe_fast_calls", "few_rows"):
        vars(layer).pop(name, None)


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
    lead = weight.shape[:-2]
    if weight.dtype != mx.uint32 or len(lead) != isinstance(layer, QuantizedSwitchLinear):
        return Rejection(Reason.SHAPE, f"weight {weight.shape} of {weight.dtype}")
    experts = lead[0] if lead else 1
    n, words = weight.shape[-2:]
    k = words * 32 // layer.bits
    groups = (*lead, n, k // layer.group_size)
    if k % layer.group_size or scales.shape != groups or biases.shape != groups:
        return Rejection(Reason.SHAPE, f"weight {weight.shape}, scales {scales.shape}, biases {biases.shape}")
    if bias is not None and bias.shape != (*lead, n):
        return Rejection(Reason.SHAPE, f"bias {bias.shape}, needed is {(*lead, n)}")
    if n % N_MULTIPLE or min(weight.shape) == 0:
        return Rejection(Reason.SHAPE, f"{n} output features, needed is a multiple of {N_MULTIPLE}")
    if n * words * 4 > MAX_EXPERT_BYTES:
        return Rejection(Reason.SHAPE, f"{n * words * 4} bytes an expert, at most {MAX_EXPERT_BYTES}")
    try:
        mx.eval(arrays)
    except ValueError:  # a compiled function with the parameters as inputs: there is nothing to look at yet
        return Rejection(Reason.STRIDES, "the weights are inputs of a function that is being compiled")
    owned = ops.own_their_buffers(arrays) if device.on_gpu() else contiguous_on_host(arrays)
    if not owned:
        return Rejection(Reason.STRIDES, "an array is a strided view, or a slice of a larger one")
    return Projection(experts, n, k, Quantization(layer.bits, layer.group_size), dtype, bias is not None)


def contiguous_on_host(arrays: list[mx.array]) -> bool:
    """Whether each array is row-contiguous. Evaluates the arrays, and would move ones that lie on a GPU."""
    return all(memoryview(cast(Any, a)).c_contiguous for a in arrays)


def weights(layer: nn.Module, projection: Projection) -> Weights:
    """The arrays of a layer that `describe` accepted."""
    return Weights(projection, layer["weight"], layer["scales"], layer["biases"], layer.get("bias"))


def check_call(layers: list[nn.Module], projections: list[Projection], x: mx.array) -> Rejection | None:
    """Whether a call of `layers`, which hold `projections`, may run on the kernels; the first is fed `x`."""
    for part in layers:
        if "scales" not in part._no_grad:
            return Rejection(Reason.TRAINING, "the scales are not frozen")
    first = projections[0]
    if DTYPES.get(x.dtype) != first.dtype:
        return Rejection(Reason.DTYPE, f"activations of {x.dtype}, scales of {first.dtype}")
    if x.shape[-1] != first.k:
        return Rejection(Reason.SHAPE, f"{x.shape[-1]} input features, needed is {first.k}")
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
