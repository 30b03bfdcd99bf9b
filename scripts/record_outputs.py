"""Records what the kernels compute on this GPU, for the emulator to be held against: tests/data/NAME.npz.

    python scripts/record_outputs.py h200

Some small cases for every prefill variant of the shortest tile, and of groups of 64 for those on wgmma and for decode:
outputs as raw 16-bit integers, and hashes of the routing lists and permuted activations.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cases import Case, around  # noqa: E402
from checks import integers, matrix, multiply, shapes_of  # noqa: E402

from mlx_moe_fast import bench, ops, variants  # noqa: E402
from mlx_moe_fast.variants import WGMMA, Decode, Prefill, Variant  # noqa: E402

SHORTEST = min(variants.TILES)
CASES = (0, 1, 2, 8)  # of `around`: a K tail, an N tail, several tiles, mostly empty experts
EXACT = "integers"  # the name of the case in which every bit has to be right


def raw(array: mx.array) -> np.ndarray:
    """An array's memory, 16-bit floats as integers."""
    return np.array(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array)


def compute(variant: Prefill, case: Case) -> tuple[np.ndarray, str]:
    """What a prefill variant writes for a case (GLU: the hidden activations), and the hash of what it was routed by."""
    x, ids, gate, up, _ = case.arrays()
    bits = variant.quantization.bits
    routing = ops.route(ids.flatten(), x, case.experts, bits, variant.tile)
    if variant.glu:
        out = ops._glu(routing, gate, up, case.top_k, bits)
    else:
        out = ops._grouped(routing, routing.x, gate, case.top_k, scatter=True)
    lists = b"".join(raw(a).tobytes() for a in (routing.row_ids, routing.x))
    return raw(out), hashlib.sha256(lists).hexdigest()[:16]


def compute_few(variant: Decode) -> dict[str, np.ndarray]:
    """What a decode variant writes, by the name of a case: each way to share the work in turn on another small problem
    with tails, and one of integers."""
    q, dtype, columns = variant.quantization, variant.dtype, variant.strip.columns
    g, block = q.group_size, 1024 // q.bits
    outs = {}
    if variant.kind == "dense":
        shapes = [(columns - 1, 24, 4 * block), (columns, 24, 17 * g), (columns // 2 + 1, 40, block + g)]
        for i, (choice, shape) in enumerate(zip(shapes_of(variant), shapes, strict=True)):
            outs[str(i)] = ops.dense_qmm(*matrix(variant, *shape), choice)
    else:
        cases = [
            Case(9, 1, 4 * block, g, 12, q, dtype, ids="one"),
            Case(5, 2, 17 * g, g, 4, q, dtype, has_bias=True, ids="bad"),
        ]
        for i, (choice, case) in enumerate(zip(shapes_of(variant), cases, strict=True)):
            x, ids, gate, up, _ = case.arrays()
            weights = (gate, up) if variant.kind == "glu" else (gate,)
            outs[str(i)] = ops._decode(x, ids.flatten(), choice, *weights)
    if variant.kind != "glu":
        x, ids, weights = integers(variant, 9, 24)
        outs[EXACT] = multiply(variant, shapes_of(variant)[-1], x, mx.array(ids), weights)
    return {name: raw(out) for name, out in outs.items()}


def recorded_variants() -> list[Prefill | Decode]:
    """As above."""

    def wanted(v: Variant) -> bool:
        if isinstance(v, Prefill) and v.tile is not WGMMA:
            return v.tile is variants.TILES[SHORTEST]
        return isinstance(v, Prefill | Decode) and v.quantization.group_size == 64

    return [v for v in variants.all_variants() if wanted(v)]


def outputs(variant: Prefill | Decode) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What a variant writes, and the hashes of what it was routed by, under the names that they have in the file."""
    if isinstance(variant, Decode):
        return {f"{variant.id}/{name}": out for name, out in compute_few(variant).items()}, {}
    values, routes = {}, {}
    for i in CASES:
        key = f"{variant.id}/{i}"
        case = around(SHORTEST, variant.quantization, variant.dtype)[i]
        values[key], routes[f"{key}/route"] = compute(variant, case)
    return values, routes


def record(path: Path, about: dict) -> int:
    """Writes the file; returns how many outputs it has."""
    values, routes = {}, {}
    for variant in recorded_variants():
        more, hashes = outputs(variant)
        values.update(more)
        routes.update(hashes)
    np.savez_compressed(path, about=json.dumps(about), routes=json.dumps(routes), **values)
    return len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file, such as the GPU's")
    name = parser.parse_args().name
    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        sys.exit("record_outputs needs an NVIDIA GPU and MLX's CUDA build")
    path = ROOT / "tests" / "data" / f"{name}.npz"
    count = record(path, {**bench.machine(), **bench.versions(), "commit": bench.commit()})
    print(f"{path}: {count} outputs")


if __name__ == "__main__":
    main()
