"""Generation by stock mlx-lm against patched layers, by batch size: same weights, same process, same prompts.

Batch 1 runs `mlx_lm.stream_generate`, larger ones `mlx_lm.batch_generate` with all sequences of a batch in step.

python scripts/compare_decode.py --model models/qwen3-30b-a3b --json scripts/results/batch.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from model_runs import (
    LayerError,
    import_pyplot,
    linear_error,
    load,
    log,
    make_prompt,
    positive,
    quantization_of,
    speed,
    switch_error,
)

import mlx_moe_fast
from mlx_moe_fast.bench import (
    Row,
    Timing,
    batch_case,
    interleave,
    machine,
    markdown_table,
    write_results,
)

CHECKED_BATCHES = (1, 8)
CHECKED_STEPS = 4
REFERENCE_TOKENS = 8


def main() -> None:
    args = parse_args()
    if args.plot:
        import_pyplot()  # to fail before the measurement, not after it
    model, tokenizer, config = load(args.model)
    name, quantization = Path(args.model).resolve().name, quantization_of(model, config)
    prompts = make_prompts(tokenizer, max(*args.batch, *CHECKED_BATCHES), args.prompt_tokens, args.seed)
    log(f"{name}, {quantization}, {machine()['device']}")
    log(str(mlx_moe_fast.patch(model)))
    accelerated = mlx_moe_fast.unpatch(model) > 0

    error = switch_error(model, config, REFERENCE_TOKENS, args.seed)
    error = error or linear_error(model, REFERENCE_TOKENS, args.seed)
    if not error:
        log("no SwitchGLU and no QuantizedLinear layer, so no error against float32")
    stock = Side("stock", mlx_moe_fast.unpatch, model, tokenizer)
    ours = Side("patched", mlx_moe_fast.patch, model, tokenizer)
    agreements = [logit_agreement(stock, ours, prompts[:batch]) for batch in CHECKED_BATCHES]
    comparisons = {}
    for batch in args.batch:
        case = batch_case(name, quantization, batch)
        comparisons[case] = compare(stock, ours, prompts[:batch], args.max_tokens, args.repeats)
    rows = [make_row(case, comparison, error) for case, comparison in comparisons.items()]

    print(markdown_table(rows, table_columns(comparisons)))
    print("\nLargest logit difference, patched against stock, in decode steps over the same tokens:")
    print(f"{'; '.join(agreements)}.")
    if error:
        print(f"\n{error}")
    if not accelerated:
        print("\nNo layer of this model can be patched here: both sides are stock mlx-lm.")
    if args.json:
        write_results(args.json, rows, shlex.join(["python", *sys.argv]))
    if args.plot:
        plot(args.plot, list(comparisons.values()), f"{name}, {quantization}, {machine()['device']}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare generation by stock mlx-lm with patched layers.")
    parser.add_argument("--model", required=True, metavar="DIR_OR_REPO", help="folder, or OWNER/NAME on the Hub")
    parser.add_argument(
        "--batch",
        type=positive,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        metavar="N",
        help="sequences at a time (default: 1 2 4 8 16 32)",
    )
    parser.add_argument("--prompt-tokens", type=positive, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="of a sequence (default: 64)")
    parser.add_argument("--repeats", type=positive, default=5, help="runs a side and batch size (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts and activations (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the results; needs matplotlib")
    args = parser.parse_args()
    if args.max_tokens < 2:
        parser.error("argument --max-tokens: at least 2, as the time of a single sequence starts with its first token")
    return args


def make_prompts(tokenizer: TokenizerWrapper, count: int, length: int, seed: int) -> list[list[int]]:
    """Random ones; the first of them do not depend on `count`."""
    return np.reshape(make_prompt(tokenizer, count * length, None, seed), (count, length)).tolist()


# ---- measurement --------------------------------------------------------------------------------


@contextmanager
def endless(tokenizer: TokenizerWrapper) -> Iterator[None]:
    """No token ends a sequence."""
    ends = tokenizer.eos_token_ids
    tokenizer.eos_token_ids = ()
    try:
        yield
    finally:
        tokenizer.eos_token_ids = ends


@dataclass
class Side:
    """The model as one of the two, stock or patched."""

    name: str
    switch: Callable[[nn.Module], object]
    model: nn.Module
    tokenizer: TokenizerWrapper

    def step_us(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Choose `max_tokens` tokens greedily for each prompt: microseconds of one step, which gives each a token."""
        self.switch(self.model)
        with endless(self.tokenizer):
            run = self._run_one if len(prompts) == 1 else self._run_batch
            lengths, microseconds = run(prompts, max_tokens)
        if (least := min(lengths)) < max_tokens:
            sys.exit(f"error: {self.name}, batch {len(prompts)}: a sequence ended after {least} of {max_tokens} tokens")
        return microseconds

    def _run_one(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[int], float]:
        *_, response = mlx_lm.stream_generate(self.model, self.tokenizer, prompts[0], max_tokens=max_tokens)
        # Its clock starts when the first token is there, but its speed counts that token too.
        tokens, steps = response.generation_tokens, max(response.generation_tokens - 1, 1)
        return [tokens], 1e6 * tokens / response.generation_tps / steps

    def _run_batch(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[int], float]:
        """The clock of mlx-lm also holds what it does once a run on the CPU: putting the sequences' caches together
        and taking them apart, and launching a step after the last one."""
        batch = len(prompts)
        response = mlx_lm.batch_generate(
            self.model,
            self.tokenizer,
            prompts,
            max_tokens=max_tokens,
            return_token_ids=True,
            # By default prompts are read eight at a time, while those read before are already being continued.
            prefill_batch_size=batch,
            completion_batch_size=batch,
        )
        lengths = [len(ids) for ids in response.token_ids]  # type: ignore[union-attr]
        return lengths, 1e6 * batch / response.stats.generation_tps

    def step_logits(self, prompts: list[list[int]]) -> np.ndarray:
        """Logits (batch, steps, vocabulary) of decode steps over the prompts' last tokens."""
        self.switch(self.model)
        tokens, cache = mx.array(prompts), make_prompt_cache(self.model)
        steps = min(CHECKED_STEPS, tokens.shape[1])
        before, checked = tokens[:, :-steps], tokens[:, -steps:]
        if before.size:
            self.model(before, cache=cache)
            mx.eval([layer.state for layer in cache])
        logits = [self.model(checked[:, step : step + 1], cache=cache) for step in range(steps)]
        return np.array(mx.concatenate(logits, axis=1).astype(mx.float32))


def logit_agreement(stock: Side, ours: Side, prompts: list[list[int]]) -> str:
    logits = stock.step_logits(prompts)
    difference = np.abs(ours.step_logits(prompts) - logits).max()
    return f"batch {len(prompts)} {difference:.3g} (std of stock's logits {logits.std():.3g})"


@dataclass(frozen=True)
class Comparison:
    """Stock against patched on one batch; times of one step in microseconds."""

    batch: int
    stock: Timing
    ours: Timing

    @property
    def stock_tok_s(self) -> float:
        return 1e6 * self.batch / self.stock.median

    @property
    def tok_s(self) -> float:
        return 1e6 * self.batch / self.ours.median


def compare(stock: Side, ours: Side, prompts: list[list[int]], max_tokens: int, repeats: int) -> Comparison:
    warmups = []
    for side in (stock, ours):
        start = time.perf_counter()
        side.step_us(prompts, max_tokens)
        warmups.append(f"{side.name} {time.perf_counter() - start:.2f} s")
    log(f"batch {len(prompts)}: warm-up including JIT compilation: {', '.join(warmups)}")

    sides = [partial(side.step_us, prompts, max_tokens) for side in (stock, ours)]
    return Comparison(len(prompts), *interleave(sides, repeats))


# ---- output -------------------------------------------------------------------------------------


def make_row(case: str, comparison: Comparison, error: LayerError | None) -> Row:
    stock, ours = comparison.stock, comparison.ours
    return Row(
        suite="batch",
        case=case,
        variant="patched",
        median_us=ours.median,
        p20_us=ours.p20,
        p80_us=ours.p80,
        tok_s=comparison.tok_s,
        stock_median_us=stock.median,
        stock_tok_s=comparison.stock_tok_s,
        speedup=stock.median / ours.median,
        rel_rms=error.ours if error else None,
        stock_rel_rms=error.stock if error else None,
        verified=error.verified if error else None,
    )


def table_columns(comparisons: dict[str, Comparison]) -> dict[str, str | Callable[[Row], Any]]:
    single = next((comparison for comparison in comparisons.values() if comparison.batch == 1), None)

    def column(get: Callable[[Comparison], Any]) -> Callable[[Row], Any]:
        return lambda row: get(comparisons[row.case])

    def against_single(get: Callable[[Comparison], float]) -> Callable[[Row], Any]:
        return column(lambda c: f"{get(c) / get(single):.2f}x" if single else None)

    return {
        "batch": column(lambda c: c.batch),
        "stock tok/s (p20–p80)": column(lambda c: speed(c.stock, c.batch)),
        "patched tok/s (p20–p80)": column(lambda c: speed(c.ours, c.batch)),
        "speed-up": lambda row: f"{row.speedup:.2f}x",
        "stock tok/s a sequence": column(lambda c: c.stock_tok_s / c.batch),
        "patched tok/s a sequence": column(lambda c: c.tok_s / c.batch),
        "stock against batch 1": against_single(lambda c: c.stock_tok_s),
        "patched against batch 1": against_single(lambda c: c.tok_s),
    }


def plot(path: Path, comparisons: Sequence[Comparison], title: str) -> None:
    """Lines of tokens per second, stock and patched, over the batch size."""
    figure, axes = import_pyplot().subplots(figsize=(6, 3.5), layout="constrained")
    points = sorted(comparisons, key=lambda comparison: comparison.batch)
    batches = [point.batch for point in points]
    axes.plot(batches, [point.stock_tok_s for point in points], "o-", label="stock mlx-lm", color="0.6")
    axes.plot(batches, [point.tok_s for point in points], "o-", label="mlx_moe_fast", color="tab:green")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    exponents = np.log2([(point.stock_tok_s, point.tok_s) for point in points])
    axes.set_ylim(2 ** np.floor(exponents.min()), 2 ** np.ceil(exponents.max()))  # ticks are powers of two
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="sequences at a time", ylabel="tokens per second, all sequences", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
