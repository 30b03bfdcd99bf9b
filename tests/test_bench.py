import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType

import pytest

from mlx_moe_fast import bench
from mlx_moe_fast.bench import Row, Timing, interleave, markdown_table, read_results, write_results
from mlx_moe_fast.problem import Quantization

ROOT = Path(__file__).resolve().parents[1]

ROWS = [
    Row(
        suite="grouped",
        case="T2048-A8-H2048-F768-E64-affine4g64-bf16",
        variant="sm80",
        median_us=500.0,
        tflops=200.0,
        stock_median_us=1000.0,
        speedup=2.0,
        rel_rms=0.002,
        stock_rel_rms=0.003,
        verified=True,
    ),
    Row(
        suite="prefill",
        case="m-affine4g64-P512",
        variant="sm80",
        tok_s=12345.6,
        stock_tok_s=5000.0,
        speedup=2.469,
    ),
]


@pytest.fixture
def readme_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- timings ------------------------------------------------------------------------------------


def test_timing_interpolates_between_samples() -> None:
    assert Timing.from_samples([5, 1, 3, 2, 4]) == Timing(median=3, p20=1.8, p80=4.2)
    assert Timing.from_samples([7.0]) == Timing(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one"):
        Timing.from_samples([])


def test_interleave_alternates_and_drops_the_warmup() -> None:
    calls = []

    def function(name: str, samples: list[float]):
        def call() -> float:
            calls.append(name)
            return samples.pop(0)

        return call

    timings = interleave([function("a", [99, 1, 1]), function("b", [99, 2, 2])], repeats=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert [timing.median for timing in timings] == [1, 2]


# ---- results ------------------------------------------------------------------------------------


def test_results_file_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_results(path, ROWS, "python scripts/bench.py")
    content = json.loads(path.read_text())
    assert list(content) == ["machine", "versions", "commit", "command", "rows"]
    assert list(content["rows"][0]) == (
        "suite case variant median_us p20_us p80_us tflops gbps tok_s stock_median_us stock_tok_s speedup "
        "rel_rms stock_rel_rms verified".split()
    )
    assert content["rows"][1]["median_us"] is None
    assert content["versions"]["mlx"] and content["machine"]["device"]


def test_results_survive_a_round_trip(tmp_path: Path) -> None:
    write_results(tmp_path / "r.json", ROWS, "command")
    results = read_results(tmp_path / "r.json")
    assert results.rows == ROWS
    assert results.command == "command"
    assert results.versions == bench.versions()


def test_results_must_be_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_results(tmp_path / "r.json", [Row("s", "c", "v", speedup=float("nan"))], "command")
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("machine"), r"r\.json: missing keys \['machine'\]"),
        (lambda content: content.update(date="today"), r"r\.json: .*unknown keys \['date'\]"),
        (lambda content: content.update(rows={}), "rows is {}, expected list"),
        (lambda content: content["rows"][1].pop("tflops"), r"row 1: missing keys \['tflops'\]"),
        (
            lambda content: content["rows"][0].update(tok_s="fast"),
            "row 0: tok_s is 'fast', expected float or int or null",
        ),
        (
            lambda content: content["rows"][0].update(verified=1),
            "row 0: verified is 1, expected bool or null",
        ),
        (lambda content: content["rows"].append(3), "row 2: expected an object, got int"),
    ],
)
def test_invalid_results_say_where(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "r.json"
    write_results(path, ROWS, "command")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_results(path)


def test_results_that_are_not_json_say_so(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(ValueError, match=r"r\.json: not JSON"):
        read_results(tmp_path / "r.json")


def test_commit_comes_from_the_environment_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MOE_FAST_COMMIT", "abc123")
    assert bench.commit() == "abc123"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_only_that_of_our_own_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed copy inside another repository has no commit; a checkout has, and tells local changes."""
    monkeypatch.delenv("MLX_MOE_FAST_COMMIT", raising=False)

    def git(*args: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.check_output(["git", "-C", str(tmp_path), *identity, *args], text=True).strip()

    source = tmp_path / "package" / "bench.py"
    source.parent.mkdir()
    source.write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    sha = git("rev-parse", "--short=12", "HEAD")

    monkeypatch.setattr(bench, "__file__", str(source))
    assert bench.commit() == sha
    source.write_text("2\n")
    assert bench.commit() == f"{sha}-dirty"
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "package" / "inner" / "bench.py"))
    assert bench.commit() is None


# ---- names and tables ---------------------------------------------------------------------------


def test_case_names() -> None:
    quantization = Quantization(bits=4, group_size=64)
    assert bench.moe_case(2048, 8, 2048, 768, 64, quantization, "bf16") == ROWS[0].case
    assert bench.dense_case(8, 14336, 4096, quantization, "fp16") == "M8-N14336-K4096-affine4g64-fp16"
    assert bench.prefill_case("qwen3-30b-a3b", quantization, 2048) == "qwen3-30b-a3b-affine4g64-P2048"
    assert bench.batch_case("llama-3.1-8b", "bf16", 8) == "llama-3.1-8b-bf16-B8"


def test_markdown_table() -> None:
    table = markdown_table(ROWS, {"case": "case", "tok/s": "tok_s", "twice": lambda row: 2 * row.speedup})
    assert table.splitlines() == [
        "| case | tok/s | twice |",
        "|:--|--:|--:|",
        "| T2048-A8-H2048-F768-E64-affine4g64-bf16 | – | 4 |",
        "| m-affine4g64-P512 | 12,346 | 4.94 |",
    ]


# ---- README -------------------------------------------------------------------------------------


def test_readme_blocks_are_replaced(readme_tables: ModuleType, tmp_path: Path) -> None:
    write_results(tmp_path / "h200.json", ROWS, "command")
    text = "before\n<!-- results:h200 -->\nold\n<!-- /results:h200 -->\nafter\n"
    new = readme_tables.render(text, tmp_path)
    assert "| T2048-A8-H2048-F768-E64-affine4g64-bf16 | 100 | 200 | 2.00x | 0.002 / 0.003 |" in new
    assert "| m-affine4g64 | 512 | 5,000 | 12,346 | 2.47x |" in new
    assert f"mlx {bench.versions()['mlx']}" in new
    assert "old" not in new and new.startswith("before\n") and new.endswith("\nafter\n")
    assert readme_tables.render(new, tmp_path) == new


@pytest.mark.parametrize(
    "text", ["<!-- results:a -->\n", "<!-- /results:a -->", "<!-- results:a -->\n<!-- /results:b -->"]
)
def test_readme_markers_come_in_pairs(readme_tables: ModuleType, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="without its partner"):
        readme_tables.render(text, tmp_path)


def test_every_suite_has_columns_that_take_empty_rows(readme_tables: ModuleType) -> None:
    for suite, columns in readme_tables.COLUMNS.items():
        assert "–" in markdown_table([Row(suite, "case", "variant")], columns)


def test_readme_check_fails_until_the_tables_are_written(tmp_path: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        script = [
            sys.executable,
            "scripts/readme_tables.py",
            "--readme",
            str(readme),
            "--results",
            str(tmp_path),
        ]
        return subprocess.run(
            [*script, *args],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    write_results(tmp_path / "r.json", ROWS, "command")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:r -->\n<!-- /results:r -->\n")
    failed = run("--check")
    assert failed.returncode == 1 and "differs" in failed.stderr
    assert run().returncode == 0
    assert run("--check").returncode == 0
    (tmp_path / "r.json").unlink()
    missing = run("--check")
    assert missing.returncode == 1 and "r.json" in missing.stderr


def test_readme_shows_the_results_files(readme_tables: ModuleType) -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md beside the tests")
    text = readme.read_text()
    assert readme_tables.render(text, ROOT / "scripts" / "results") == text, "run scripts/readme_tables.py"


def test_row_fields_have_defaults() -> None:
    row = Row("suite", "case", "variant")
    assert [f.name for f in fields(Row)] == list(asdict(row))
    assert all(value is None for name, value in asdict(row).items() if name not in ("suite", "case", "variant"))
