"""What every benchmark shares: who measured, timings, the results file, case names, Markdown tables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import statistics
import subprocess
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import envs
from ._version import __version__
from .problem import Quantization

_PACKAGES = ("mlx", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "cupy-cuda12x", "cupy-cuda13x")


# ---- who measured -------------------------------------------------------------------------------


def machine() -> dict[str, str | None]:
    """The default device and the system: `device`, `architecture`, `compute_capability`, `driver`, `os`.

    The last two of the device are null on a CPU.
    """
    info = mx.device_info()
    capability = None
    if "compute_capability_major" in info:
        capability = f"{info['compute_capability_major']}.{info['compute_capability_minor']}"
    driver = Path("/sys/module/nvidia/version")
    return {
        "device": str(info["device_name"]),
        "architecture": str(info["architecture"]),
        "compute_capability": capability,
        "driver": driver.read_text().strip() if capability and driver.exists() else None,
        "os": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of this package, Python and those packages of the stack that are installed."""
    found = {"mlx_moe_fast": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the running source, with "-dirty" after it when tracked files differ; None if unknown.

    The environment variable MLX_MOE_FAST_COMMIT overrides it, for machines that hold a copy without history.
    """
    if override := envs.COMMIT.get():
        return override
    root = Path(__file__).resolve().parents[1]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], check=True, capture_output=True, text=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None  # an installed copy that happens to lie inside someone else's repository
        sha = git("rev-parse", "--short=12", "HEAD")
        return sha + "-dirty" if git("status", "--porcelain", "--untracked-files=no") else sha
    except (OSError, subprocess.SubprocessError):
        return None


# ---- timings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of samples, in the samples' own unit."""

    median: float
    p20: float
    p80: float

    @classmethod
    def from_samples(cls, samples: Sequence[float]) -> Timing:
        """Percentiles interpolate linearly between samples.

        Raises:
            ValueError: no samples.
        """
        if not samples:
            raise ValueError("a timing needs at least one sample")
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), p20, p80)


def interleave(functions: Sequence[Callable[[], float]], repeats: int, *, warmup: int = 0) -> list[Timing]:
    """Call the functions in turn (A B A B ...), so that drifting clocks touch all of them alike.

    Args:
        functions: each measures itself and returns one sample.
        repeats: samples of each function, at least 1.
        warmup: rounds before that whose samples are dropped.

    Returns:
        One Timing a function, in their order.
    """
    rounds = [[function() for function in functions] for _ in range(warmup + repeats)]
    return [Timing.from_samples(samples) for samples in zip(*rounds[warmup:], strict=True)]


# ---- the results file ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measured case. A field that means nothing for its suite is None.

    `stock_*` is MLX without the plugin, in the same run on the same data; the other fields are ours.
    `speedup` is stock time over our time. `rel_rms` is ||out - ref|| / ||ref|| against a float32 reference
    from the same quantized weights. `verified` says whether our output passed the suite's check.
    """

    suite: str
    case: str
    variant: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    tok_s: float | None = None
    stock_median_us: float | None = None
    stock_tok_s: float | None = None
    speedup: float | None = None
    rel_rms: float | None = None
    stock_rel_rms: float | None = None
    verified: bool | None = None


@dataclass(frozen=True)
class Results:
    """The content of a results file."""

    machine: dict[str, str | None]
    versions: dict[str, str]
    commit: str | None
    command: str
    rows: list[Row]


def write_results(path: str | Path, rows: Sequence[Row], command: str) -> None:
    """Write `rows` with this machine, its versions and the commit as JSON; makes missing folders.

    Raises:
        ValueError: a number is not finite.
    """
    results = Results(machine(), versions(), commit(), command, list(rows))
    text = json.dumps(dataclasses.asdict(results), indent=1, allow_nan=False) + "\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read_results(path: str | Path) -> Results:
    """Read what `write_results` wrote.

    Raises:
        ValueError: not JSON, or a key is missing, unknown or of the wrong type; the message says where.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    fields = _checked(content, Results, str(path))
    rows = [Row(**_checked(row, Row, f"{path}: row {i}")) for i, row in enumerate(fields.pop("rows"))]
    return Results(rows=rows, **fields)


def _checked(content: Any, schema: type, where: str) -> dict[str, Any]:
    """`content` when it has exactly the fields of the dataclass `schema`, each of its type."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected an object, got {type(content).__name__}")
    hints = typing.get_type_hints(schema)
    if content.keys() != hints.keys():
        missing, unknown = sorted(hints.keys() - content.keys()), sorted(content.keys() - hints.keys())
        raise ValueError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    for key, hint in hints.items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        allowed = {typing.get_origin(member) or member for member in members}
        if float in allowed:
            allowed.add(int)  # JSON does not tell 3.0 from 3 apart everywhere
        if type(content[key]) not in allowed:
            names = " or ".join(sorted("null" if t is type(None) else t.__name__ for t in allowed))
            raise ValueError(f"{where}: {key} is {content[key]!r}, expected {names}")
    return content


# ---- case names ---------------------------------------------------------------------------------
# `dtype` is "bf16" or "fp16"; a model that is not quantized has its dtype in the place of the quantization.


def moe_case(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    experts: int,
    quantization: Quantization | str,
    dtype: str,
) -> str:
    """A case of the suites `grouped` and `moe_decode`: T2048-A8-H2048-F768-E64-affine4g64-bf16."""
    return f"T{tokens}-A{top_k}-H{hidden}-F{intermediate}-E{experts}-{quantization}-{dtype}"


def dense_case(m: int, n: int, k: int, quantization: Quantization | str, dtype: str) -> str:
    """A case of the suites `dense_decode` and `dense_prefill`: M8-N14336-K4096-affine4g64-bf16."""
    return f"M{m}-N{n}-K{k}-{quantization}-{dtype}"


def prefill_case(model: str, quantization: Quantization | str, prompt_tokens: int) -> str:
    """A case of the suite `prefill`: qwen3-30b-a3b-affine4g64-P2048."""
    return f"{model}-{quantization}-P{prompt_tokens}"


def batch_case(model: str, quantization: Quantization | str, batch: int) -> str:
    """A case of the suite `batch`: llama-3.1-8b-affine4g64-B8."""
    return f"{model}-{quantization}-B{batch}"


# ---- tables -------------------------------------------------------------------------------------


def markdown_table(rows: Sequence[Row], columns: Mapping[str, str | Callable[[Row], Any]]) -> str:
    """A Markdown table, one line a row.

    Args:
        rows: what to show.
        columns: heading -> a field of Row, or a function of the row. Text stays as it is, numbers get three
            significant digits (whole numbers from 1000 on), None becomes a dash.

    Returns:
        The table's lines without a newline at the end.
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join([":--"] + ["--:"] * (len(columns) - 1)) + "|"]
    for row in rows:
        values = [getattr(row, get) if isinstance(get, str) else get(row) for get in columns.values()]
        lines.append("| " + " | ".join(_cell(value) for value in values) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
