"""What an installed mlx_moe_fast consists of. Both archives are built, the wheel from the sdist."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mlx_moe_fast

ROOT = Path(__file__).parents[1]
KERNELS = [*ROOT.glob("kernels/*.cu"), *ROOT.glob("kernels/*.cuh")]

pytestmark = pytest.mark.skipif(not KERNELS, reason="kernels/ is not beside tests/: not a checkout")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packaging")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "checkout", ignore=ignored)  # a build leaves files in its source tree
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "../dist"]
    subprocess.run(command, cwd=folder / "checkout", check=True)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(archives):
    (path,) = archives.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def text(wheel, file):
    return wheel.read(f"mlx_moe_fast-{mlx_moe_fast.__version__}.dist-info/{file}").decode()


def test_wheel_has_every_kernel_file(wheel):
    packed = {name: wheel.read(name) for name in wheel.namelist() if name.startswith("mlx_moe_fast/kernels/")}
    assert packed == {f"mlx_moe_fast/kernels/{path.name}": path.read_bytes() for path in KERNELS}


def test_wheel_has_the_whole_package(wheel):
    package = ROOT / "mlx_moe_fast"
    expected = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    assert expected | {"mlx_moe_fast/py.typed"} <= set(wheel.namelist())
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"mlx_moe_fast"}


def test_wheel_metadata(wheel):
    assert text(wheel, "entry_points.txt").split() == [
        *("[console_scripts]", "mlx_moe_fast", "=", "mlx_moe_fast.cli:main"),
        *("mlx_moe_fast.generate", "=", "mlx_moe_fast.cli:generate_main"),
    ]
    metadata = text(wheel, "METADATA")
    assert "License-Expression: MIT" in metadata and "License-File: LICENSE" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert all("extra ==" in line for line in required if "cu" in line), "a bare install is free of CUDA"


def test_wheel_alone_finds_its_kernels(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import mlx_moe_fast as m, mlx_moe_fast.jit as j; print(m.__file__); print(*sorted(j.sources()))"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=env, text=True)
    file, names = out.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert names.split() == sorted(path.name for path in KERNELS)


def test_sdist_has_kernels_tests_and_scripts(archives):
    (path,) = archives.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    sources = [*KERNELS, *ROOT.glob("tests/*.py"), *ROOT.glob("scripts/*.py"), ROOT / "CHANGELOG.md"]
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= packed
