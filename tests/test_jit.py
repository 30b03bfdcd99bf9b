"""Compiling and caching kernels. The route kernel stands for all: it compiles fastest."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mlx_moe_fast import envs, jit
from mlx_moe_fast.errors import KernelBuildError
from mlx_moe_fast.problem import Quantization
from mlx_moe_fast.variants import TILES, Prefill, Route

ARCH = "sm_80"
ROUTE = Route(4)
PREFILL = Prefill(Quantization(4, 64), "bf16", False, TILES[16])


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty cache folder, no kernel in memory, and CuPy's own files kept out of both."""
    monkeypatch.setenv(envs.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupy"))
    monkeypatch.setattr(jit, "_memory", {})
    jit.cache_dir.cache_clear()
    yield tmp_path / "cache"
    jit.cache_dir.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """Ids of the variants that are compiled: by a stand-in, which is told apart by its number."""
    ids = []

    def compile(variant, arch):
        ids.append(variant.id)
        return b"cubin %d" % len(ids), jit.Resources(32, 0)

    monkeypatch.setattr(jit, "compile", compile)
    return ids


def forget(monkeypatch):
    """As in a new process: only what is on disk remains."""
    monkeypatch.setattr(jit, "_memory", {})


def python(code, **environment):
    """Starts a Python process."""
    env = {k: v for k, v in os.environ.items() if k not in environment}
    env |= {k: str(v) for k, v in environment.items() if v is not None}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


IMPORTS = "import os, sys; from mlx_moe_fast import jit; from mlx_moe_fast.variants import Route;"
LOAD = "jit.load(Route(4), 'sm_80')"


def test_compile_gives_machine_code_with_the_entry_and_its_resources():
    cubin, resources = jit.compile(ROUTE, ARCH)
    assert cubin.startswith(b"\x7fELF") and b".text.route_4bit\0" in cubin
    assert resources.registers > 0 and resources.spilled_bytes == 0


def test_registers_that_do_not_suffice_are_reported_as_spills():
    crowded = replace(PREFILL, tile=replace(PREFILL.tile, blocks_per_sm=16))  # leaves 32 registers a thread
    _, resources = jit.compile(crowded, ARCH)
    assert resources.registers <= 32 and resources.spilled_bytes > 0


def test_a_second_load_compiles_nothing(folder, compiled, monkeypatch):
    first = jit.load(ROUTE, ARCH)
    assert jit.load(ROUTE, ARCH) is first
    forget(monkeypatch)
    assert jit.load(ROUTE, ARCH) == first
    assert compiled == [ROUTE.id]
    assert (first.name, first.threads, first.shared_bytes) == (ROUTE.id, ROUTE.threads, ROUTE.shared_bytes)


def test_a_second_process_compiles_nothing(folder):
    cubin = jit.load(ROUTE, ARCH).cubin
    code = f"{IMPORTS} jit.compile = None; k = {LOAD}; print('cupy' in sys.modules, k.cubin.hex())"
    assert output(python(code, **{envs.CACHE_DIR.name: folder})) == f"False {cubin.hex()}"


def test_the_key_does_not_depend_on_the_process(folder):
    # A random hash seed shows whatever order of a set or dict went into the key.
    code = f"{IMPORTS} print(jit.cache_path(Route(4), 'sm_80'))"
    seeds = [python(code, PYTHONHASHSEED=seed, **{envs.CACHE_DIR.name: folder}) for seed in (1, 2)]
    assert {output(process) for process in seeds} == {str(jit.cache_path(ROUTE, ARCH))}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[1:],
        lambda content: content[: jit.DIGEST_BYTES],  # no code, and a digest that is none
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
    ids=["empty", "short", "late", "digest", "bit of the code", "bit of the digest"],
)
def test_a_damaged_entry_is_compiled_again_and_mended(folder, compiled, monkeypatch, damage):
    jit.load(ROUTE, ARCH)
    (entry,) = folder.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    forget(monkeypatch)
    assert jit.load(ROUTE, ARCH).cubin == b"cubin 2"
    forget(monkeypatch)
    assert jit.load(ROUTE, ARCH).cubin == b"cubin 2"
    assert len(compiled) == 2


def test_the_key_covers_whatever_the_machine_code_depends_on(folder, monkeypatch):
    def key(variant=ROUTE, arch=ARCH):
        return jit.cache_path(variant, arch)

    keys = [key(), key(arch="sm_90a"), key(PREFILL)]
    text = jit.sources() | {"ptx.cuh": jit.sources()["ptx.cuh"] + "\n"}  # a file that is only included
    for change in (
        ("sources", lambda: text),
        ("options", lambda variant, arch, of=jit.options: of(variant, arch) + ["-DX"]),
        ("compiler", lambda: "cupy-cuda13x 99.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(jit, *change)
            keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_text_that_moves_from_one_source_to_another_is_another_key(folder, monkeypatch):
    keys = set()
    # To the next file, with the name of the file, into one file.
    for texts in ({"a.cu": "x", "b.cu": ""}, {"a.cu": "", "b.cu": "x"}, {"a.cu": "x", "c.cu": ""}, {"a.cu": "x"}):
        monkeypatch.setattr(jit, "sources", lambda texts=texts: texts)
        keys.add(jit.cache_path(ROUTE, ARCH))
    assert len(keys) == 4


def test_the_folder_is_private_and_holds_entries_only(folder, compiled):
    jit.load(ROUTE, ARCH)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [f.suffix for f in folder.iterdir()] == [".cubin"]


@pytest.fixture
def places(monkeypatch, tmp_path):
    """The three candidates for a cache folder, in order; `block` makes one unusable, for root as well."""
    roots = [tmp_path / name for name in ("configured", "user", "temporary")]
    monkeypatch.setenv(envs.CACHE_DIR.name, str(roots[0] / "here"))
    monkeypatch.setattr(jit.platformdirs, "user_cache_dir", lambda name: str(roots[1] / name))
    monkeypatch.setattr(tempfile, "tempdir", str(roots[2]))
    return roots


def block(root):
    root.write_text("a file, in which no folder can be made")


def test_the_configured_folder_comes_first(places):
    assert jit.cache_dir() == places[0] / "here"


def test_without_one_it_is_the_users(places, monkeypatch):
    monkeypatch.delenv(envs.CACHE_DIR.name)
    assert jit.cache_dir() == places[1] / "mlx-moe-fast"


def test_a_folder_that_cannot_be_written_gives_way_to_the_next(places):
    block(places[0])
    assert jit.cache_dir() == places[1] / "mlx-moe-fast"


def test_the_last_resort_is_the_users_own_temporary_folder(places):
    block(places[0])
    block(places[1])
    assert jit.cache_dir() == places[2] / f"mlx-moe-fast-{os.getuid()}"
    assert jit.cache_dir().stat().st_mode & 0o777 == 0o700


def test_with_no_folder_at_all_kernels_live_in_memory_after_one_warning(places, compiled, caplog):
    for place in places:
        block(place)
    first = jit.load(ROUTE, ARCH)
    assert jit.load(ROUTE, ARCH) is first and compiled == [ROUTE.id]
    assert jit.cache_path(ROUTE, ARCH) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def full(*args):
    raise OSError("No space left on device")


def test_a_cache_that_fills_up_costs_a_warning_and_no_kernel(folder, compiled, monkeypatch, caplog):
    monkeypatch.setattr(os, "replace", full)
    assert jit.load(ROUTE, ARCH).cubin == b"cubin 1"
    assert "No space left" in caplog.text


def test_an_entry_that_could_not_be_published_leaves_nothing_behind(folder, compiled, monkeypatch):
    monkeypatch.setattr(os, "replace", full)
    jit.load(ROUTE, ARCH)
    assert list(folder.iterdir()) == []


def test_threads_that_load_at_once_get_one_kernel(folder, monkeypatch):
    monkeypatch.setattr(jit, "compile", lambda variant, arch: (b"cubin", jit.Resources(32, 0)))
    start = threading.Barrier(8)

    def load(_):
        start.wait()
        return jit.load(ROUTE, ARCH)

    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(load, range(8)))
    assert all(kernel is kernels[0] for kernel in kernels)
    assert len(list(folder.iterdir())) == 1


def test_processes_that_load_at_once_share_one_entry(folder):
    code = f"{IMPORTS} print({LOAD}.cubin.hex())"
    first, second = (python(code, **{envs.CACHE_DIR.name: folder}) for _ in range(2))
    cubin = output(first)
    assert cubin == output(second)
    (entry,) = folder.iterdir()
    assert jit._read(entry).hex() == cubin


def test_prepare_announces_what_it_compiles_and_nothing_else(folder, compiled):
    counts = []
    jit.prepare([ROUTE, PREFILL, ROUTE], ARCH, counts.append)
    assert counts == [2] and sorted(compiled) == sorted([ROUTE.id, PREFILL.id])
    jit.prepare([ROUTE, PREFILL], ARCH, counts.append)
    assert counts == [2]


def test_prepare_passes_a_failure_on(folder, monkeypatch):
    def fail(variant, arch):
        raise KernelBuildError("no")

    monkeypatch.setattr(jit, "compile", fail)
    with pytest.raises(KernelBuildError, match="no"):
        jit.prepare([ROUTE], ARCH)


def test_a_source_that_does_not_compile_names_variant_architecture_compiler_and_error(monkeypatch):
    monkeypatch.setattr(jit, "sources", lambda: {"route.cu": "nonsense;"})
    with pytest.raises(KernelBuildError) as error:
        jit.compile(ROUTE, ARCH)
    for fact in (ROUTE.id, ARCH, jit.compiler(), "route.cu(1)"):
        assert fact in str(error.value)


def test_an_architecture_that_the_compiler_does_not_know_is_a_build_error():
    with pytest.raises(KernelBuildError, match="sm_10"):
        jit.compile(ROUTE, "sm_10")


def test_without_cupy_the_remedy_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    jit.compiler.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", missing)
        with pytest.raises(KernelBuildError) as error:
            jit.load(ROUTE, ARCH)
    assert "mlx-moe-fast[cuda13]" in error.value.hint and "mlx-moe-fast[cuda12]" in error.value.hint
    assert jit.compiler().startswith("cupy-cuda")  # the failure was not remembered


def test_a_cupy_that_cannot_be_imported_is_a_build_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(KernelBuildError, match="CuPy could not be imported"):
        jit.compile(ROUTE, ARCH)


PRINT_CUPY_FOLDER = f"{IMPORTS} jit.compile(Route(4), 'sm_80'); print(os.environ.get('CUPY_CACHE_DIR'))"


def test_cupy_writes_into_our_folder(folder, tmp_path):
    process = python(PRINT_CUPY_FOLDER, HOME=tmp_path, CUPY_CACHE_DIR=None, **{envs.CACHE_DIR.name: folder})
    assert output(process) == str(folder)
    assert not (tmp_path / ".cupy").exists()


def test_cupy_writes_where_the_user_said(folder, tmp_path):
    process = python(PRINT_CUPY_FOLDER, CUPY_CACHE_DIR=tmp_path / "mine", **{envs.CACHE_DIR.name: folder})
    assert output(process) == str(tmp_path / "mine")
