"""Write a model folder with random weights and the dimensions of a public model, for `mlx_lm.load`.

python scripts/make_model.py qwen3-30b-a3b --layers 4 --out models/qwen3-30b-a3b
"""

from __future__ import annotations

import argparse

from mlx_moe_fast.modelmaker import DTYPES, MODES, SHAPES, make_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with random weights and a public model's dimensions.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="affine", help="(default: %(default)s)")
    parser.add_argument("--bits", type=int, help="bits a weight (default: 4, mxfp8: 8)")
    parser.add_argument("--group-size", type=int, help="weights a scale (default: 64, or the mode's only one)")
    parser.add_argument("--no-quantize", action="store_true", help="leave the weights in --dtype")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: %(default)s)")
    args = parser.parse_args()

    known_bits, known_groups = MODES[args.mode]
    default_bits, default_group = (4, 64) if args.mode == "affine" else (known_bits[0], known_groups[0])
    try:
        out = make_model(
            args.name,
            args.out,
            layers=args.layers,
            seed=args.seed,
            bits=None if args.no_quantize else default_bits if args.bits is None else args.bits,
            group_size=default_group if args.group_size is None else args.group_size,
            mode=args.mode,
            dtype=args.dtype,
        )
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    print(out)


if __name__ == "__main__":
    main()
