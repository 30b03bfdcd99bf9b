import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from mlx_moe_fast import modelmaker
from mlx_moe_fast.modelmaker import SHAPES, lazy_model, make_model

ROOT = Path(__file__).resolve().parents[1]

# As the models' authors publish them.
PARAMETERS = {
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-next-80b": 79_674_391_296,
    "llama-3.1-8b": 8_030_261_248,
}

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_are_those_of_the_public_models(name: str) -> None:
    _, parameters = lazy_model(name, bits=None)
    assert sum(p.size for p in parameters.values()) == PARAMETERS[name]


@pytest.mark.parametrize("mode", [("affine", 4, 64), ("affine", 8, 32), ("mxfp4", 4, 32)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_mlx_lm_takes_every_shape(
    name: str, mode: tuple[str, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, shapes and quantization go strictly through mlx-lm's loader, without any weight being made."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    kind, bits, group_size = mode
    config, parameters = lazy_model(name, mode=kind, bits=bits, group_size=group_size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(mx, "load", lambda path: parameters)
    model, _ = mlx_lm.utils.load_model(tmp_path, lazy=True)
    loaded = dict(tree_flatten(model.parameters()))
    assert {k: (v.shape, v.dtype) for k, v in loaded.items()} == {k: (v.shape, v.dtype) for k, v in parameters.items()}
    assert mx.get_peak_memory() - before < 1e6


@pytest.mark.parametrize(
    ("name", "exceptions"),
    [
        ("qwen3-30b-a3b", {"mlp.gate": 8}),
        ("gpt-oss-20b", {"mlp.router": 8}),
        ("qwen3-next-80b", {"mlp.gate": 8, "mlp.shared_expert_gate": 8}),
        ("mixtral-8x7b", {}),
    ],
)
def test_routers_keep_the_bits_that_mlx_lm_gives_them(name: str, exceptions: dict[str, int]) -> None:
    config, _ = lazy_model(name, layers=4)
    found = {path: value for path, value in config["quantization"].items() if isinstance(value, dict)}
    assert {path: value["bits"] for path, value in found.items()} == {
        f"model.layers.{i}.{path}": bits for i in range(4) for path, bits in exceptions.items()
    }


@pytest.mark.parametrize("name", ["gpt-oss-20b", "mixtral-8x7b", "qwen3-next-80b", "llama-3.1-8b"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_family_generates(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, name, SHAPES[name] | SMALL)
    model, tokenizer = mlx_lm.load(str(make_model(name, tmp_path, layers=4, dtype=dtype)))
    logits = model(mx.array([tokenizer.encode("The quick brown fox")])).astype(mx.float32)
    assert mx.all(mx.isfinite(logits)).item()
    assert 0.5 < mx.std(logits).item() < 2
    assert mlx_lm.generate(model, tokenizer, "The quick brown fox", max_tokens=4)


def test_tiny_model_generates(tiny_model_dir: Path) -> None:
    model, tokenizer, config = mlx_lm.load(str(tiny_model_dir), return_config=True)
    assert config["quantization"] == config["quantization_config"]
    assert len(model.layers) == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert tokenizer.decode(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert mlx_lm.generate(model, tokenizer, chat, max_tokens=8)


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    first, again = (make_model("tiny-qwen3-moe", tmp_path / name, seed=3) for name in "ab")
    for file in sorted(path.name for path in first.iterdir()):
        assert (first / file).read_bytes() == (again / file).read_bytes(), file

    _, three = lazy_model("tiny-qwen3-moe", seed=3)
    _, one_layer = lazy_model("tiny-qwen3-moe", seed=3, layers=1)
    assert len(one_layer) < len(three)
    assert all(mx.array_equal(three[name], values) for name, values in one_layer.items())

    _, four = lazy_model("tiny-qwen3-moe", seed=4)
    name = "model.layers.0.mlp.switch_mlp.up_proj.weight"
    assert not mx.array_equal(three[name], four[name])
    assert not mx.array_equal(three[name], three[name.replace("layers.0", "layers.1")])


def test_index_names_every_weight(tiny_model_dir: Path) -> None:
    index = json.loads((tiny_model_dir / "model.safetensors.index.json").read_text())
    files = {file: mx.load(str(tiny_model_dir / file)) for file in set(index["weight_map"].values())}
    assert {name: file for file, arrays in files.items() for name in arrays} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(a.nbytes for arrays in files.values() for a in arrays.values())


def test_every_token_decodes(tiny_model_dir: Path) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(tiny_model_dir)
    vocab_size = SHAPES["tiny-qwen3-moe"]["vocab_size"]
    assert len(tokenizer) == vocab_size
    assert tokenizer.eos_token_ids == {tokenizer.eos_token_id} == {modelmaker.EOS_TOKEN_ID}
    words = [tokenizer.decode([i]) for i in range(modelmaker.EOS_TOKEN_ID + 1, vocab_size)]
    assert len(set(words)) == len(words) and all(words)
    streamed = tokenizer.detokenizer
    for token in range(vocab_size):
        streamed.add_token(token)
    streamed.finalize()
    assert streamed.text.endswith(words[-1])
    text = "Grüße, 世界! 🎉\n\ttabs"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "qwen9"}, "unknown model 'qwen9'; known: tiny-qwen3-moe, "),
        ({"bits": 7}, r"mode affine takes bits \(2, 3, 4, 5, 6, 8\), got 7"),
        ({"group_size": 48}, r"mode affine takes group sizes \(32, 64, 128\), got 48"),
        ({"mode": "mxfp4"}, r"mode mxfp4 takes group sizes \(32,\), got 64"),
        ({"mode": "fp4"}, "unknown mode 'fp4'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"seed": -1}, "seed must be"),
        ({"layers": 0}, "needs at least 1 layer"),
        ({"name": "qwen3-next-80b", "layers": 3}, "needs at least 4 layer"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path: Path, arguments: dict, message: str) -> None:
    out = tmp_path / "model"
    with pytest.raises(ValueError, match=message):
        make_model(**{"name": "tiny-qwen3-moe", "out": out} | arguments)
    assert not out.exists()


def test_a_folder_with_weights_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileExistsError, match="already holds model weights"):
        make_model("tiny-qwen3-moe", tmp_path)


def test_command_line(tmp_path: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        script = [sys.executable, "scripts/make_model.py", "--out", str(tmp_path / "model"), *args]
        return subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True)

    bad = run("tiny-qwen3-moe", "--bits", "7")
    assert bad.returncode == 2 and "takes bits" in bad.stderr and not bad.stdout
    good = run("tiny-qwen3-moe", "--layers", "1", "--mode", "mxfp4")
    assert good.stdout == f"{tmp_path / 'model'}\n"
    model, _ = mlx_lm.load(good.stdout.strip())
    assert model.layers[0].mlp.switch_mlp.up_proj.mode == "mxfp4"
    assert model.layers[0].mlp.gate.mode == "affine"
