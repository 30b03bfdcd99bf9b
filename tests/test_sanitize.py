"""scripts/sanitize.py without a GPU: CuPy's part is played by the emulator, compute-sanitizer's by a shell script."""

import importlib.util
import json
import os
import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moe_fast import ops, variants
from mlx_moe_fast.problem import Device
from mlx_moe_fast.variants import Prefill

ROOT = Path(__file__).resolve().parents[1]
PLAIN, GLU = "prefill_sm80_plain_affine4g32_bf16_m16", "prefill_sm80_glu_affine8g64_fp16_m32"

# All of CuPy that a child needs; arrays are NumPy's, kernels run in the emulator.
CUPY = """
import os
from pathlib import Path
from types import SimpleNamespace
import mlx.core as mx, numpy as np
from emulator import Emulator
from mlx_moe_fast.variants import all_variants
from numpy import asarray, empty

mx.set_default_device(mx.cpu)
MLX = {"uint16": mx.bfloat16, "float32": mx.float32, "int32": mx.int32, "uint32": mx.uint32, "uint64": mx.uint64}
cuda = SimpleNamespace(set_allocator=lambda allocator: None)
asnumpy = np.copy

def RawModule(path):
    assert Path(path).read_bytes()[:4] == b"\\x7fELF"
    return SimpleNamespace(get_function=Kernel)

class Kernel:
    def __init__(self, name):
        self.variant = next(v for v in all_variants() if v.id == name)

    def __call__(self, grid, block, arguments, shared_mem):
        assert block == (self.variant.threads,) and shared_mem == self.max_dynamic_shared_size_bytes
        if "IDLE" in os.environ:
            return
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        kind = getattr(self.variant, "kind", self.variant.source)
        outputs = arrays[-{"route.cu": 3, "router.cu": 3, "stamp.cu": 2, "plain": 2}.get(kind, 1) :]
        made = Emulator().launch(
            self.variant,
            [mx.array(a).view(MLX[a.dtype.name]) for a in arrays[: -len(outputs)]],
            [(o.shape, MLX[o.dtype.name]) for o in outputs],
            [int(s) for s in arguments[len(arrays) :]],
            *grid,
        )
        for to, array in zip(outputs, made, strict=True):
            to[...] = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "scripts" / "sanitize.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sanitize"]


@pytest.fixture
def sanitize(script, monkeypatch, tmp_path):
    """main(), on a machine with a GPU and a compute-sanitizer that is `body`: a shell script whose arguments are
    --tool TOOL COMMAND..."""
    monkeypatch.setattr(script, "gpu", lambda: Device("No GPU", (8, 0)))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "cupy.py").write_text(CUPY)

    def run(body: str, *arguments: str) -> int:
        tool = tmp_path / "compute-sanitizer"
        path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests")))
        tool.write_text(f"#!/bin/sh\nexport PYTHONPATH={path}\ntool=$2; shift 2\n{body}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        return script.main(arguments)

    return run


CLEAN = '"$@" && echo "========= ERROR SUMMARY: 0 errors"'


@pytest.mark.parametrize("name", [PLAIN, GLU, "route_8bit", "router_bf16", "probe", "stamp"])
def test_clean(sanitize, capsys, name):
    assert sanitize(CLEAN, "--variants", name, "--tools", "memcheck", "initcheck") == 0
    assert capsys.readouterr().out.splitlines() == [
        "| variant | memcheck | initcheck |",
        "| :-- | :-- | :-- |",
        f"| {name} | ok | ok |",
        "",
        "1 variants on No GPU: no finding",
    ]


def test_findings(sanitize, capsys, tmp_path):
    """Only the variant that has them is blamed, by a process of its own."""
    hazard = "========= Error: Race reported between Write access and Read access"
    body = f"""
    "$@"
    case "$tool $*" in
      racecheck*{PLAIN}*) echo "{hazard}"
        echo "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)" ;;
      racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
      *) echo "========= ERROR SUMMARY: 0 errors" ;;
    esac"""
    report = tmp_path / "report.json"
    arguments = ["--variants", "plain_affine4g32_bf16_m1", "--tools", "racecheck", "synccheck", "--json", str(report)]
    assert sanitize(body, *arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"| {PLAIN} | 2 findings | ok |" in lines
    assert f"| {PLAIN.replace('m16', 'm128')} | ok | ok |" in lines
    found = [v for v in json.loads(report.read_text())["verdicts"] if v["outcome"] != "ok"]
    assert [(v["variant"], v["tool"]) for v in found] == [(PLAIN, "racecheck")]
    assert hazard in found[0]["log"]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("exit 1", "failed to run"),
        ('echo "========= ERROR SUMMARY: 0 errors"', "failed to run"),  # no child
        ('"$@"', "failed to run"),  # no summary
        (f"{CLEAN}; exit 3", "failed to run"),
        (f"echo '========= Internal Sanitizer Error: out of memory'; {CLEAN}", "failed to run"),
        (f"export IDLE=1; {CLEAN}", "wrong result"),
        ("sleep 60", "failed to run"),
    ],
)
def test_not_clean(sanitize, script, capsys, monkeypatch, body, outcome):
    monkeypatch.setattr(script, "TIMEOUT", 1 if "sleep" in body else 60)
    assert sanitize(body, "--variants", "probe", "--tools", "memcheck") == 1
    out, err = capsys.readouterr()
    assert f"| probe | {outcome} |" in out
    assert ("stopped after 1 s" in err) == ("sleep" in body)


@pytest.mark.parametrize("name", [PLAIN, GLU, "route_4bit"])
def test_launches_that_do_nothing_are_noticed(sanitize, capsys, name):
    assert sanitize(f"export IDLE=1; {CLEAN}", "--variants", name, "--tools", "memcheck") == 1
    assert f"| {name} | wrong result |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "count"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        (
            "========= ERROR SUMMARY: 156 errors\n"
            "========= ERROR SUMMARY: 56 errors were not printed. Use --print-limit option to adjust",
            156,
        ),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("noise\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", 1),
        ("========= COMPUTE-SANITIZER\n", None),
    ],
)
def test_summary(script, log, count):
    assert script.findings(log) == count


def test_missing_tool(script, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert script.main([]) == 2
    assert "compute-sanitizer is not on PATH" in capsys.readouterr().err


def test_missing_gpu(sanitize, script, monkeypatch, capsys):
    def none():
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(script, "gpu", none)
    assert sanitize("exit 0") == 2
    assert "no NVIDIA GPU that CuPy can use: cudaErrorNoDevice" in capsys.readouterr().err


def test_unknown_variant(sanitize, capsys):
    with pytest.raises(SystemExit) as error:
        sanitize("exit 0", "--variants", "m17")
    assert error.value.code == 2 and "'m17'" in capsys.readouterr().err


def recorded(into: list):
    """A launch that computes nothing; keeps variant, (shape, bytes) of all arrays in order, scalars and blocks."""

    def launch(variant, inputs, outputs, scalars, blocks, contiguous=False):
        results = [mx.zeros(shape, dtype) for shape, dtype in outputs]
        into.append((variant.id, [(a.shape, a.nbytes) for a in [*inputs, *results]], scalars, blocks))
        return results

    return launch


class Recorder:
    """CuPy without a GPU: notes what kernels are called with."""

    cuda = SimpleNamespace(set_allocator=lambda allocator: None)
    asarray, empty, asnumpy = np.asarray, np.empty, staticmethod(np.copy)

    def __init__(self):
        self.calls = []

    def RawModule(self, path):
        return SimpleNamespace(get_function=lambda name: Function(name, self.calls))


class Function:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __call__(self, grid, block, arguments, shared_mem):
        arrays = [(a.shape, a.nbytes) for a in arguments if isinstance(a, np.ndarray)]
        scalars = arguments[len(arrays) :]
        assert all(type(s) is np.int32 for s in scalars), "pointers come first, then 32-bit integers"
        self.calls.append((self.name, arrays, list(map(int, scalars)), *grid))


@pytest.mark.parametrize("variant", [v for v in variants.all_variants() if isinstance(v, Prefill)], ids=lambda v: v.id)
def test_child_launches_as_the_package_does(script, monkeypatch, tmp_path, variant):
    cupy, ours = Recorder(), []
    card = script.Card(cupy, tmp_path, poison=True)
    for case, problem in zip(script.cases(variant), script.problems(variant), strict=True):
        monkeypatch.setattr(ops, "launch", recorded(ours))
        x, ids, gate, up, down = case.arrays()
        if variant.glu:
            ops.moe_glu(x, ids.flatten(), gate, up, down, variant.tile)
        else:
            ops.grouped_qmm(x, ids.flatten(), gate, variant.tile)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "launch", card.launch)
            patch.setattr(mx, "array", None)  # the child makes none
            card.solve(problem.call, problem.arguments)
    assert cupy.calls == ours
    assert {name for name, *_ in cupy.calls} == {v.id for v in script.launched(variant)}
