"""Runs the CUDA kernels, as they are, on the CPU: `launch` has the signature of mlx_moe_fast.launch.launch.

A variant becomes a program: g++ compiles the kernel's source with the host twin of ptx.cuh that lies here. Launches
are one process each, over buffers of exactly the arrays' sizes, filled with 0xFF where they are outputs.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moe_fast import jit
from mlx_moe_fast.variants import Variant

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
OPTIONS = ["-std=c++20", "-Wall", "-Werror"]
OPTIONS += ["-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-deprecated-enum-enum-conversion"]


class Fault(AssertionError):
    """A kernel did what it must not: the message names kernel, block and thread."""


@dataclass
class Emulator:
    """How launches run: the seed of the scheduler, whether asynchronous copies land late, whether sanitizers watch.

    `counters` holds those of every launch, by variant id. In `keep`, if given, each launch leaves an unoptimised
    program and its problem, for a debugger. The first input begins `skip` bytes into its buffer.
    """

    seed: int = 0
    late: bool = True
    sanitize: bool = False
    sources: dict[str, str] = field(default_factory=jit.sources)
    counters: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    keep: Path | None = None
    skip: int = 0

    def launch(
        self,
        variant: Variant,
        inputs: Sequence[mx.array],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        scalars: Sequence[int],
        blocks: int,
        contiguous: bool = False,
    ) -> list[mx.array]:
        """As mlx_moe_fast.launch.launch, at once. Raises Fault."""
        program = build(variant, self.sources, self.sanitize, debug=self.keep is not None)
        data = [np.array(a.flatten().view(mx.uint8)).tobytes() for a in inputs]
        data[0] = bytes(self.skip) + data[0]
        sizes = [math.prod(shape) * dtype.size for shape, dtype in outputs]
        setting = [blocks, variant.threads, variant.shared_bytes, self.seed, int(self.late), self.skip]
        lines = [f"{variant.id} {' '.join(map(str, setting))}", *(f"in {len(d)}" for d in data)]
        lines += [*(f"out {size}" for size in sizes), *(f"int {value}" for value in scalars), "data", ""]
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.keep / f"{len(self.counters)}-{variant.id}" if self.keep else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            problem, result = folder / "problem", folder / "result"
            problem.write_bytes(b"".join(["\n".join(lines).encode(), *data]))
            if self.keep:
                program = shutil.copy(program, folder / "program")
                print(f"gdb -d tests/emulator -d kernels --args {program} {problem} {result}")
            run = subprocess.run([program, problem, result], capture_output=True, text=True)
            if run.returncode:
                raise Fault(f"{run.stderr.strip()[:4000]}\n(exit status {run.returncode})")
            made = np.split(np.fromfile(result, np.uint8), np.cumsum(sizes[:-1]))
        self.counters.append((variant.id, json.loads(run.stdout)))
        return [mx.array(m).view(dtype).reshape(shape) for m, (shape, dtype) in zip(made, outputs, strict=True)]


def build(variant: Variant, sources: dict[str, str], sanitize: bool, debug: bool = False) -> Path:
    """The program of a variant, made of its source and the machine; only what has changed is compiled."""
    own = {p.name: p.read_text() for p in sorted(Path(__file__).parent.iterdir()) if p.suffix in (".cpp", ".h", ".cuh")}
    # The machine itself is not watched: its bookkeeping would take most of the time.
    machine = _compile("machine", own, ["-c", *OPTIONS, "-O3", "-g", "machine.cpp"])
    options = OPTIONS + (["-O0", "-g"] if debug else ["-O1", "-g1"]) + (SANITIZERS if sanitize else [])
    defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
    link = ["-x", "c++", variant.source, "-x", "none", str(machine), f"-Wl,--defsym=emu_entry={variant.id}"]
    # This folder's wrappers take the place of the kernels'.
    return _compile(variant.id, {**sources, **own}, [*options, *defines, *link])


def _compile(name: str, files: dict[str, str], arguments: list[str]) -> Path:
    """What g++ makes of `files` with `arguments`; kept between runs, under a name that depends on both."""
    key = hashlib.sha256(json.dumps([files, arguments], sort_keys=True).encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir(), f"moe-emulator-{os.getuid()}", f"{name}-{key}")
    if not made.exists():
        made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as temporary:
            for file, text in files.items():
                Path(temporary, file).write_text(text)
            run = subprocess.run(["g++", *arguments, "-o", "made"], cwd=temporary, capture_output=True, text=True)
            if run.returncode:
                raise Fault(f"{name} does not compile for the host:\n{run.stderr[:4000]}")
            os.replace(Path(temporary, "made"), made)
    return made


def build_all(wanted: Iterable[Variant], sources: dict[str, str], sanitize: bool) -> None:
    """Builds programs side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: build(variant, sources, sanitize), wanted))
