"""How kernels are handed to MLX: bound launches, and machine code that MLX keeps."""

import subprocess

import mlx.core as mx
import pytest

from mlx_moe_fast import device, jit, launch, selftest
from mlx_moe_fast.errors import KernelBuildError
from mlx_moe_fast.jit import Kernel
from mlx_moe_fast.problem import Device
from mlx_moe_fast.variants import Probe, Route

ROUTE = Route(4)
KERNEL = Kernel(ROUTE.id, b"machine code", ROUTE.threads, ROUTE.shared_bytes)


@pytest.fixture
def told(monkeypatch, tmp_path):
    """What MLX is told at each launch, by a GPU that does not exist; its cache is an empty folder."""
    calls = []

    def kernel(**kw):
        calls.append(kw)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(kw["output_shapes"], kw["output_dtypes"], strict=True)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", kernel, raising=False)
    monkeypatch.setattr(device, "current", lambda: Device("a GPU", (9, 0)))
    monkeypatch.setattr(jit, "load", lambda variant, arch: KERNEL)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "ptx"))
    return calls


def run():
    return launch.launch(ROUTE, [mx.zeros(3)], [((2, 3), mx.float32), ((1,), mx.int32)], [1, 2], blocks=5)


def test_a_launch_counts_threads_and_brings_its_code(told):
    first, second = run()
    assert (first.shape, second.dtype) == ((2, 3), mx.int32)
    (call,) = told
    assert (call["name"], call["compiled_source"]) == (ROUTE.id, KERNEL.cubin)
    assert call["grid"] == (5 * ROUTE.threads, 1, 1) and call["threadgroup"] == (ROUTE.threads, 1, 1)
    assert call["shared_memory"] == ROUTE.shared_bytes and list(call["scalars"]) == [1, 2]
    assert call["ensure_row_contiguous"] is False and call["init_value"] is None


def test_a_bound_launch_is_the_same_launch(told):
    run()
    bound = launch.bind(ROUTE, [((2, 3), mx.float32), ((1,), mx.int32)], [1, 2], blocks=5)
    bound(inputs=[mx.zeros(3)]), bound(inputs=[mx.ones(3)])
    first, second, third = ({k: v for k, v in call.items() if k != "inputs"} for call in told)
    assert first == second == third
    assert mx.array_equal(told[2]["inputs"][0], mx.ones(3))


def test_without_a_device_a_launch_says_so(told, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: None)
    with pytest.raises(KernelBuildError, match="no CUDA device"):
        run()


def test_mlx_finds_the_code_in_its_cache_and_keeps_it(told, tmp_path):
    """While the block runs the files are there, named as MLX names a module without code; then launches are short."""
    with launch.handed_over(ROUTE) as tried:
        assert tried
        run()
        name = told[0]["name"]
        assert told[0]["compiled_source"] == b"" and name.startswith(ROUTE.id)
        module = tmp_path / "ptx" / f"{name}_{launch.HASH_OF_NOTHING:x}"
        assert module.with_suffix(".ptx").read_bytes() == KERNEL.cubin
        assert module.with_suffix(".txt").read_text() == f"{name}\t{KERNEL.name}\n"
    assert list((tmp_path / "ptx").iterdir()) == []
    run()
    assert (told[1]["name"], told[1]["compiled_source"]) == (name, b"")


def test_the_name_says_what_the_module_holds(told, monkeypatch):
    names = []
    for code in (b"machine code", b"other machine code", b"machine code"):
        monkeypatch.setattr(jit, "load", lambda variant, arch, code=code: Kernel(ROUTE.id, code, 1, 0))
        launch._loaded.clear()
        with launch.handed_over(ROUTE):
            names.append(launch._loaded[ROUTE.id].name)
    assert names[0] == names[2] != names[1]


def test_code_that_mlx_does_not_take_is_brought_along(told, tmp_path):
    with pytest.raises(RuntimeError, match="invalid image"), launch.handed_over(ROUTE):
        raise RuntimeError("invalid image")
    assert list((tmp_path / "ptx").iterdir()) == []
    run()
    assert (told[0]["name"], told[0]["compiled_source"]) == (ROUTE.id, KERNEL.cubin)


@pytest.mark.parametrize("obstacle", ["a file where the folder should be", "a file of another process"])
def test_where_the_cache_cannot_be_written_nothing_changes(told, tmp_path, obstacle):
    (tmp_path / "ptx").write_text("") if "folder" in obstacle else (tmp_path / "ptx").mkdir()
    if "process" in obstacle:
        with launch.handed_over(ROUTE):
            taken = [path.name for path in (tmp_path / "ptx").iterdir()]
        launch._loaded.clear()
        for name in taken:
            (tmp_path / "ptx" / name).write_text("mine")
    with launch.handed_over(ROUTE) as tried:
        assert not tried
        run()
    assert told[0]["compiled_source"] == KERNEL.cubin
    if "process" in obstacle:
        assert {path.read_text() for path in (tmp_path / "ptx").iterdir()} == {"mine"}


def test_the_default_folder_is_mlx_s(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: str(tmp_path))
    assert launch._cache_of_mlx() == tmp_path / "mlx" / mx.__version__ / "ptx"


def test_the_hash_is_the_standard_library_s(tmp_path):
    source = tmp_path / "hash.cpp"
    source.write_text(
        '#include <cstdio>\n#include <string>\nint main() { printf("%zx", std::hash<std::string>{}("")); }'
    )
    subprocess.run(["g++", "-o", tmp_path / "hash", source], check=True)
    found = subprocess.run([tmp_path / "hash"], check=True, capture_output=True, text=True).stdout
    assert int(found, 16) == launch.HASH_OF_NOTHING


@pytest.mark.parametrize("refuses", [False, True])
def test_the_self_test_hands_kernels_over(told, monkeypatch, refuses):
    """And asks again, with the code, where MLX does not take it so."""
    asked = []

    def wrong(variant):
        asked.append(launch._loaded[variant.id].code)
        if refuses and not asked[-1]:
            raise RuntimeError("invalid image")
        return None

    monkeypatch.setattr(selftest, "_wrong", wrong)
    monkeypatch.setattr(selftest, "_passed", set())
    selftest.run([ROUTE, Probe(), ROUTE])
    assert asked == ([b"", KERNEL.cubin] if refuses else [b""])
    assert launch._loaded[ROUTE.id].code == (KERNEL.cubin if refuses else b"")
