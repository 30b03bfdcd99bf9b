"""Prompt processing of stock mlx-lm against patched layers: same weights, same process, same prompts.

python scripts/compare_prefill.py --model models/qwen3-30b-a3b --json scripts/results/prefill.json
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from model_runs import LayerError, import_pyplot, load, log, make_prompt, positive, quantization_of, speed, switch_error
from model_runs import float32_output as float32_output  # tested as part of this script

import mlx_moe_fast
from mlx_moe_fast.bench import (
    Row,
    Timing,
    interleave,
    machine,
    markdown_table,
    prefill_case,
    write_results,
)

GREEDY_PROMPT = "The quick brown fox jumps over"
REFERENCE_TOKENS = 256


def main() -> None:
    args = parse_args()
    if args.plot:
        import_pyplot()  # to fail before the measurement, not after it
    model, tokenizer, config = load(args.model)
    name, quantization = Path(args.model).resolve().name, quantization_of(model, config)
    prompts = [make_prompt(tokenizer, length, args.text, args.seed) for length in args.prompt_tokens]
    log(f"{name}, {quantization}, {machine()['device']}")
    with mlx_moe_fast.patched(model) as report:
        log(str(report))

    error = switch_error(model, config, REFERENCE_TOKENS, args.seed)
    if not error:
        log("no SwitchGLU layer, so no error against float32")
    stock = Side("stock", mlx_moe_fast.unpatch, model, tokenizer, args.prefill_step_size)
    ours = Side("patched", mlx_moe_fast.patch, model, tokenizer, args.prefill_step_size)
    comparisons = {}
    for prompt in prompts:
        case = prefill_case(name, quantization, len(prompt))
        comparisons[case] = compare(stock, ours, prompt, args.repeats)
    rows = [make_row(case, variant_of(report), comparison, error) for case, comparison in comparisons.items()]

    print(markdown_table(rows, table_columns(comparisons)))
    if error:
        print(f"\n{error}")
    if args.max_tokens:
        print(f"\n{greedy_agreement(stock, ours, args.max_tokens)}")
    if args.json:
        write_results(args.json, rows, shlex.join(["python", *sys.argv]))
    if args.plot:
        plot(args.plot, rows, f"{name}, {quantization}, {machine()['device']}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare prompt processing of stock mlx-lm with patched layers.")
    parser.add_argument("--model", required=True, metavar="DIR_OR_REPO", help="folder, or OWNER/NAME on the Hub")
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        nargs="+",
        default=[512, 2048, 8192],
        metavar="N",
        help="prompt lengths",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="prompt text, repeated and cut to the lengths")
    parser.add_argument("--repeats", type=positive, default=5, help="runs a side and length (default: 5)")
    parser.add_argument("--prefill-step-size", type=positive, default=2048, help="(default: 2048)")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="also compare N greedily chosen tokens")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts and activations (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the results; needs matplotlib")
    return parser.parse_args()


# ---- measurement --------------------------------------------------------------------------------


@dataclass
class Side:
    """The model as one of the two, stock or patched."""

    name: str
    switch: Callable[[nn.Module], object]
    model: nn.Module
    tokenizer: TokenizerWrapper
    prefill_step_size: int
    peak_bytes: int = 0  # the highest of the runs since it was last set to 0

    def prefill_us(self, prompt: list[int], logits: list[mx.array] | None = None) -> float:
        """Process a prompt up to its first new token: microseconds, as `stream_generate` measures them.

        `logits`, if given, receives the logits (1, vocabulary) after the prompt, at the price of a copy.
        """
        options: dict[str, Any] = {}
        if logits is not None:

            def keep(_: mx.array, values: mx.array) -> mx.array:
                logits.append(values)
                return values

            options["logits_processors"] = [keep]
        self.switch(self.model)
        mx.reset_peak_memory()
        *_, response = mlx_lm.stream_generate(
            self.model,
            self.tokenizer,
            prompt,
            max_tokens=1,
            prefill_step_size=self.prefill_step_size,
            **options,
        )
        self.peak_bytes = max(self.peak_bytes, mx.get_peak_memory())
        return 1e6 * len(prompt) / response.prompt_tps

    def greedy_text(self, prompt: str, max_tokens: int) -> str:
        self.switch(self.model)
        return mlx_lm.generate(self.model, self.tokenizer, prompt, max_tokens=max_tokens)


@dataclass(frozen=True)
class Comparison:
    """Stock against patched on one prompt; times in microseconds."""

    prompt_tokens: int
    stock: Timing
    ours: Timing
    stock_peak_bytes: int
    peak_bytes: int
    logit_difference: float  # largest absolute one after the prompt
    stock_logit_std: float


def compare(stock: Side, ours: Side, prompt: list[int], repeats: int) -> Comparison:
    logits: list[np.ndarray] = []
    warmups = []
    for side in (stock, ours):
        side.peak_bytes = 0
        kept: list[mx.array] = []
        start = time.perf_counter()
        side.prefill_us(prompt, kept)
        warmups.append(f"{side.name} {time.perf_counter() - start:.2f} s")
        logits.append(np.array(kept[0].astype(mx.float32)))
    log(f"{len(prompt)} tokens: warm-up including JIT compilation: {', '.join(warmups)}")

    stock_timing, timing = interleave([partial(side.prefill_us, prompt) for side in (stock, ours)], repeats)
    return Comparison(
        len(prompt),
        stock_timing,
        timing,
        stock_peak_bytes=stock.peak_bytes,
        peak_bytes=ours.peak_bytes,
        logit_difference=float(np.abs(logits[1] - logits[0]).max()),
        stock_logit_std=float(logits[0].std()),
    )


def greedy_agreement(stock: Side, ours: Side, max_tokens: int) -> str:
    texts = [side.greedy_text(GREEDY_PROMPT, max_tokens) for side in (stock, ours)]
    if texts[0] == texts[1]:
        return f"Greedy text of {max_tokens} tokens: equal."
    same = next((i for i, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))
    return (
        f"Greedy text of {max_tokens} tokens: differs from character {same} of {len(texts[0])} on. "
        "Rounding decides between tokens that are close to a tie."
    )


# ---- output -------------------------------------------------------------------------------------


def variant_of(report: mlx_moe_fast.PatchReport) -> str:
    """The architectures that the launched kernels are written for, such as sm80."""
    found = {arch for layer in report.replaced for arch in re.findall(r"sm\d+", layer.launches)}
    return "+".join(sorted(found)) or "patched"


def make_row(case: str, variant: str, comparison: Comparison, error: LayerError | None) -> Row:
    stock, ours, tokens = comparison.stock, comparison.ours, comparison.prompt_tokens
    return Row(
        suite="prefill",
        case=case,
        variant=variant,
        median_us=ours.median,
        p20_us=ours.p20,
        p80_us=ours.p80,
        tok_s=1e6 * tokens / ours.median,
        stock_median_us=stock.median,
        stock_tok_s=1e6 * tokens / stock.median,
        speedup=stock.median / ours.median,
        rel_rms=error.ours if error else None,
        stock_rel_rms=error.stock if error else None,
        verified=error.verified if error else None,
    )


def table_columns(comparisons: dict[str, Comparison]) -> dict[str, str | Callable[[Row], Any]]:
    def column(get: Callable[[Comparison], Any]) -> Callable[[Row], Any]:
        return lambda row: get(comparisons[row.case])

    return {
        "prompt tokens": column(lambda c: c.prompt_tokens),
        "stock tok/s (p20–p80)": column(lambda c: speed(c.stock, c.prompt_tokens)),
        "patched tok/s (p20–p80)": column(lambda c: speed(c.ours, c.prompt_tokens)),
        "speed-up": lambda row: f"{row.speedup:.2f}x",
        "stock peak GB": column(lambda c: c.stock_peak_bytes / 1e9),
        "patched peak GB": column(lambda c: c.peak_bytes / 1e9),
        "largest logit difference": column(lambda c: c.logit_difference),
        "std of stock logits": column(lambda c: c.stock_logit_std),
    }


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Bars of tokens per second, stock and patched, by prompt length."""
    figure, axes = import_pyplot().subplots(figsize=(6, 3.5), layout="constrained")
    places = np.arange(len(rows))
    axes.bar(places - 0.2, [row.stock_tok_s for row in rows], 0.4, label="stock mlx-lm", color="0.7")
    bars = axes.bar(places + 0.2, [row.tok_s for row in rows], 0.4, label="mlx_moe_fast", color="tab:green")
    axes.bar_label(bars, [f"{row.speedup:.2f}x" for row in rows])
    axes.set_xticks(places, [row.case.rpartition("-P")[2] for row in rows])
    axes.set(xlabel="prompt tokens", ylabel="prompt tokens per second", title=title)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
