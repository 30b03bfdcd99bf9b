"""Every kernel under NVIDIA's compute-sanitizer, on small shapes around its tile. Needs a GPU and the CUDA toolkit.

Inputs and references are made here. What the sanitizer watches is a child process that only launches, through CuPy and
without an MLX array: in MLX's pooled buffers a step beyond an array's end is not seen. Its buffers are of exactly the
arrays' sizes, and its results are compared, so that a launch that never happened is not clean either.

    python scripts/sanitize.py --jobs 12
    python scripts/sanitize.py --variants glu_affine4g64 --tools racecheck --json findings.json
"""

import argparse
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cases import Case, make_ids, make_weights  # noqa: E402
from cases import floats as random_floats  # noqa: E402
from checks import ROUTERS, router_inputs  # noqa: E402
from numerics import array, check, grouped, moe_glu, router_reference  # noqa: E402

from mlx_moe_fast import jit, ops, variants  # noqa: E402
from mlx_moe_fast.dispatch import Choice  # noqa: E402
from mlx_moe_fast.errors import MlxMoeFastError  # noqa: E402
from mlx_moe_fast.problem import Device, Projection, Quantization, RouterForm  # noqa: E402
from mlx_moe_fast.variants import Decode, Prefill, Probe, Route, Router, Stamp, Variant  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TIMEOUT = 300  # seconds a process may take: a kernel may wait for ever
OK, WRONG, FAILED = "ok", "wrong result", "failed to run"


@dataclass(frozen=True)
class Problem:
    """A call of a function of ops on NumPy arrays, and what judges the arrays that come out. `half`: what 16-bit
    integers are, where ops asks."""

    call: str
    arguments: tuple
    check: Callable[..., None]
    half: str = "bf16"


def raw(a: mx.array | ops.Weights) -> np.ndarray | ops.Weights:
    """An array, or those of a projection, in NumPy; 16-bit floats as integers."""
    if isinstance(a, ops.Weights):
        parts = {name: getattr(a, name) for name in ("weight", "scales", "biases", "bias")}
        return replace(a, **{name: raw(part) for name, part in parts.items() if part is not None})
    return np.array(a.view(mx.uint16) if a.dtype in (mx.bfloat16, mx.float16) else a)


def floats(a: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit floats that came as integers, as float32."""
    return a.view(np.float16).astype(np.float32) if dtype == "fp16" else (a.astype(np.uint32) << 16).view(np.float32)


def is_glu(variant: Prefill | Decode) -> bool:
    return variant.glu if isinstance(variant, Prefill) else variant.kind == "glu"


def cases(variant: Prefill | Decode) -> list[Case]:
    """A tile and one row, with bias; several tiles an expert, ids out of range. N and K end inside a block."""
    q, n = variant.quantization, 160 if is_glu(variant) else 136
    m = variant.tile.m if isinstance(variant, Prefill) else variant.strip.columns
    shapes = (m + 1, 1, 3 * q.group_size, n, 2), (2 * m + 5, 2, 256 + q.group_size, n - 64, 5)
    extra: tuple[dict, dict] = {"has_bias": True, "ids": "one"}, {"ids": "bad"}
    down = Quantization(q.bits, 32)  # whose K may end where these N do
    return [Case(*s, q, variant.dtype, down=down, **e) for s, e in zip(shapes, extra, strict=True)]


def experts(variant: Prefill | Decode, case: Case, shape: variants.Tile | variants.WgmmaTile | Choice) -> Problem:
    """One product, or a whole gated layer: nothing may read what the GLU kernel leaves unwritten."""
    x, ids, *weights = case.arrays()
    weights = weights if is_glu(variant) else weights[:1]
    reference = (moe_glu if is_glu(variant) else grouped)(
        array(x).repeat(case.top_k, axis=0), array(ids).flatten(), *weights
    )

    def judge(out: np.ndarray) -> None:
        check(floats(out, variant.dtype), reference, variant.dtype, products=3 if is_glu(variant) else 1)

    arguments = (raw(x), raw(ids.flatten()), *map(raw, weights), shape)
    return Problem("moe_glu" if is_glu(variant) else "grouped_qmm", arguments, judge)


def dense(variant: Decode, split: int) -> Problem:
    """One matrix, a row fewer than the strip holds, with bias; N and K end inside a block."""
    rng, rows, k = np.random.default_rng(split), variant.strip.columns - 1, 256 + variant.quantization.group_size
    weights = make_weights(rng, Projection(1, 136, k, variant.quantization, variant.dtype, has_bias=True))
    x = random_floats(rng, (rows, k), variant.dtype)
    reference = grouped(array(x), np.zeros(rows, np.int32), weights)

    def judge(out: np.ndarray) -> None:
        check(floats(out, variant.dtype), reference, variant.dtype)

    return Problem("dense_qmm", (raw(x), raw(weights), Choice(variant.strip, split, "")), judge)


def route(variant: Route, rows: int, k: int, tile: variants.Tile) -> Problem:
    """Routing lists with ids out of range, and a permutation whose K ends inside a block."""
    rng, experts = np.random.default_rng(rows), 7
    ids = make_ids(rng, rows, 1, experts, "bad").flatten()
    x = rng.integers(0, 2**16, (rows, k), np.uint16)
    logical = np.array([variants.logical_k(p, variant.bits) for p in range(variants.padded(k, variant.bits))])
    order = np.where((ids < 0) | (ids >= experts), experts, ids).argsort(kind="stable")

    def judge(row_ids: np.ndarray, tiles: np.ndarray, permuted: np.ndarray) -> None:
        np.testing.assert_array_equal(row_ids, order)
        np.testing.assert_array_equal(permuted, np.where(logical < k, x[:, np.minimum(logical, k - 1)], 0))
        assert tiles[:, 2].sum() == rows, "tiles do not hold every row once"

    return Problem("route", (ids, x, experts, variant.bits, tile), judge)


BLOCK = Quantization(4, 64)  # of the experts behind a router


def block(variant: Router) -> Problem:
    """Router, experts and combination: more tokens than a block of the router takes, an expert that nobody chose."""
    case = Case(5, 2, 192, 128, 9, BLOCK, beside(variant))
    x, _, gate, up, down = case.arrays()
    logits = np.random.default_rng(6).standard_normal((5, 9)).astype(np.float32)
    logits[:, 3] = -9
    rounded, form = mx.array(logits).astype(ops.NUMBERS[variant.dtype]), RouterForm(2, normalise=False)
    ids, shares = router_reference(array(rounded), form)
    rows = moe_glu(array(x).repeat(2, axis=0), ids.flatten(), gate, up, down)
    reference = (rows.reshape(5, 2, -1) * shares[..., None]).sum(axis=1).astype(np.float32)

    def judge(out: np.ndarray) -> None:
        check(floats(out, case.dtype), reference, case.dtype, 4)

    return Problem("moe_block", (raw(x), raw(rounded), None, form, *map(raw, (gate, up, down))), judge, case.dtype)


def beside(variant: Router) -> str:
    """Of what dtype the experts are."""
    return "bf16" if variant.dtype == "fp32" else variant.dtype


def routed(variant: Router, name: str) -> Problem:
    """A form of router, with a bias of the logits' dtype or fp32."""
    form, (logits, bias) = ROUTERS[name][0], router_inputs(name, variant.dtype)
    if bias is not None and bias.dtype != mx.float32:
        bias = bias.astype(logits.dtype)
    expected, shares = router_reference(array(logits), form, None if bias is None else array(bias))

    def judge(ids: np.ndarray, weights: np.ndarray) -> None:
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_allclose(weights, shares, rtol=1e-5)

    arguments = raw(logits), form, None if bias is None else raw(bias)
    return Problem("router", arguments, judge, beside(variant))


def probe() -> Problem:
    """Addresses of two arrays."""

    def judge(addresses: np.ndarray) -> None:
        right = addresses.all() and (addresses % ops.ALIGNMENT == 0).all() and addresses[0] != addresses[1]
        assert right, f"these are no addresses of two arrays: {addresses}"

    a = np.zeros(3, np.uint16)
    return Problem("launch", (Probe(), [a, a], [((2,), np.uint64)], [], 1), judge)


def stamp() -> Problem:
    """A copy longer than a block, and the time."""
    x = np.random.default_rng(0).integers(0, 2**16, 300, np.uint16)

    def judge(out: np.ndarray, time: np.ndarray) -> None:
        np.testing.assert_array_equal(out, x)
        assert time[0] not in (0, 2**64 - 1), f"this is no time: {time}"

    return Problem("launch", (Stamp(), [x], [(x.shape, np.uint16), ((1,), np.uint64)], [x.size], 1), judge)


def problems(variant: Variant) -> list[Problem]:
    if isinstance(variant, Prefill):
        return [experts(variant, case, variant.tile) for case in cases(variant)]
    if isinstance(variant, Decode) and variant.kind == "dense":
        return [dense(variant, split) for split in (1, variants.WARPS)]
    if isinstance(variant, Decode):
        return [
            experts(variant, case, Choice(variant.strip, split, ""))
            for case, split in zip(cases(variant), (1, variants.WARPS), strict=True)
        ]
    if isinstance(variant, Router):
        return [block(variant), *(routed(variant, name) for name in ROUTERS)]
    if isinstance(variant, Route):
        return [route(variant, rows, 160, tile) for rows, tile in zip((1, 600), variants.TILES.values(), strict=False)]
    return [stamp() if isinstance(variant, Stamp) else probe()]


def launched(variant: Variant) -> list[Variant]:
    """Every kernel that the problems of a variant launch."""
    if isinstance(variant, Decode):
        down = cases(variant)[0].down
        return [variant, *([replace(variant, kind="plain", quantization=down)] if is_glu(variant) else [])]
    if isinstance(variant, Router):
        experts = [Decode(BLOCK, beside(variant), kind, variants.EXPERT_STRIP) for kind in ("glu", "plain")]
        return [variant, *experts]
    if not isinstance(variant, Prefill):
        return [variant]
    down = [replace(variant, glu=False, quantization=cases(variant)[0].down)] if variant.glu else []
    return [variants.route(variant.quantization.bits), variant, *down]


# The child: all that the sanitizer sees.


@dataclass
class Array:
    """What ops asks of an array, around a buffer on the GPU."""

    buffer: Any
    half: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)  # shape, size

    @property
    def dtype(self) -> Any:
        known = {"uint16": ops.NUMBERS[self.half], "float32": mx.float32}
        return known.get(self.buffer.dtype.name, self.buffer.dtype)

    def astype(self, _: mx.Dtype) -> "Array":
        return self  # only ids are converted, and these are int32


HOST = {mx.int32: np.int32, mx.float32: np.float32, mx.bfloat16: np.uint16, mx.float16: np.uint16}


@dataclass
class Card:
    """A GPU through CuPy, its kernels in `folder`; `launch` stands in for mlx_moe_fast.launch.launch."""

    cupy: ModuleType
    folder: Path
    poison: bool  # fill outputs before a launch; without, initcheck sees who reads what nobody wrote

    def __post_init__(self) -> None:
        self.cupy.cuda.set_allocator(None)  # no pool: a cudaMalloc for each buffer
        self.modules: dict[str, Any] = {}
        self.half = ""  # of the problem at hand

    def put(self, value: Any) -> Any:
        """`value` with the arrays in it on the GPU."""
        if isinstance(value, list):
            return [self.put(v) for v in value]
        if isinstance(value, ops.Weights):
            return replace(value, **{n: self.put(getattr(value, n)) for n in ("weight", "scales", "biases", "bias")})
        return Array(self.cupy.asarray(value), self.half) if isinstance(value, np.ndarray) else value

    def launch(
        self,
        variant: Variant,
        inputs: Sequence[Array],
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        scalars: Sequence[int],
        blocks: int,
        contiguous: bool = False,
    ) -> list[Array]:
        if variant.id not in self.modules:
            self.modules[variant.id] = self.cupy.RawModule(path=str(self.folder / f"{variant.id}.cubin"))
        kernel = self.modules[variant.id].get_function(variant.id)
        kernel.max_dynamic_shared_size_bytes = variant.shared_bytes
        specs = [(shape, HOST.get(dtype, dtype)) for shape, dtype in outputs]
        if self.poison:
            results = [self.cupy.asarray(np.full(shape, -1).astype(dtype)) for shape, dtype in specs]
        else:
            results = [self.cupy.empty(shape, dtype) for shape, dtype in specs]
        arguments = (*(a.buffer for a in inputs), *results, *map(np.int32, scalars))
        kernel((blocks,), (variant.threads,), arguments, shared_mem=variant.shared_bytes)
        return [Array(r, self.half) for r in results]

    def solve(self, call: str, arguments: Iterable, half: str = "bf16") -> list[np.ndarray]:
        """The arrays that a function of ops gives, back in NumPy."""
        self.half = half
        result = getattr(ops, call)(*map(self.put, arguments))
        if isinstance(result, ops.Routing):
            result = [result.row_ids, result.tiles, result.x]
        return [self.cupy.asnumpy(a.buffer) for a in (result if isinstance(result, list | tuple) else [result])]


def child(folder: Path, tool: str, *names: str) -> None:
    """Solves the problems of some variants; their results go to `folder`."""
    import cupy

    card = Card(cupy, folder, poison=tool != "initcheck")
    ops.launch = card.launch
    ops.device.multiprocessors = lambda: 2  # blocks that share the work have several units of it
    for name in names:
        given = pickle.loads((folder / f"{name}.problems").read_bytes())
        results = [card.solve(*problem) for problem in given]
        (folder / f"{name}.{tool}").write_bytes(pickle.dumps(results))


# The parent.


@dataclass(frozen=True)
class Verdict:
    variant: str
    tool: str
    outcome: str
    log: str = ""


def findings(log: str) -> int | None:
    """What compute-sanitizer's summary counts; None if there is none, or if the sanitizer itself gave up."""
    errors = re.findall(r"^=+ ERROR SUMMARY: (\d+) errors?\s*$", log, re.M)
    hazards = re.findall(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", log, re.M)
    if "Internal Sanitizer Error" in log or not errors + hazards:
        return None
    return sum(map(int, errors)) + sum(int(e) + int(w) for e, w in hazards)


@dataclass
class Examiner:
    """Runs children under the sanitizer and judges them."""

    sanitizer: str
    folder: Path
    problems: dict[str, list[Problem]]

    def watch(self, group: list[Variant], tool: str) -> tuple[int | None, str]:
        """Exit status (None: took too long) and output of one process."""
        with tempfile.TemporaryFile("w+", dir=self.folder, errors="replace") as log:
            command = [self.sanitizer, "--tool", tool, sys.executable, __file__]
            command += ["--child", str(self.folder), tool, *(v.id for v in group)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status: int | None = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and what it watches
                process.wait()
                status = None
            log.seek(0)
            return status, log.read()

    def complaint(self, variant: Variant, tool: str) -> str | None:
        """What is wrong with the results of a variant; None if they are right."""
        results = pickle.loads((self.folder / f"{variant.id}.{tool}").read_bytes())
        try:
            for problem, result in zip(self.problems[variant.id], results, strict=True):
                problem.check(*result)
        except AssertionError as error:
            return str(error)
        return None

    def examine(self, group: list[Variant], tool: str) -> list[Verdict]:
        """The verdict on each of a group. If one is not clean, each gets a process of its own: a report is then about
        one variant, and an error, after which no other kernel can run, is not held against the others."""
        results = [self.folder / f"{variant.id}.{tool}" for variant in group]
        for path in results:
            path.unlink(missing_ok=True)
        status, log = self.watch(group, tool)
        count = findings(log)
        ran = status == 0 and count is not None and all(path.exists() for path in results)
        complaints = [self.complaint(v, tool) for v in group] if ran else []
        if ran and not count and not any(complaints):
            return [Verdict(v.id, tool, OK) for v in group]
        if len(group) > 1:
            return [verdict for v in group for verdict in self.examine([v], tool)]
        if count:
            outcome = f"{count} finding{'s' * (count > 1)}"
        else:
            outcome = WRONG if ran else FAILED
        log += "\n".join(filter(None, complaints)) + f"(stopped after {TIMEOUT} s)" * (status is None)
        return [Verdict(group[0].id, tool, outcome, log)]


def groups(wanted: Iterable[Variant]) -> list[list[Variant]]:
    """Variants that share a process: those of a quantization and dtype; all others."""

    def key(v: Variant) -> str:
        return f"{v.quantization} {v.dtype}" if isinstance(v, Prefill | Decode) else ""

    return [list(g) for _, g in itertools.groupby(sorted(wanted, key=key), key)]


def table(verdicts: Iterable[Verdict], tools: Sequence[str]) -> str:
    """Markdown: a line a variant, a column a tool."""
    found: dict[str, dict[str, str]] = {}
    for v in verdicts:
        found.setdefault(v.variant, {})[v.tool] = v.outcome
    lines = [["variant", *tools], [":--"] * (len(tools) + 1)]
    lines += [[variant, *(outcomes[t] for t in tools)] for variant, outcomes in found.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gpu() -> Device:
    """The first GPU. Raises whatever CuPy raises where there is none."""
    from cupy import cuda

    capability = cuda.Device(0).compute_capability  # "90"
    name = cuda.runtime.getDeviceProperties(0)["name"].decode()
    return Device(name, (int(capability[:-1]), int(capability[-1])))


def prepare(wanted: Iterable[Variant], folder: Path, arch: str) -> dict[str, list[Problem]]:
    """Puts all that children need into `folder`."""
    kernels = list(dict.fromkeys(v for w in wanted for v in launched(w)))
    jit.prepare(kernels, arch, lambda count: print(f"compiling {count} kernels for {arch}", file=sys.stderr))
    for kernel in kernels:
        # CuPy takes the last byte of a cubin, always a zero, for the end of a string and drops it.
        (folder / f"{kernel.id}.cubin").write_bytes(jit.load(kernel, arch).cubin + b"\0")
    made = {v.id: problems(v) for v in wanted}
    for name, given in made.items():
        (folder / f"{name}.problems").write_bytes(pickle.dumps([(p.call, p.arguments, p.half) for p in given]))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="", metavar="SUBSTRING", help="only variants whose id contains this")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes side by side (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write verdicts and the sanitizer's reports here")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        folder, *rest = args.child
        child(Path(folder), *rest)
        return 0

    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        print("compute-sanitizer is not on PATH: it is in bin/ of a CUDA toolkit", file=sys.stderr)
        return 2
    try:
        device = gpu()
    except Exception as error:
        print(f"no NVIDIA GPU that CuPy can use: {error}", file=sys.stderr)
        return 2

    wanted = [v for v in variants.all_variants(device.arch) if args.variants in v.id]
    if not wanted:
        parser.error(f"no variant's id contains {args.variants!r}; see mlx_moe_fast/variants.py")
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as name:
        try:
            examiner = Examiner(sanitizer, Path(name), prepare(wanted, Path(name), device.arch))
        except MlxMoeFastError as error:
            print(error, file=sys.stderr)
            return 2
        jobs = list(itertools.product(groups(wanted), args.tools))
        verdicts: list[Verdict] = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for i, found in enumerate(pool.map(lambda job: examiner.examine(*job), jobs), 1):
                verdicts += found
                print(f"{i} of {len(jobs)} processes done", file=sys.stderr)

    bad = [v for v in verdicts if v.outcome != OK]
    for v in bad:
        print(f"\n{v.variant}, {v.tool}: {v.outcome}\n{v.log[:4000]}", file=sys.stderr)
    if args.json:
        results = {"device": asdict(device), "compiler": jit.compiler(), "verdicts": [asdict(v) for v in verdicts]}
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(verdicts, args.tools))
    print(f"\n{len(wanted)} variants on {device.name}: {f'{len(bad)} not clean' if bad else 'no finding'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
