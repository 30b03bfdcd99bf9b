import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import compare_decode
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import model_runs
import numpy as np
import pytest
from compare_decode import Comparison, Side
from mlx_lm.generate import GenerationBatch

import mlx_moe_fast
from mlx_moe_fast.bench import Timing, markdown_table, read_results

ROOT = Path(__file__).resolve().parents[1]


def run(*args: str | Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "scripts/compare_decode.py", *map(str, args)]
    env = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def side(tiny_model_dir: Path) -> Side:
    model, tokenizer = mlx_lm.load(str(tiny_model_dir))
    return Side("stock", mlx_moe_fast.unpatch, model, tokenizer)


def test_compares_batches(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = run(
        *("--model", tiny_model_dir, "--batch", "1", "2", "9", "--prompt-tokens", "12"),
        *("--max-tokens", "6", "--repeats", "3", "--json", path),
    )
    assert done.returncode == 0, done.stderr

    results = read_results(path)
    assert results.command.startswith("python scripts/compare_decode.py --model ")
    assert [row.case for row in results.rows] == [f"{tiny_model_dir.name}-affine4g64-B{n}" for n in (1, 2, 9)]
    for row, batch in zip(results.rows, (1, 2, 9), strict=True):
        assert row.suite == "batch" and row.variant == "patched" and row.verified
        assert row.p20_us <= row.median_us <= row.p80_us
        assert row.tok_s == pytest.approx(1e6 * batch / row.median_us)
        assert row.stock_tok_s == pytest.approx(1e6 * batch / row.stock_median_us)
        assert row.speedup == pytest.approx(row.tok_s / row.stock_tok_s)
        assert 0 < row.rel_rms <= 2 * row.stock_rel_rms < 0.1
        assert row.tflops is row.gbps is None

    assert re.findall(r"^\| (\d+) \|", done.stdout, re.M) == ["1", "2", "9"]
    assert re.search(r"^batch 1 \S+ \(std of stock's logits \S+\); batch 8 \S+ \(std .*\)\.$", done.stdout, re.M)
    assert "Relative RMS error of model.layers.0.mlp.switch_mlp against float32: patched " in done.stdout
    assert "batch 9: warm-up including JIT compilation: stock " in done.stderr
    if not mx.cuda.is_available():
        assert "both sides are stock mlx-lm" in done.stdout


@pytest.mark.parametrize("batch", [1, 3])
def test_an_early_end_does_not_shorten_a_run(side: Side, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    prompts = compare_decode.make_prompts(side.tokenizer, batch, 5, seed=0)
    ends = set(range(len(side.tokenizer)))
    monkeypatch.setattr(side.tokenizer, "_eos_token_ids", ends)
    assert side.step_us(prompts, 4) > 0
    assert side.tokenizer.eos_token_ids == ends

    monkeypatch.setattr(compare_decode, "endless", nullcontext)
    with pytest.raises(SystemExit, match=rf"^error: stock, batch {batch}: a sequence ended after [01] of 4 tokens$"):
        side.step_us(prompts, 4)


def test_a_step_is_the_time_of_one_token_a_sequence(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what mlx-lm reports: one sequence's clock starts with its first token, a batch's before it."""
    one = SimpleNamespace(generation_tokens=5, generation_tps=5 / 0.4)
    many = SimpleNamespace(token_ids=[[0] * 5] * 3, stats=SimpleNamespace(generation_tps=15 / 0.5))
    monkeypatch.setattr(mlx_lm, "stream_generate", lambda *args, **options: [None, one])
    monkeypatch.setattr(mlx_lm, "batch_generate", lambda *args, **options: many)
    assert side.step_us([[1]], 5) == pytest.approx(1e5)
    assert side.step_us([[1]] * 3, 5) == pytest.approx(1e5)


def test_all_sequences_of_a_batch_run_in_step(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    step = GenerationBatch._step

    def counted(batch: GenerationBatch) -> object:
        sizes.append(len(batch))
        return step(batch)

    monkeypatch.setattr(GenerationBatch, "_step", counted)
    side.step_us(compare_decode.make_prompts(side.tokenizer, 9, 3, seed=0), 4)
    assert sizes == [9] * 5  # and one step whose tokens nobody reads


def test_prompts_differ_and_small_batches_are_the_start_of_large_ones(side: Side) -> None:
    prompts = compare_decode.make_prompts(side.tokenizer, 4, 7, seed=1)
    assert [len(prompt) for prompt in prompts] == [7] * 4
    assert len(set(map(tuple, prompts))) == 4
    assert compare_decode.make_prompts(side.tokenizer, 2, 7, seed=1) == prompts[:2]


@pytest.mark.parametrize("length", [1, 9])
def test_step_logits_are_those_of_the_whole_prompt(side: Side, length: int) -> None:
    prompts = compare_decode.make_prompts(side.tokenizer, 3, length, seed=0)
    whole = np.array(side.model(mx.array(prompts)).astype(mx.float32))[:, -compare_decode.CHECKED_STEPS :]
    logits = side.step_logits(prompts)
    assert logits.shape == whole.shape
    np.testing.assert_allclose(logits, whole, rtol=0, atol=0.1 * whole.std())


def test_logit_agreement_sees_another_result(side: Side) -> None:
    class Shifted(Side):
        def step_logits(self, prompts: list[list[int]]) -> np.ndarray:
            return super().step_logits(prompts) + 0.5

    shifted = Shifted("patched", side.switch, side.model, side.tokenizer)
    text = compare_decode.logit_agreement(side, shifted, [[1, 2, 3]])
    assert re.fullmatch(r"batch 1 0\.5 \(std of stock's logits \S+\)", text)


def test_without_batch_1_nothing_is_set_against_it() -> None:
    comparison = Comparison(4, Timing(100.0, 50.0, 200.0), Timing(50.0, 50.0, 50.0))
    row = compare_decode.make_row("m-bf16-B4", comparison, None)
    assert row.verified is row.rel_rms is None
    columns = compare_decode.table_columns({row.case: comparison})
    assert markdown_table([row], columns).splitlines()[2] == (
        "| 4 | 40,000 (20,000–80,000) | 80,000 (80,000–80,000) | 2.00x | 10,000 | 20,000 | – | – |"
    )


# ---- error of one layer -------------------------------------------------------------------------


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)
        self.layers = [nn.Linear(128, 64, bias=bias) for bias in (True, False)]


@pytest.mark.parametrize(
    "mode", [("affine", 64, 4), ("affine", 32, 8), ("affine", 32, 3), ("mxfp4", 32, 4), ("nvfp4", 16, 4)]
)
def test_float32_product_is_what_a_dense_layer_computes(mode: tuple[str, int, int]) -> None:
    mx.random.seed(0)
    model = Dense()
    name, group_size, bits = mode
    nn.quantize(model, group_size, bits, mode=name)
    error = model_runs.linear_error(model, tokens=8, seed=0)
    assert error.layer == "layers.0"  # not the head
    assert 0 < error.ours == error.stock < 1e-5
    assert error.verified


def test_no_error_of_what_is_not_quantized() -> None:
    assert model_runs.linear_error(Dense(), tokens=8, seed=0) is None


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["/no/such/model", "no-such-model"])
def test_missing_model_is_a_clear_error(model: str) -> None:
    done = run("--model", model)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"error: there is no model folder {model}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--batch", "1", "0"), "argument --batch: invalid positive value: '0'"),
        (("--repeats", "0"), "argument --repeats: invalid positive value: '0'"),
        (("--prompt-tokens", "-1"), "argument --prompt-tokens: "),
        (("--max-tokens", "1"), "argument --max-tokens: at least 2"),
    ],
)
def test_bad_numbers_name_their_option(
    option: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_decode.py", "--model", "m", *option])
    with pytest.raises(SystemExit):
        compare_decode.main()
    assert message in capsys.readouterr().err


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times = Timing(100.0, 90.0, 110.0)
    compare_decode.plot(tmp_path / "x.svg", [Comparison(batch, times, times) for batch in (8, 1)], "title")
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_plot_without_matplotlib_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    done = run("--model", "/no/such/model", "--plot", "x.svg", path=tmp_path)
    assert done.returncode == 1
    assert 'pip install "mlx-moe-fast[bench]"' in done.stderr
