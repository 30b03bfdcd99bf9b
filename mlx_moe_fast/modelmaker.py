"""Model folders with the dimensions of public models and random weights, for benchmarks, tests and the demo.

Speed and memory depend on shapes, not on what a model has learnt, so nothing needs to be downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import quantize_model, save_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny-qwen3-moe": _QWEN3_30B_A3B
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
    },
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "max_position_embeddings": 131072,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "qwen3-next-80b": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 262144,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}

# Models that mix kinds of attention look up a layer of each kind, so one whole period has to be there.
_MIN_LAYERS = {"gpt_oss": 2, "qwen3_next": 4}

# mode -> (bits, group sizes) that `mx.quantize` takes
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}

_BYTES = 256  # token ids 0..255 are the bytes; the special tokens follow, then the filler words
_START, _EOS = "<|im_start|>", "<|im_end|>"
EOS_TOKEN_ID = _BYTES + 1
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(
    name: str,
    out: str | Path,
    *,
    layers: int | None = None,
    seed: int = 0,
    bits: int | None = 4,
    group_size: int = 64,
    mode: str = "affine",
    dtype: str = "bfloat16",
) -> Path:
    """Write a model folder that `mlx_lm.load` takes: config, one safetensors shard a layer, index, tokenizer.

    The same arguments give the same weights on the same kind of device, and a layer's weights do not depend
    on `layers`. Memory stays near the largest layer (or the embeddings). Progress goes to stderr.

    Args:
        name: a key of `SHAPES`.
        out: folder to write; made when missing.
        layers: number of layers instead of the model's own.
        seed: 0 <= seed < 2**32.
        bits: bits a weight, or None to leave the weights in `dtype`.
        group_size: weights that share one scale.
        mode: a key of `MODES`.
        dtype: "bfloat16" or "float16", for everything that is not quantized and for affine scales and biases.

    Returns:
        `out` as a Path.

    Raises:
        ValueError: unknown name, dtype or quantization, or too few layers.
        FileExistsError: `out` already holds model weights.
    """
    config, parameters = lazy_model(
        name, layers=layers, seed=seed, bits=bits, group_size=group_size, mode=mode, dtype=dtype
    )
    out = Path(out)
    if next(out.glob("model*.safetensors"), None):
        raise FileExistsError(f"{out} already holds model weights; delete them or choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    _write_shards(out, parameters)
    _write_tokenizer(out, config["vocab_size"])
    save_config(config, out / "config.json")
    return out


def lazy_model(
    name: str,
    *,
    layers: int | None = None,
    seed: int = 0,
    bits: int | None = 4,
    group_size: int = 64,
    mode: str = "affine",
    dtype: str = "bfloat16",
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """The config and the parameters, by name, that `make_model` writes for the same arguments.

    The parameters are unevaluated: until one is evaluated it takes no memory.

    Raises:
        ValueError: unknown name, dtype or quantization, or too few layers.
    """
    config = _config(name, layers)
    _check(seed, bits, group_size, mode, dtype)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))

    def fill(path: str, initial: mx.array) -> mx.array:
        return _parameter(path, initial, seed).astype(DTYPES[dtype])

    model.update(tree_map_with_path(fill, model.parameters()))
    if bits is not None:
        with contextlib.redirect_stdout(sys.stderr):  # mlx-lm prints a line about the quantization
            model, config = quantize_model(model, config, group_size, bits, mode)
    return config, dict(tree_flatten(model.parameters()))


def _config(name: str, layers: int | None) -> dict[str, Any]:
    if name not in SHAPES:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(SHAPES)}")
    config = SHAPES[name] | {"eos_token_id": EOS_TOKEN_ID}
    if layers is not None:
        least = _MIN_LAYERS.get(config["model_type"], 1)
        if layers < least:
            raise ValueError(f"{name} needs at least {least} layer(s), got {layers}")
        config["num_hidden_layers"] = layers
    if config["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[i % 2] for i in range(config["num_hidden_layers"])]
    return config


def _check(seed: int, bits: int | None, group_size: int, mode: str, dtype: str) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in 0..2**32-1, got {seed}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if bits is None:
        return
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    known_bits, known_groups = MODES[mode]
    if bits not in known_bits:
        raise ValueError(f"mode {mode} takes bits {known_bits}, got {bits}")
    if group_size not in known_groups:
        raise ValueError(f"mode {mode} takes group sizes {known_groups}, got {group_size}")


def _parameter(path: str, initial: mx.array, seed: int) -> mx.array:
    """The float32 value of one parameter; it depends on the seed, the path and the shape alone."""
    key = mx.random.key((seed << 32) | zlib.crc32(path.encode()))
    leaf = path.rpartition(".")[2]
    if leaf == "bias":
        return 0.1 * mx.random.normal(initial.shape, key=key)
    if leaf == "A_log":  # decay rates of gated delta networks
        return mx.log(mx.random.uniform(1, 16, initial.shape, key=key))
    if leaf == "weight" and initial.ndim > 1:
        # Unit variance in, unit variance out, whatever one output sums over.
        if "embed_tokens" in path:
            fan_in = 1
        elif "conv1d" in path:
            fan_in = initial.shape[1] * initial.shape[2]
        else:
            fan_in = initial.shape[-1]
        return fan_in**-0.5 * mx.random.normal(initial.shape, key=key)
    return initial  # the ones of the norms and the zeros of the attention sinks


def _write_shards(out: Path, parameters: dict[str, mx.array]) -> None:
    """One shard for what lies outside the layers and one a layer; empties `parameters` as it goes."""
    shards: dict[str, list[str]] = {}
    for name in parameters:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        shards.setdefault(f"layer {layer[1]}" if layer else "embeddings", []).append(name)

    weight_map, total_size = {}, 0
    for number, (label, names) in enumerate(shards.items(), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {}
        for name in names:
            arrays[name] = parameters.pop(name)
            mx.eval(arrays[name])  # one at a time: frees its unquantized weight before the next is made
            weight_map[name] = file
            total_size += arrays[name].nbytes
        mx.save_safetensors(str(out / file), arrays, metadata={"format": "mlx"})
        del arrays
        mx.clear_cache()
        print(f"{file}: {label}", file=sys.stderr)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_tokenizer(out: Path, vocab_size: int) -> None:
    """A byte-level tokenizer in which every id below `vocab_size` decodes to text of its own.

    Text encodes to bytes; the filler words only come out of the model, and keep its outputs distinguishable.
    """
    specials = [_START, _EOS]
    words = [f"Ġw{i}" for i in range(_BYTES + len(specials), vocab_size)]  # Ġ is the byte-level space
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + specials + words
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_EOS,
        additional_special_tokens=[_START],
        chat_template=_CHAT_TEMPLATE,
    )
    fast.save_pretrained(out)
