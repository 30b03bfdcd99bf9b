"""kernels/*.cu -> machine code. The only module that compiles.

Lifecycle of a kernel: `load` looks in memory, then in the disk cache (a damaged entry counts as absent), and only
then compiles with CuPy's NVRTC and publishes the result. NVRTC needs neither a GPU nor CUDA's headers here.
The cache key covers everything that the machine code depends on: the sources, the options, the compiler.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.resources
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

from . import envs
from .errors import KernelBuildError
from .variants import Variant

log = logging.getLogger(__name__)
DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Kernel:
    """Machine code of one variant for one architecture, and how a block of it is launched."""

    name: str
    cubin: bytes
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Resources:
    """What ptxas reports: registers a thread, bytes spilled a thread."""

    registers: int
    spilled_bytes: int


_memory: dict[tuple[str, str], Kernel] = {}
_lock = threading.Lock()


@cache
def sources() -> dict[str, str]:
    """Kernel sources by file name, from the wheel or from the checkout."""
    packaged = importlib.resources.files("mlx_moe_fast") / "kernels"
    folder = packaged if packaged.is_dir() else Path(__file__).parent.parent / "kernels"
    found = {f.name: f.read_text() for f in folder.iterdir() if f.name.endswith((".cu", ".cuh"))}
    if not found:
        raise KernelBuildError(f"No kernel sources in {folder}.", "Reinstall mlx-moe-fast.")
    return found


@cache
def compiler() -> str:
    """The installed CuPy distribution and its version, which decide the compiler."""
    for name in ("cupy-cuda13x", "cupy-cuda12x"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    raise KernelBuildError(
        "The kernels are compiled with CuPy, and it is not installed.",
        'Install "mlx-moe-fast[cuda13]" or, for CUDA 12, "mlx-moe-fast[cuda12]".',
    )


def options(variant: Variant, arch: str) -> list[str]:
    """NVRTC's options for a variant."""
    return [f"-arch={arch}", "-std=c++17", "--ptxas-options=-v"] + [f"-D{k}={v}" for k, v in variant.defines.items()]


def compile(variant: Variant, arch: str) -> tuple[bytes, Resources]:
    """Compiles a variant for `arch` ("sm_90a") whatever the caches hold; KernelBuildError with the log on failure."""
    # CuPy makes its cache folder when it is imported, and fails where it must not write.
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_dir() or tempfile.gettempdir()))
    try:
        from cupy.cuda import nvrtc
    except Exception as error:
        raise KernelBuildError(f"CuPy could not be imported ({error}).", "Reinstall it.") from error
    headers = [name for name in sources() if name.endswith(".cuh")]
    try:
        program = nvrtc.createProgram(
            sources()[variant.source],
            variant.source,
            [sources()[h].encode() for h in headers],
            [h.encode() for h in headers],
        )
    except Exception as error:
        raise KernelBuildError(
            f"NVRTC could not be loaded ({error}).", f"{compiler()} needs it: install its [ctk] extra."
        ) from error
    try:
        nvrtc.compileProgram(program, options(variant, arch))
        report = nvrtc.getProgramLog(program)
        registers = re.search(r"Used (\d+) registers", report)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
        resources = Resources(int(registers[1]) if registers else 0, sum(map(int, spills)))
        return nvrtc.getCUBIN(program), resources
    except Exception as error:
        raise KernelBuildError(
            f"{variant.id} did not compile for {arch} with {compiler()}:\n{nvrtc.getProgramLog(program)}",
            "MLX's own kernels serve meanwhile; please report this.",
        ) from error
    finally:
        nvrtc.destroyProgram(program)


@cache
def cache_dir() -> Path | None:
    """The first of the configured, the user's and a temporary folder that can be written; None if there is none."""
    user = getattr(os, "getuid", lambda: "")()
    candidates = [envs.CACHE_DIR.get(), platformdirs.user_cache_dir("mlx-moe-fast")]
    candidates.append(os.path.join(tempfile.gettempdir(), f"mlx-moe-fast-{user}"))
    for candidate in filter(None, candidates):
        try:
            folder = Path(candidate)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            log.debug("cannot cache kernels in %s: %s", candidate, error)
    log.warning("no folder for compiled kernels can be written; they are compiled again in every process")
    return None


def cache_path(variant: Variant, arch: str) -> Path | None:
    """Where the machine code of a variant is kept; None if nowhere."""
    folder = cache_dir()
    if folder is None:
        return None
    parts = [
        compiler(),
        *options(variant, arch),
        *(text for item in sorted(sources().items()) for text in item),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return folder / f"{variant.id}-{arch}-{key}.cubin"


def _read(path: Path | None) -> bytes | None:
    """A cached cubin, or None if it is absent or damaged."""
    try:
        content = path.read_bytes() if path else b""
    except OSError:
        return None
    cubin, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _publish(path: Path | None, cubin: bytes) -> None:
    """Writes a cache entry whole or not at all; that another process does the same is no matter."""
    if path is None:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_bytes(cubin + hashlib.sha256(cubin).digest())
        os.replace(temporary, path)
    except OSError as error:
        log.warning("%s was compiled but not cached: %s", path.name, error)
        with contextlib.suppress(OSError):
            temporary.unlink()


def load(variant: Variant, arch: str) -> Kernel:
    """The kernel of a variant for `arch`, compiled if no cache has it. Raises KernelBuildError. Thread-safe."""
    kernel = _memory.get((variant.id, arch))
    if kernel is None:
        path = cache_path(variant, arch)
        cubin = _read(path)
        if cubin is None:
            cubin, _ = compile(variant, arch)
            _publish(path, cubin)
        with _lock:
            kernel = _memory.setdefault(
                (variant.id, arch), Kernel(variant.id, cubin, variant.threads, variant.shared_bytes)
            )
    return kernel


def prepare(variants: Iterable[Variant], arch: str, announce: Callable[[int], None] = lambda count: None) -> None:
    """Loads variants side by side; `announce(count)` is told how many have to be compiled, if any."""
    wanted = list(dict.fromkeys(variants))
    missing = sum((v.id, arch) not in _memory and _read(cache_path(v, arch)) is None for v in wanted)
    if missing:
        announce(missing)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda v: load(v, arch), wanted))
