"""`mlx_moe_fast.generate` is `mlx_lm.generate` but for its own flags: same text, same exit codes."""

import importlib
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_moe_fast
from mlx_moe_fast import cli, modelmaker

mlx_lm_generate = importlib.import_module("mlx_lm.generate")
DIGITS = re.compile(r"[\d.]+ (?=tokens-per-sec|GB)")  # speed and memory differ from run to run


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command's main function in this process: (exit code, stdout, stderr)."""

    def run(main, *argv, stdin=""):
        monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, argv)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            code = main() or 0
        except SystemExit as exit:
            code = exit.code or 0
        out, err = capsys.readouterr()
        return code, DIGITS.sub("", out), err

    return run


@pytest.fixture
def tiny_dense_dir(tmp_path, monkeypatch):
    sizes = modelmaker.SHAPES["tiny-qwen3-moe"]
    shape = {key: sizes[key] for key in sizes if not key.startswith(("num_experts", "moe", "model_type"))}
    monkeypatch.setitem(modelmaker.SHAPES, "tiny-llama", shape | {"model_type": "llama"})
    return modelmaker.make_model("tiny-llama", tmp_path / "tiny-llama")


@pytest.fixture
def no_patch(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("patched a model with --moe-fast off")

    monkeypatch.setattr(cli, "patch", fail)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--temp 0.8 --top-p 0.9 --seed 3",
        "--verbose False --prompt hi\\n",
        "--ignore-chat-template -p hi",
        "--system-prompt short --prefill-response x --extra-eos-token a 300",
        "--kv-bits 8 --kv-group-size 32 --quantized-kv-start 0 --prefill-step-size 2",
        "--draft-model MODEL --num-draft-tokens 2",
    ],
)
def test_same_output(run, tiny_model_dir, flags):
    argv = ["--model", tiny_model_dir, "-m", "8", *flags.replace("MODEL", str(tiny_model_dir)).split()]
    stock = run(mlx_lm_generate.main, *argv)
    fast = run(cli.generate_main, *argv)
    assert stock[0] == 0 and stock[1]
    assert fast[:2] == stock[:2]


def test_same_output_from_stdin(run, tiny_model_dir):
    argv = ["--model", tiny_model_dir, "-m", "4", "--prompt", "-"]
    outputs = {
        text: [run(main, *argv, stdin=text)[1] for main in (mlx_lm_generate.main, cli.generate_main)]
        for text in ("one", "two words")
    }
    assert all(stock == fast for stock, fast in outputs.values())
    assert outputs["one"] != outputs["two words"]


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--max-tokens", "many"], ["--mod"], ["-p"]])
def test_same_usage_errors(run, tiny_model_dir, flags):
    argv = ["--model", tiny_model_dir, *flags]
    stock = run(mlx_lm_generate.main, *argv)
    fast = run(cli.generate_main, *argv)
    assert fast[0] == stock[0] == 2
    assert fast[2].partition("error:")[2] == stock[2].partition("error:")[2] != ""


def test_same_exceptions(run, tiny_model_dir):
    argv = ["--model", tiny_model_dir, "--chat-template-config", "{"]
    for main in (mlx_lm_generate.main, cli.generate_main):
        with pytest.raises(json.JSONDecodeError):
            run(main, *argv)


def test_short_forms_of_flags_stay_mlx_lms(run, tiny_model_dir):
    code, out, _ = run(cli.generate_main, "--mo", tiny_model_dir, "--max-t", "2", "--moe-fast=auto")
    assert code == 0 and out


def test_leaves_mlx_lm_as_it_was(run, tiny_model_dir):
    before = vars(mlx_lm_generate).copy()
    run(cli.generate_main, "--model", tiny_model_dir, "-m", "1")
    run(cli.generate_main, "--no-such-flag")
    assert vars(mlx_lm_generate) == before


def test_help_shows_both_sets_of_flags(run):
    code, stock, _ = run(mlx_lm_generate.main, "--help")
    code_fast, fast, _ = run(cli.generate_main, "-h")
    assert code == code_fast == 0
    flags = re.compile(r"^  (-.*?)(?:  |$)", re.M)
    assert set(flags.findall(fast)) - set(flags.findall(stock)) == {
        "--moe-fast {auto,off,require}",
        "--moe-fast-report",
        "--version",
    }
    assert set(flags.findall(stock)) <= set(flags.findall(fast))


@pytest.mark.parametrize("main", [cli.main, cli.generate_main])
def test_version(run, main):
    code, out, _ = run(main, "--version")
    assert code == 0 and mlx_moe_fast.__version__ in out


def test_off_does_not_patch(run, tiny_model_dir, no_patch):
    argv = ["--model", tiny_model_dir, "-m", "4"]
    assert run(cli.generate_main, *argv, "--moe-fast", "off") == (0, run(mlx_lm_generate.main, *argv)[1], "")


def test_environment_sets_the_mode(run, tiny_model_dir, no_patch, monkeypatch):
    monkeypatch.setenv("MLX_MOE_FAST_MODE", "off")
    assert run(cli.generate_main, "--model", tiny_model_dir, "-m", "1")[0] == 0
    monkeypatch.setenv("MLX_MOE_FAST_MODE", "fast")
    code, _, err = run(cli.generate_main, "--model", tiny_model_dir)
    assert code == 2 and "MLX_MOE_FAST_MODE" in err


def test_require_fails_on_the_cpu(run, tiny_model_dir):
    code, out, err = run(cli.generate_main, "--model", tiny_model_dir, "--moe-fast", "require")
    assert code == 1 and out == ""
    assert str(tiny_model_dir) in err and "layers." in err and "device" in err


def test_require_does_not_ask_it_of_the_draft_model(run, tiny_model_dir, tiny_dense_dir, monkeypatch):
    stricts = []

    def patch(model, *, strict=False):
        stricts.append(strict)
        return mlx_moe_fast.report(model)

    monkeypatch.setattr(cli, "patch", patch)
    argv = ["--model", tiny_model_dir, "--draft-model", tiny_dense_dir, "-m", "2", "--moe-fast", "require"]
    assert run(cli.generate_main, *argv)[0] == 0
    assert stricts == [True, False]


def test_auto_survives_a_failing_patch(run, tiny_model_dir, monkeypatch):
    def patch(model, **kwargs):
        mlx_moe_fast.patch(model)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cli, "patch", patch)
    argv = ["--model", tiny_model_dir, "-m", "4"]
    with pytest.raises(RuntimeError):
        run(cli.generate_main, *argv, "--moe-fast", "require")
    code, out, err = run(cli.generate_main, *argv)
    assert (code, out) == run(mlx_lm_generate.main, *argv)[:2]
    assert err.count("\n") == 1 and "no compiler" in err


def test_model_without_experts_is_said_once(run, tiny_dense_dir):
    code, out, err = run(cli.generate_main, "--model", tiny_dense_dir, "-m", "2")
    assert code == 0 and out
    assert err.count("0 of 16 layers run on mlx_moe_fast") == 1 and "QuantizedEmbedding: MLX's own kernels" in err
    assert run(cli.generate_main, "--model", tiny_dense_dir, "--moe-fast", "require")[0] == 1


def test_model_without_quantized_layers_is_said_once(run, tiny_dense_dir, monkeypatch):
    monkeypatch.setattr(cli, "patch", lambda model, **kwargs: mlx_moe_fast.patch(model, dense=False))
    code, out, err = run(cli.generate_main, "--model", tiny_dense_dir, "-m", "2")
    assert code == 0 and out
    assert err.count("patched nothing") == 1


def test_nothing_patched_says_why(run, tiny_model_dir):
    code, _, err = run(cli.generate_main, "--model", tiny_model_dir, "-m", "1")
    # Once for each kind of layer.
    kinds = ("Qwen3MoeSparseMoeBlock", "SwitchGLU", "QuantizedLinear", "QuantizedEmbedding")
    assert code == 0 and err.count("device:") == len(kinds)
    assert all(err.count(f"{kind}: MLX's own kernels, device: ") == 1 for kind in kinds)


def test_shows_the_log_on_stderr(run, tiny_model_dir, monkeypatch):
    def patch(model, **kwargs):
        logging.getLogger("mlx_moe_fast.patching").info("compiling")
        return mlx_moe_fast.patch(model)

    monkeypatch.setattr(cli, "patch", patch)
    for _ in range(2):
        assert run(cli.generate_main, "--model", tiny_model_dir, "-m", "1")[2].count("compiling\n") == 1


def test_report_flag_writes_to_stderr(run, tiny_model_dir):
    argv = ["--model", tiny_model_dir, "-m", "2"]
    quiet, told = run(cli.generate_main, *argv), run(cli.generate_main, *argv, "--moe-fast-report")
    assert told[:2] == quiet[:2]
    assert "layers.0" in told[2]
    assert "off" in run(cli.generate_main, *argv, "--moe-fast-report", "--moe-fast", "off")[2]


@pytest.mark.parametrize("flag", ["--model", "--draft-model"])
@pytest.mark.parametrize("mode", cli.MODES[:2])
def test_missing_folder(run, tiny_model_dir, tmp_path, flag, mode):
    missing = tmp_path / "missing"
    argv = ["--model", tiny_model_dir, "-m", "1", flag, missing, "--moe-fast", mode]
    code, out, err = run(cli.generate_main, *argv)
    assert code == 1 and out == ""
    assert str(missing) in err and "config.json" in err


def test_relative_folder(run, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tiny_model_dir.parent)
    assert run(cli.generate_main, "--model", tiny_model_dir.name, "-m", "1")[0] == 0
    code, _, err = run(cli.generate_main, "--model", "./missing", "-m", "1")
    assert code == 1 and str(Path.cwd() / "missing") in err


def test_report_command(run, tiny_model_dir):
    code, text, _ = run(cli.main, "report", tiny_model_dir)
    assert code == 0 and "layers.1" in text
    code, text, _ = run(cli.main, "report", tiny_model_dir, "--json")
    assert code == 0 and "layers.1" in json.dumps(json.loads(text))
    assert run(cli.main, "report", tiny_model_dir / "missing")[0] == 1


def test_commands(run):
    code, out, _ = run(cli.main, "--help")
    assert code == 0 and all(name in out for name in cli.COMMANDS)
    for argv in ([], ["no-such-command"]):
        code, out, err = run(cli.main, *argv)
        assert code == 2 and out == "" and "COMMAND" in err


def test_python_m(tiny_model_dir):
    argv = ["generate", "--model", tiny_model_dir, "-m", "4", "--prompt", "-"]
    stock, fast = (
        subprocess.run([sys.executable, "-m", package, *argv], input="hi", text=True, capture_output=True)
        for package in ("mlx_lm", "mlx_moe_fast")
    )
    assert fast.returncode == stock.returncode == 0
    assert DIGITS.sub("", fast.stdout) == DIGITS.sub("", stock.stdout)


def test_import_leaves_out_cupy():
    code = "import sys, mlx_moe_fast.cli; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
