"""What the scripts that run whole models share: model and prompts, the error of one layer, output."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_moe_fast
from mlx_moe_fast.bench import Timing
from mlx_moe_fast.eligibility import DTYPES
from mlx_moe_fast.problem import Quantization


def positive(text: str) -> int:
    """A type for argparse."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


# ---- model and prompts --------------------------------------------------------------------------


def load(model: str) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """As `mlx_lm.load`; exits with a message when there is no such model."""
    if not Path(model).is_dir() and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        sys.exit(f"error: there is no model folder {model}")
    try:
        loaded, tokenizer, config = mlx_lm.load(model, return_config=True)  # type: ignore[misc]
    except (OSError, ValueError) as error:
        sys.exit(f"error: cannot load {model}: {error}")
    return loaded, tokenizer, config


def quantization_of(model: nn.Module, config: dict[str, Any]) -> str:
    """For example affine4g64; the dtype when the model is not quantized."""
    if found := config.get("quantization"):
        return str(Quantization(found["bits"], found["group_size"], found.get("mode", "affine")))
    return DTYPES.get(float_dtype(model), "fp32")


def float_dtype(model: nn.Module) -> mx.Dtype:
    parameters = dict(tree_flatten(model.parameters())).values()
    return next(p.dtype for p in parameters if mx.issubdtype(p.dtype, mx.floating))


def make_prompt(tokenizer: TokenizerWrapper, length: int, text: Path | None, seed: int) -> list[int]:
    """`length` token ids: of the text, or random ones that are not special."""
    if text is None:
        plain = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        return np.random.default_rng(seed).choice(plain, length).tolist()
    if not text.is_file():
        sys.exit(f"error: there is no text file {text}")
    tokens = tokenizer.encode(text.read_text())
    if not tokens:
        sys.exit(f"error: {text} has no tokens")
    return np.resize(tokens, length).tolist()


# ---- error of one layer -------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerError:
    """||out - ref|| / ||ref|| of one layer against float32."""

    layer: str
    ours: float
    stock: float

    def __str__(self) -> str:
        return f"Relative RMS error of {self.layer} against float32: patched {self.ours:.3g}, stock {self.stock:.3g}."

    @property
    def verified(self) -> bool:
        return self.ours <= 2 * self.stock


def switch_error(model: nn.Module, config: dict[str, Any], tokens: int, seed: int) -> LayerError | None:
    """The error of the first SwitchGLU for random activations and experts; None when the model has none."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, SwitchGLU)}
    if not layers:
        return None
    path = min(layers)
    layer = layers[path]
    experts, hidden = layer.up_proj.num_experts, layer.up_proj.input_dims
    top_k = min(config.get("num_experts_per_tok", 8), experts)
    x_key, indices_key = mx.random.split(mx.random.key(seed))
    x = mx.random.normal((tokens, hidden), key=x_key).astype(float_dtype(model))
    scores = mx.random.uniform(shape=(tokens, experts), key=indices_key)
    indices = mx.argsort(scores, axis=-1)[:, :top_k]
    return layer_error(model, path, partial(layer, x, indices), float32_output(layer, x, indices))


def linear_error(model: nn.Module, tokens: int, seed: int) -> LayerError | None:
    """The error of the first nn.QuantizedLinear for random activations; None when the model has none."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.QuantizedLinear)}
    if not layers:
        return None
    # Not the output layer as long as there is another: in float32 its weight may take gigabytes.
    path = min(layers, key=lambda path: ("layers." not in path, path))
    layer = layers[path]
    hidden = layer.scales.shape[-1] * layer.group_size
    x = mx.random.normal((tokens, hidden), key=mx.random.key(seed)).astype(float_dtype(model))
    return layer_error(model, path, partial(layer, x), project(layer, ..., np.array(x.astype(mx.float32))))


def layer_error(model: nn.Module, path: str, call: Callable[[], mx.array], reference: np.ndarray) -> LayerError:
    """The error of `call`, which runs the layer at `path`; the model is not patched before it, nor after it."""

    def error() -> float:
        out = np.array(call().astype(mx.float32))
        return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))

    stock = error()
    with mlx_moe_fast.patched(model):
        return LayerError(path, error(), stock)


def float32_output(layer: SwitchGLU, x: mx.array, indices: mx.array) -> np.ndarray:
    """What the layer's weights, dequantized to float32, make of `x` in float32.

    Args:
        layer: its three projections are quantized or not.
        x: (tokens, hidden).
        indices: (tokens, top-k) expert ids.

    Returns:
        (tokens, top-k, hidden) float32.
    """
    rows, chosen = np.array(x.astype(mx.float32)), np.array(indices)
    out = np.empty((*chosen.shape, rows.shape[-1]), np.float32)
    for expert in np.unique(chosen):
        tokens, slots = np.nonzero(chosen == expert)
        up = project(layer.up_proj, int(expert), rows[tokens])
        gate = project(layer.gate_proj, int(expert), rows[tokens])
        activated = np.array(layer.activation(mx.array(up), mx.array(gate)))
        out[tokens, slots] = project(layer.down_proj, int(expert), activated)
    return out


def project(linear: nn.Module, expert: int | EllipsisType, rows: np.ndarray) -> np.ndarray:
    """One expert's projection of `rows` in float32; `...` for a layer without experts.

    NumPy multiplies, since MLX may use TF32 for float32.
    """
    y = rows @ np.array(float32_weight(linear, expert)).T
    if "bias" in linear:
        y += np.array(linear.bias[expert].astype(mx.float32))
    return y


def float32_weight(linear: nn.Module, expert: int | EllipsisType) -> mx.array:
    # Integers stay: packed weights, and the uint8 scales of the modes that are not affine.
    arrays = {
        name: values[expert].astype(mx.float32) if mx.issubdtype(values.dtype, mx.floating) else values[expert]
        for name, values in linear.parameters().items()
    }
    if "scales" not in arrays:
        return arrays["weight"]
    return mx.dequantize(
        arrays["weight"],
        arrays["scales"],
        arrays.get("biases"),
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
        global_scale=arrays.get("global_scale"),
        dtype=mx.float32,
    )


# ---- output -------------------------------------------------------------------------------------


def log(text: str) -> None:
    print(text, file=sys.stderr)


def speed(timing: Timing, tokens: int) -> str:
    """Tokens per second, median and the 20th to the 80th percentile; `timing` in microseconds."""
    median, low, high = (f"{1e6 * tokens / us:,.0f}" for us in (timing.median, timing.p80, timing.p20))
    return f"{median} ({low}–{high})"


def import_pyplot() -> Any:
    try:
        import matplotlib.pyplot as pyplot
    except ImportError:
        sys.exit('error: --plot needs matplotlib: pip install "mlx-moe-fast[bench]"')
    return pyplot
