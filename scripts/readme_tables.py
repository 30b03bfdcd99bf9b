"""Write the tables of README.md and of the pages in docs/ from scripts/results/*.json.

Between `<!-- results:NAME -->` and `<!-- /results:NAME -->` stands what scripts/results/NAME.json holds.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mlx_moe_fast.bench import Results, Row, markdown_table, read_results

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?P<open><!-- results:(?P<name>[\w.-]+) -->\n).*?(?P<close><!-- /results:(?P=name) -->)", re.S)
_MARKER = re.compile(r"<!-- /?results:")

Columns = dict[str, str | Callable[[Row], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pages' tables from the results files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page differs")
    parser.add_argument(
        "--pages",
        type=Path,
        nargs="+",
        default=PAGES,
        metavar="FILE",
        help="(default: README.md and docs/*.md)",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "results", metavar="DIR")
    args = parser.parse_args()

    changed = {}
    for page in args.pages:
        try:
            old = page.read_text()
            new = render(old, args.results)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {page}: {error}")
        if new != old:
            changed[page] = new
    if args.check and changed:
        names = ", ".join(map(str, changed))
        sys.exit(f"error: {names}: differs from {args.results}; run scripts/readme_tables.py")
    for page, text in changed.items():
        page.write_text(text)


def render(page: str, results: Path) -> str:
    """`page` with every marked block replaced by the tables of its results file.

    Raises:
        ValueError: a marker without its partner, an invalid results file, or an unknown suite.
        OSError: a results file cannot be read.
    """

    def block(match: re.Match[str]) -> str:
        return match["open"] + tables(read_results(results / f"{match['name']}.json")) + "\n" + match["close"]

    if _MARKER.search(_BLOCK.sub("", page)):
        raise ValueError("a results marker without its partner")
    return _BLOCK.sub(block, page)


def tables(results: Results) -> str:
    """One table a suite, in the order of the rows, then a line that says what was measured where.

    Rows of dense bf16 products stand beside ours in the file, for scale, and are left out.
    """
    parts = []
    for suite, group in groupby(results.rows, lambda row: row.suite):
        rows = [row for row in group if row.variant != "dense-bf16"]
        parts.append(markdown_table(rows, columns(suite, rows)))
    return "\n\n".join([*parts, caption(results)])


def caption(results: Results) -> str:
    device, capability = results.machine["device"], results.machine["compute_capability"]
    parts = [f"{device} (compute capability {capability})" if capability else f"{device}"]
    parts += [f"{package} {version}" for package, version in results.versions.items()]
    parts.append(f"commit {results.commit or 'unknown'}")
    return f"*{', '.join(parts)}.*"


# ---- columns ------------------------------------------------------------------------------------


def columns(suite: str, rows: Sequence[Row]) -> Columns:
    """What the table of a suite's rows shows; a column may set a row against others.

    Raises:
        ValueError: an unknown suite.
    """
    if suite not in COLUMNS:
        raise ValueError(f"no columns for suite {suite!r}; known: {', '.join(COLUMNS)}")
    if suite != "batch":
        return COLUMNS[suite]
    single = {row.case.rpartition("-B")[0]: row.tok_s for row in rows if row.case.endswith("-B1")}

    def scaling(row: Row) -> str | None:
        base = single.get(row.case.rpartition("-B")[0])
        return None if base is None or row.tok_s is None else f"{row.tok_s / base:.2f}x"

    return COLUMNS[suite] | {"ours against batch 1": scaling}


def _speedup(row: Row) -> str | None:
    return None if row.speedup is None else f"{row.speedup:.2f}x"


def _stock_tflops(row: Row) -> float | None:
    """The same work in stock's time."""
    if row.tflops is None or row.median_us is None or row.stock_median_us is None:
        return None
    return row.tflops * row.median_us / row.stock_median_us


def _errors(row: Row) -> str | None:
    if row.rel_rms is None or row.stock_rel_rms is None:
        return None
    return f"{row.rel_rms:.2g} / {row.stock_rel_rms:.2g}"


_TOKENS: Columns = {"stock tok/s": "stock_tok_s", "ours tok/s": "tok_s", "speed-up": _speedup}
_COMPUTE_BOUND: Columns = {
    "case": "case",
    "stock TFLOP/s": _stock_tflops,
    "ours TFLOP/s": "tflops",
    "speed-up": _speedup,
    "rel. error ours / stock": _errors,
}
_MEMORY_BOUND: Columns = {
    "case": "case",
    "stock µs": "stock_median_us",
    "ours µs": "median_us",
    "ours GB/s": "gbps",
    "speed-up": _speedup,
    "rel. error ours / stock": _errors,
}
COLUMNS: dict[str, Columns] = {
    "prefill": {
        "model": lambda row: row.case.rpartition("-P")[0],
        "prompt tokens": lambda row: row.case.rpartition("-P")[2],
        **_TOKENS,
        "rel. error ours / stock": _errors,
    },
    "batch": {
        "model": lambda row: row.case.rpartition("-B")[0],
        "batch": lambda row: row.case.rpartition("-B")[2],
        **_TOKENS,
    },
    "grouped": _COMPUTE_BOUND,
    "dense_prefill": _COMPUTE_BOUND,
    "moe_decode": _MEMORY_BOUND,
    "dense_decode": _MEMORY_BOUND,
}


if __name__ == "__main__":
    main()
