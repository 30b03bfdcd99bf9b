import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from mlx_moe_fast.bench import read_results

ROOT = Path(__file__).resolve().parents[1]


def run(*args: str | Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "scripts/compare_prefill.py", *map(str, args)]
    env = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_prefill", ROOT / "scripts" / "compare_prefill.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


def test_compares_random_prompts(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = run(
        *("--model", tiny_model_dir, "--prompt-tokens", "16", "80", "--prefill-step-size", "64"),
        *("--repeats", "2", "--max-tokens", "4", "--json", path),
    )
    assert done.returncode == 0, done.stderr

    results = read_results(path)
    assert results.command.startswith("python scripts/compare_prefill.py --model ")
    assert [row.case for row in results.rows] == [f"{tiny_model_dir.name}-affine4g64-P{n}" for n in (16, 80)]
    for row in results.rows:
        assert row.suite == "prefill" and row.verified
        assert row.p20_us <= row.median_us <= row.p80_us
        assert row.speedup == pytest.approx(row.tok_s / row.stock_tok_s)
        assert 0 < row.rel_rms <= 2 * row.stock_rel_rms < 0.1
        assert row.tflops is row.gbps is None

    assert re.findall(r"^\| (\d+) \|", done.stdout, re.M) == ["16", "80"]
    assert "Greedy text of 4 tokens: " in done.stdout
    assert "80 tokens: warm-up including JIT compilation: stock " in done.stderr


def test_takes_text(tiny_model_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("four")
    done = run("--model", tiny_model_dir, "--prompt-tokens", "10", "--repeats", "1", "--text", text)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\| (\d+) \|", done.stdout, re.M) == ["10"]


@pytest.mark.parametrize("model", ["/no/such/model", "no-such-model", "./no-such/model"])
def test_missing_model_is_a_clear_error(model: str) -> None:
    done = run("--model", model)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"error: there is no model folder {model}"
    assert "Traceback" not in done.stderr


def test_prompts_have_the_asked_length(script: ModuleType, tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = script.mlx_lm.utils.load_tokenizer(tiny_model_dir)
    prompt = script.make_prompt(tokenizer, 2000, None, seed=1)
    assert len(prompt) == 2000 and len(set(prompt)) > 400
    assert not set(prompt) & set(tokenizer.all_special_ids)
    assert prompt == script.make_prompt(tokenizer, 2000, None, seed=1)

    (tmp_path / "text").write_text("abc")
    assert tokenizer.decode(script.make_prompt(tokenizer, 7, tmp_path / "text", seed=0)) == "abcabca"


@pytest.mark.parametrize("mode", [None, ("affine", 64, 4), ("affine", 32, 8), ("mxfp4", 32, 4), ("nvfp4", 16, 4)])
@pytest.mark.parametrize("activation", [SwiGLU(), SwigluOAI()], ids=["swiglu", "swiglu_oai"])
def test_float32_output_is_what_the_layer_computes(
    script: ModuleType, mode: tuple[str, int, int] | None, activation: nn.Module
) -> None:
    mx.random.seed(0)
    layer = SwitchGLU(128, 64, num_experts=6, activation=activation, bias=True)
    for linear in (layer.gate_proj, layer.up_proj, layer.down_proj):
        linear.bias = mx.random.normal(linear.bias.shape)
    if mode:
        name, group_size, bits = mode
        nn.quantize(layer, group_size, bits, mode=name)
    x = mx.random.normal((20, 128))
    indices = mx.random.randint(0, 6, (20, 3))
    out = np.array(layer(x, indices))
    reference = script.float32_output(layer, x, indices)
    np.testing.assert_allclose(reference, out, rtol=0, atol=1e-5 * np.abs(out).max())


def test_plot_without_matplotlib_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    done = run("--model", "/no/such/model", "--plot", "x.svg", path=tmp_path)
    assert done.returncode == 1
    assert 'pip install "mlx-moe-fast[bench]"' in done.stderr
