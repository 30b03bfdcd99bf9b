"""Generates the same tokens with stock mlx-lm and with fast layers, on a tiny model with random weights."""

import os
import tempfile
from pathlib import Path

import mlx_lm

import mlx_moe_fast
from mlx_moe_fast import envs
from mlx_moe_fast.modelmaker import make_model

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
TOKENS = 16


def main() -> None:
    # A named tile runs our kernels even here, where a layer is so small that MLX's own would be faster.
    os.environ.setdefault(envs.TILE.name, "16")
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = mlx_lm.load(str(make_model("tiny-qwen3-moe", Path(folder))))

        stock = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=TOKENS)
        with mlx_moe_fast.patched(model) as report:
            fast = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=TOKENS)

    print(report)
    print(f"\nstock:   {stock!r}\npatched: {fast!r}")
    if stock == fast:
        print("The texts are equal.")
    else:
        print("The texts differ: rounding differs, and random weights make near ties among tokens common.")


if __name__ == "__main__":
    main()
