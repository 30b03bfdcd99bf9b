"""Records what the kernels compute on this GPU, for the emulator to be held against: tests/data/NAME.npz.

    python scripts/record_outputs.py h200

Some cases of `cases.around` for every variant of the shortest tile, outputs as raw 16-bit integers, and hashes of the
routing lists and permuted activations.
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

from mlx_moe_fast import bench, ops, variants  # noqa: E402
from mlx_moe_fast.variants import Prefill  # noqa: E402

CASES = (0, 1, 2, 8)  # small ones: a K tail, an N tail, several tiles, mostly empty experts


def raw(array: mx.array) -> np.ndarray:
    """An array's memory, 16-bit floats as integers."""
    return np.array(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array)


def compute(variant: Prefill, case: Case) -> tuple[np.ndarray, str]:
    """What a variant writes for a case (GLU: the hidden activations), and the hash of what it was routed by."""
    x, ids, gate, up, _ = case.arrays()
    bits = variant.quantization.bits
    routing = ops.route(ids.flatten(), x, case.experts, bits, variant.tile)
    if variant.glu:
        out = ops._glu(routing, gate, up, case.top_k, bits)
    else:
        out = ops._grouped(routing, routing.x, gate, case.top_k, scatter=True)
    lists = b"".join(raw(a).tobytes() for a in (routing.row_ids, routing.x))
    return raw(out), hashlib.sha256(lists).hexdigest()[:16]


def recorded_variants() -> list[Prefill]:
    """Every prefill variant of the shortest tile."""
    return [v for v in variants.all_variants() if isinstance(v, Prefill) and v.tile.m == min(variants.TILES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file, such as the GPU's")
    name = parser.parse_args().name
    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        sys.exit("record_outputs needs an NVIDIA GPU and MLX's CUDA build")
    values, routes = {}, {}
    for variant in recorded_variants():
        for i in CASES:
            key = f"{variant.id}/{i}"
            values[key], routes[f"{key}/route"] = compute(
                variant, around(variant.tile.m, variant.quantization, variant.dtype)[i]
            )
    about = json.dumps({**bench.machine(), **bench.versions(), "commit": bench.commit()})
    path = ROOT / "tests" / "data" / f"{name}.npz"
    np.savez_compressed(path, about=about, routes=json.dumps(routes), **values)
    print(f"{path}: {len(values)} outputs")


if __name__ == "__main__":
    main()
