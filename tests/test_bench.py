import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest
from emulator import Emulator

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


# ---- single operations ------------------------------------------------------------------------


@pytest.fixture
def bench_ops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "argv", ["bench_ops.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("bench_ops", ROOT / "scripts" / "bench_ops.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_ops", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_cases_of_single_operations_have_the_documented_names(bench_ops: ModuleType) -> None:
    q = Quantization(bits=4, group_size=64)
    names = {suite: [str(case) for case in cases] for suite, cases in bench_ops.CASES.items()}
    assert list(names) == ["grouped", "dense_decode", "moe_decode"]
    assert all(len(set(n)) == len(n) for n in names.values())
    assert names["dense_decode"] == [
        bench.dense_case(m, n, 4096, q, "bf16") for n in (14336, 4096) for m in (1, 4, 8, 16, 32)
    ]
    assert names["moe_decode"][0] == bench.moe_case(1, 8, 2048, 768, 128, q, "bf16")
    # The next call of a chain takes its rows from the result of the one before.
    assert all(case.n >= case.k for case in bench_ops.CASES["dense_decode"])


def test_decode_counts_each_weight_scale_and_bias_once(bench_ops: ModuleType) -> None:
    weights = bench_ops.random_weights(bench_ops.Dense(1, 96, 128, Quantization(8, 32)).projection)
    arrays = (weights.weight, weights.scales, weights.biases)
    assert bench_ops.matrix_bytes(weights.projection) == sum(a.nbytes for a in arrays)
    case = bench_ops.Case(2, 2, 128, 64, 8, Quantization(4, 64))
    expert = 3 * 64 * 128 * (4 / 8 + 4 / 64)
    draws = [bench_ops.np.array(ids) for ids in ([[0, 1], [1, 2]], [[5, 3], [5, 3]])]
    assert bench_ops.mlp_bytes(case, draws) == 2.5 * expert  # three experts, then two


def test_a_chain_reads_more_than_a_cache_holds(bench_ops: ModuleType) -> None:
    assert bench_ops.calls(1e9) == 8
    assert bench_ops.calls(10e6) == 30


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
def test_decode_suites_check_and_time(bench_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the emulator, with a clock on which every chain of eight calls takes 16 us."""
    ticks = itertools.count(0, 16_000)
    monkeypatch.setattr(bench_ops.ops, "launch", Emulator().launch)
    monkeypatch.setattr(bench_ops, "stamp", lambda x: (x, mx.array([next(ticks)], mx.uint64)))
    monkeypatch.setattr(bench_ops, "COLD_BYTES", 0)
    q = Quantization(4, 64)
    rows = [
        bench_ops.measure_dense(bench_ops.Dense(3, 128, 64, q), 1),
        bench_ops.measure_moe(bench_ops.Case(2, 2, 64, 64, 4, q), 1),
        bench_ops.measure_moe(bench_ops.Case(32, 2, 64, 64, 4, q), 1),  # MLX sorts
    ]
    assert all(row.verified and row.median_us == row.stock_median_us == 2 and row.speedup == 1 for row in rows)
    assert [row.suite for row in rows] == ["dense_decode", "moe_decode", "moe_decode"]
    assert rows[0].gbps == pytest.approx(128 * 64 * (4 / 8 + 4 / 64) / 2e3)
    assert rows[1].variant == "decode_glu_affine4g64_bf16_m8 + decode_plain_affine4g64_bf16_m8"
    assert "50% of the ceiling, 1.00x MLX" in bench_ops.line(rows[0], 2 * rows[0].gbps)


@pytest.mark.skipif(hasattr(mx, "cuda") and mx.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("suite", ["grouped", "dense_decode", "moe_decode"])
def test_single_operations_need_a_gpu(suite: str) -> None:
    command = [sys.executable, "scripts/bench_ops.py", "--suite", suite]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    failed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert failed.returncode == 1 and "it needs an NVIDIA GPU" in failed.stderr


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


def test_batches_are_set_against_batch_1_of_the_same_model(readme_tables: ModuleType, tmp_path: Path) -> None:
    speeds = [("a", 1, 100.0), ("a", 8, 450.0), ("b", 1, 200.0), ("b", 8, 300.0), ("c", 8, 70.0)]
    rows = [
        Row("batch", f"{model}-bf16-B{batch}", "patched", tok_s=speed, stock_tok_s=50.0, speedup=speed / 50)
        for model, batch, speed in speeds
    ]
    write_results(tmp_path / "batch.json", rows, "command")
    new = readme_tables.render("<!-- results:batch -->\n<!-- /results:batch -->\n", tmp_path)
    assert new.splitlines()[1:8] == [
        "| model | batch | stock tok/s | ours tok/s | speed-up | ours against batch 1 |",
        "|:--|--:|--:|--:|--:|--:|",
        "| a-bf16 | 1 | 50 | 100 | 2.00x | 1.00x |",
        "| a-bf16 | 8 | 50 | 450 | 9.00x | 4.50x |",
        "| b-bf16 | 1 | 50 | 200 | 4.00x | 1.00x |",
        "| b-bf16 | 8 | 50 | 300 | 6.00x | 1.50x |",
        "| c-bf16 | 8 | 50 | 70 | 1.40x | – |",
    ]


@pytest.mark.parametrize("suite", ["dense_decode", "moe_decode"])
def test_tables_of_decode_suites(readme_tables: ModuleType, suite: str) -> None:
    row = Row(suite, "c", "v", 20.0, gbps=3000.0, stock_median_us=50.0, speedup=2.5, rel_rms=0.002, stock_rel_rms=0.003)
    assert markdown_table([row], readme_tables.columns(suite, [row])).splitlines() == [
        "| case | stock µs | ours µs | ours GB/s | speed-up | rel. error ours / stock |",
        "|:--|--:|--:|--:|--:|--:|",
        "| c | 50 | 20 | 3,000 | 2.50x | 0.002 / 0.003 |",
    ]


@pytest.mark.parametrize(
    "text", ["<!-- results:a -->\n", "<!-- /results:a -->", "<!-- results:a -->\n<!-- /results:b -->"]
)
def test_readme_markers_come_in_pairs(readme_tables: ModuleType, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="without its partner"):
        readme_tables.render(text, tmp_path)


def test_every_suite_has_columns_that_take_empty_rows(readme_tables: ModuleType) -> None:
    for suite in readme_tables.COLUMNS:
        rows = [Row(suite, "case", "variant")]
        assert "–" in markdown_table(rows, readme_tables.columns(suite, rows))


def test_readme_check_fails_until_the_tables_are_written(tmp_path: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        script = [
            sys.executable,
            "scripts/readme_tables.py",
            "--pages",
            str(readme),
            str(page),
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
    readme, page = tmp_path / "README.md", tmp_path / "page.md"
    readme.write_text("nothing\n")
    page.write_text("<!-- results:r -->\n<!-- /results:r -->\n")
    failed = run("--check")
    assert failed.returncode == 1 and f"error: {page}: differs" in failed.stderr
    assert run().returncode == 0
    assert run("--check").returncode == 0
    (tmp_path / "r.json").unlink()
    missing = run("--check")
    assert missing.returncode == 1 and "r.json" in missing.stderr


def test_pages_show_the_results_files(readme_tables: ModuleType) -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md beside the tests")
    for page in readme_tables.PAGES:
        text = page.read_text()
        assert readme_tables.render(text, ROOT / "scripts" / "results") == text, f"{page}: run scripts/readme_tables.py"


def test_row_fields_have_defaults() -> None:
    row = Row("suite", "case", "variant")
    assert [f.name for f in fields(Row)] == list(asdict(row))
    assert all(value is None for name, value in asdict(row).items() if name not in ("suite", "case", "variant"))
