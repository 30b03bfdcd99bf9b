"""Runs the CUDA kernels, as they are, on the CPU: `launch` has the signature of mlx_moe_fast.launch.launch.

A variant becomes a program: g++ compiles the kernel's source with the host twin of ptx.cuh that lies here. Launches
are one process each, over buffers of exactly the arrays' sizes, filled with 0xFF where they are outputs.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moe_fast import jit
from mlx_moe_fast.variants import Variant

HERE = Path(__file__).parent
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
        arrays = [_raw(a) for a in inputs]
        specs = [(shape, _HOST[dtype]) for shape, dtype in outputs]
        sizes = [int(np.prod(shape)) * np.dtype(host).itemsize for shape, host in specs]
        lines = [f"{variant.id} {blocks} {variant.threads} {variant.shared_bytes} {self.seed} {int(self.late)}"]
        lines += [f"in {arrays[0].nbytes + self.skip}", f"skip {self.skip}"]
        lines += [f"in {a.nbytes}" for a in arrays[1:]] + [f"out {size}" for size in sizes]
        lines += [f"int {value}" for value in scalars] + ["data", ""]
        with self._folder(variant, program) as folder:
            problem, result = Path(folder, "problem"), Path(folder, "result")
            problem.write_bytes("\n".join(lines).encode() + bytes(self.skip) + b"".join(a.tobytes() for a in arrays))
            run = subprocess.run([program, problem, result], capture_output=True, text=True)
            if run.returncode:
                raise Fault(f"{run.stderr.strip()[:4000]}\n(exit status {run.returncode})")
            data = result.read_bytes()
        self.counters.append((variant.id, json.loads(run.stdout)))
        found, at = [], 0
        for (shape, host), (_, dtype), size in zip(specs, outputs, sizes, strict=True):
            array = mx.array(np.frombuffer(data[at : at + size], host).reshape(shape))
            found.append(array.view(dtype) if array.dtype != dtype else array)
            at += size
        return found

    def _folder(self, variant: Variant, program: Path) -> AbstractContextManager[str | Path]:
        """Where a launch puts its files."""
        if self.keep is None:
            return tempfile.TemporaryDirectory()
        own = self.keep / f"{len(self.counters)}-{variant.id}"
        own.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, own / "program")
        print(f"gdb -d tests/emulator -d kernels --args {own}/program {own}/problem {own}/result")
        return nullcontext(own)


_HOST = {
    mx.bfloat16: np.uint16,
    mx.float16: np.uint16,
    mx.int32: np.int32,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.float32: np.float32,
}


def _raw(array: mx.array) -> np.ndarray:
    """An array's memory, 16-bit floats as integers."""
    host = _HOST[array.dtype]
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if host is np.uint16 else array))


def folder() -> Path:
    """Where programs are kept between runs."""
    base = os.environ.get("MLX_MOE_FAST_EMULATOR_DIR") or Path(tempfile.gettempdir()) / f"moe-emulator-{os.getuid()}"
    return Path(base)


def build(variant: Variant, sources: dict[str, str], sanitize: bool, debug: bool = False) -> Path:
    """The program of a variant, made of its source and the machine; only what has changed is compiled."""
    own = {name: (HERE / name).read_text() for name in ("cuda.h", "ptx.cuh", "ptx_sm90.cuh", "machine.cpp")}
    options = OPTIONS + (["-O0", "-g"] if debug else ["-O1", "-g1"]) + (SANITIZERS if sanitize else [])
    # The machine itself is not watched, only told about: its bookkeeping would take most of the time.
    machine = _compile(
        "machine", own, ["-c", *OPTIONS, "-O2", "-g1", f"-DEMU_ADDRESS_SANITIZER={int(sanitize)}", "machine.cpp"]
    )
    files = {**sources, **own}  # this folder's wrappers take the place of the kernels'
    defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
    link = ["-x", "c++", variant.source, "-x", "none", str(machine), f"-Wl,--defsym=emu_entry={variant.id}"]
    return _compile(variant.id, files, [*options, *defines, *link])


def _compile(name: str, files: dict[str, str], arguments: list[str]) -> Path:
    """What g++ makes of `files` with `arguments`; kept, under a name that depends on both."""
    key = hashlib.sha256(json.dumps([files, arguments], sort_keys=True).encode()).hexdigest()[:16]
    made = folder() / f"{name}-{key}"
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


__all__ = ["Emulator", "Fault", "build", "build_all", "folder"]
