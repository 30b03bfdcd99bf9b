"""Every kernel on the CPU: the sources as they are, compiled for the host and run by tests/emulator."""

import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import checks
import numpy as np
import pytest
from cases import Case, around, few
from checks import (
    bad_values_stay_in_their_row,
    batch_does_not_change_a_row,
    block_is_its_parts,
    exact_in_integers,
    large_gates_saturate,
    neighbours_do_not_change_a_row,
    one_hot_rows_show_the_weights,
    parts_add_up_in_order,
    permutation_is_the_formula,
    router_bears_bad_logits,
    router_is_the_formula,
    router_sees_small_differences,
    routing_is_a_stable_sort,
    run,
    run_dense,
    run_variant,
    shapes_of,
    subnormal_scales_count,
)
from emulator import Emulator, Fault, build_all
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import array
from sketches import Sketch, outcomes

from mlx_moe_fast import device, envs, jit, ops, selftest, variants
from mlx_moe_fast.dispatch import Choice
from mlx_moe_fast.problem import Quantization
from mlx_moe_fast.variants import EXPERT_STRIP, TILES, WARPS, WGMMA, Decode, Prefill

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from record_outputs import EXACT, outputs, record, recorded_variants  # noqa: E402

ROUTES = [variants.route(bits) for bits in variants.BITS]
LOGITS = tuple(ops.NUMBERS)
ROUTERS = [variants.router(dtype) for dtype in LOGITS]
PREFILLS = [v for v in variants.all_variants() if isinstance(v, Prefill)]
DECODES = [v for v in variants.all_variants() if isinstance(v, Decode)]
PLAIN64 = [v for v in PREFILLS if not v.glu and v.quantization.group_size == 64]
DECODE64 = [v for v in DECODES if v.quantization.group_size == 64]
ONE_OF_EACH = (TILES[16], WGMMA)  # kernel
# One of each width, form and tile, the group sizes and dtypes in turn: what the schedule and the sanitizers look at.
SAMPLE = [
    v
    for v in PREFILLS
    if (v.quantization.group_size, v.dtype)
    == {16: (32, "bf16"), 32: (64, "fp16"), 64: (128, "bf16"), 128: (64, "bf16")}[v.tile.m]
]


def by_id(variant: variants.Variant) -> str:
    return variant.id


@pytest.fixture(scope="module", autouse=True)
def programs():
    build_all([*ROUTES, *ROUTERS, *PREFILLS, *DECODES], jit.sources(), sanitize=False)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """So few that blocks which share the work have several units of it."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 2)


@pytest.fixture
def emulator(monkeypatch):
    emulator = Emulator()
    monkeypatch.setattr(ops, "launch", emulator.launch)
    return emulator


@pytest.mark.parametrize("variant", PREFILLS + DECODES, ids=by_id)
def test_variant(emulator, variant):
    run_variant(variant)
    taken = sum(c["shared_wavefronts"] for name, c in emulator.counters if name == variant.id)
    least = sum(c["shared_least"] for name, c in emulator.counters if name == variant.id)
    # No bank conflicts, as kernels/README.md says, but where four groups of scales meet GLU's order of rows; in decode
    # where a part of K ends, where sums are read (GLU: at rows 32 words apart) and, with two groups a span, where its
    # halves and their scales are written.
    narrow = variant.quantization == Quantization(4, 32)
    if isinstance(variant, Decode):
        most = {"glu": (1.2, 1.38)}.get(variant.kind, (1.1, 1.3))[narrow]
    else:
        most = 1.1 if variant.glu and narrow else 1
    assert 0 < least <= taken <= most * least


@pytest.mark.parametrize("variant", SAMPLE, ids=by_id)
def test_schedule_and_copies_change_no_bit(monkeypatch, variant):
    """Warps in another order, blocks too, and asynchronous copies that land at once: a race would show."""
    for case in around(variant.tile.m, variant.quantization, variant.dtype)[4:8]:
        results = []
        for seed, late in ((0, True), (1, True), (2, False), (3, False)):
            monkeypatch.setattr(ops, "launch", Emulator(seed, late).launch)
            results.append(array(run(case, variant.glu, variant.tile)))
        assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("variant", [v for v in DECODE64 if v.dtype == "bf16"], ids=by_id)
def test_schedule_changes_no_bit_of_decode(monkeypatch, variant):
    results = []
    for seed, late in ((0, True), (1, True), (2, False), (3, False)):
        monkeypatch.setattr(ops, "launch", Emulator(seed, late).launch)
        outs = []
        for shape in shapes_of(variant):
            if variant.kind == "dense":
                outs += run_dense(variant, shape)
            else:
                cases = around(variant.strip.columns, variant.quantization, variant.dtype)[4:7]
                outs += [run(case, variant.kind == "glu", shape) for case in cases]
        results.append([array(out) for out in outs])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", LOGITS)
def test_router(emulator, dtype):
    for name in checks.ROUTERS:
        router_is_the_formula(dtype, name)
    router_bears_bad_logits(dtype)
    router_sees_small_differences()


@pytest.mark.parametrize("variant", [*ROUTES, *ROUTERS, *SAMPLE, *DECODES[::3]], ids=by_id)
def test_the_selftest_passes(emulator, variant):
    assert selftest._wrong(variant) is None


@pytest.mark.parametrize("bits_down", [None, 8])
@pytest.mark.parametrize("quantization, dtype", [(Quantization(4, 64), "bf16"), (Quantization(4, 32), "fp16")])
def test_block(monkeypatch, quantization, dtype, bits_down):
    for seed in (0, 1):  # another block is the last of its strip
        monkeypatch.setattr(ops, "launch", Emulator(seed).launch)
        block_is_its_parts(quantization, dtype, bits_down)


@pytest.mark.parametrize("dtype", variants.DTYPES)
def test_batch_does_not_change_a_row(emulator, dtype):
    batch_does_not_change_a_row(dtype)


@pytest.mark.parametrize("variant", [v for v in DECODE64 if v.kind == "dense"], ids=by_id)
def test_parts_add_up_in_order(emulator, variant):
    parts_add_up_in_order(variant)


@pytest.mark.parametrize("kind", ["plain", "glu"])
def test_an_expert_of_many_rows_is_read_once(emulator, kind):
    """As many blocks as rows do no more than a block for each expert: one of them has the expert's rows."""
    variant = next(v for v in DECODE64 if v.kind == kind)
    for split in (1, WARPS):
        counts = []
        for experts in (12, 2):
            case = Case(11, 1, 64, 64, experts, variant.quantization, variant.dtype, ids="one")
            run(case, kind == "glu", Choice(variant.strip, split, "forced"))
            counts.append([c["mma"] for _, c in emulator.counters])
            emulator.counters.clear()
        assert counts[0] == counts[1]


@pytest.mark.parametrize("variant", [v for v in DECODE64 if v.dtype == "fp16"], ids=by_id)
def test_x_may_begin_anywhere(monkeypatch, variant):
    """A row-contiguous slice of an array begins at any of its elements."""
    monkeypatch.setattr(ops, "launch", Emulator(skip=2).launch)
    for shape in shapes_of(variant):
        if variant.kind == "dense":
            run_dense(variant, shape)
        else:
            for case in around(variant.strip.columns, variant.quantization, variant.dtype)[4:7]:
                run(case, variant.kind == "glu", shape)


def test_sanitizers(monkeypatch):
    """No access outside a buffer, no undefined arithmetic: exact-sized buffers under ASan and UBSan."""
    decodes = [v for v in DECODES if (v.quantization.group_size, v.dtype) in ((32, "bf16"), (128, "fp16"))]
    build_all([*ROUTES, *ROUTERS, *SAMPLE, *decodes], jit.sources(), sanitize=True)
    monkeypatch.setattr(ops, "launch", Emulator(sanitize=True).launch)
    for name, dtype in zip(checks.ROUTERS, itertools.cycle(LOGITS), strict=False):
        router_is_the_formula(dtype, name)
    for variant in SAMPLE:
        cases = around(variant.tile.m, variant.quantization, variant.dtype)
        for case in (cases[2], cases[6]):  # tails in N and K; ids out of range and a bias
            run(case, variant.glu, variant.tile)
    for variant in decodes:
        for shape in shapes_of(variant):
            if variant.kind == "dense":
                run_dense(variant, shape)
            else:
                cases = around(variant.strip.columns, variant.quantization, variant.dtype)
                for case in (cases[2], cases[6], few(variant.quantization, variant.dtype)[1]):
                    run(case, variant.kind == "glu", shape)


PLAIN64 += [v for v in DECODE64 if v.kind != "glu"]


@pytest.mark.parametrize("variant", PLAIN64, ids=by_id)
def test_exact_in_integers(emulator, variant):
    exact_in_integers(variant)


@pytest.mark.parametrize("variant", PLAIN64, ids=by_id)
def test_one_hot_rows(emulator, variant):
    one_hot_rows_show_the_weights(variant)


@pytest.mark.parametrize("variant", [v for v in PLAIN64 if isinstance(v, Decode) or v.tile in ONE_OF_EACH], ids=by_id)
def test_subnormal_scales(emulator, variant):
    subnormal_scales_count(variant)


SOME_GLU = [v for v in PREFILLS if v.glu and v.tile in ONE_OF_EACH] + [v for v in DECODES if v.kind == "glu"]


@pytest.mark.parametrize("variant", SOME_GLU, ids=by_id)
def test_large_gates(emulator, variant):
    large_gates_saturate(variant)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_stay_in_their_row(emulator, bad):
    for shape in (*ONE_OF_EACH, Choice(EXPERT_STRIP, 1, "forced")):
        bad_values_stay_in_their_row(bad, shape)


@pytest.mark.parametrize("tile", [*TILES.values(), WGMMA], ids=lambda t: f"{t.kernel}_m{t.m}")
def test_neighbours_do_not_change_a_row(emulator, tile):
    neighbours_do_not_change_a_row(tile)


@pytest.mark.parametrize("kind", ["duplicates", "one", "sorted", "bad"])
@pytest.mark.parametrize("rows", [1, 31, 511, 513, 4096, 9000])  # 9000: more ids a warp, and tiles, than one batch
def test_routing(emulator, rows, kind):
    for tile in TILES.values():
        routing_is_a_stable_sort(rows, tile, kind, experts=7)


@pytest.mark.parametrize("bits", variants.BITS)
@pytest.mark.parametrize("k", [32, 96, 128, 160, 2880])
def test_permutation(emulator, bits, k):
    permutation_is_the_formula(bits, k)


@pytest.mark.parametrize("down", [Quantization(8, 64), Quantization(4, 32)], ids=str)
@pytest.mark.parametrize("first", [Quantization(4, 64), Quantization(8, 64)], ids=str)
def test_down_projection_with_other_bits(emulator, first, down):
    for features in (64, 192):
        run(Case(20, 2, 128, features, 4, first, down=down), glu=True)


# ---- the emulator against hardware -----------------------------------------------------------------------------------


def numbers(bits: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit floats, given as integers."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def steps_apart(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """How many of their last places numbers are apart. Where the terms of a sum cancel, the rest has their rounding:
    numbers below an eighth of the root mean square are taken as if they were that large."""
    size = np.maximum(np.abs(a), np.sqrt(np.mean(a**2)) / 8)
    return np.abs(a - b) / 2.0 ** (np.floor(np.log2(size)) - (10 if dtype == "fp16" else 7))


def compare(variant: Prefill | Decode, recorded: Mapping[str, np.ndarray]) -> None:
    """Hardware rounds inside an MMA in its own way, so a 16-bit result may be a step off, and few are: more where
    decode multiplies four bits as 1024 + q, ten bits above what fp16 keeps. Sums of integers are exact."""
    values, routes = outputs(variant)
    large = isinstance(variant, Decode) and (variant.quantization.bits, variant.dtype) == (4, "fp16")
    for key, out in values.items():
        if key.endswith(f"/{EXACT}"):
            np.testing.assert_array_equal(out, recorded[key], key)
        else:
            steps = steps_apart(*(numbers(bits, variant.dtype) for bits in (out, recorded[key])), variant.dtype)
            assert steps.max() <= 1.5, key
            assert (out != recorded[key]).mean() <= (0.25 if large else 0.03), key
    known = json.loads(str(recorded["routes"]))
    assert {key: known[key] for key in routes} == routes


@pytest.mark.parametrize("variant", recorded_variants(), ids=by_id)
def test_outputs_are_those_of_an_h200(emulator, variant):
    recorded = np.load(ROOT / "tests" / "data" / "h200.npz")
    kernel = re.match("decode|prefill_sm[0-9]+", variant.id)[0]
    if not any(key.startswith(kernel) for key in recorded.files):
        pytest.skip(f"tests/data/h200.npz was recorded without {kernel}: run scripts/record_outputs.py h200 on one")
    compare(variant, recorded)


def test_a_recording_holds_all_that_is_compared(emulator, tmp_path):
    """The script, but for the card: every variant's outputs under the names that the test above looks for, and a
    difference of one integer result or of many steps is found."""
    count = record(tmp_path / "card.npz", {"device": "emulator"})
    recorded = dict(np.load(tmp_path / "card.npz"))
    assert len(recorded) == count + 2
    assert {key.split("/")[0] for key in recorded} - {"about", "routes"} == {v.id for v in recorded_variants()}
    assert sum(a.nbytes for a in recorded.values()) < 450_000
    variant = next(v for v in recorded_variants() if isinstance(v, Decode) and v.kind == "plain")
    compare(variant, recorded)
    for key, step in ((f"{variant.id}/{EXACT}", 1), (f"{variant.id}/1", 4)):
        wrong = recorded[key].copy()
        wrong.flat[np.argmax(wrong & 0x7FFF)] ^= step  # of the largest
        with pytest.raises(AssertionError, match=key):
            compare(variant, {**recorded, key: wrong})


# ---- problems that nobody thought of ---------------------------------------------------------------------------------


@st.composite
def problems(draw) -> Case:
    quantization = Quantization(draw(st.sampled_from(variants.BITS)), draw(st.sampled_from(variants.GROUP_SIZES)))
    group = quantization.group_size
    experts = draw(st.integers(1, 9))
    return Case(
        draw(st.integers(1, 70)),
        draw(st.integers(1, 3)),
        group * draw(st.integers(1, 320 // group)),
        group * draw(st.integers(1, 320 // group)),
        experts,
        quantization,
        draw(st.sampled_from(variants.DTYPES)),
        draw(st.booleans()),
        draw(st.sampled_from(["duplicates", "one", "sorted", "bad"])),
        seed=draw(st.integers(0, 99)),
    )


def run_both(case: Case) -> None:
    """A case as its shape is dispatched; a failure names the command that repeats it."""
    try:
        run(case, glu=False)
        run(case, glu=True)
    except AssertionError as error:
        problem = json.dumps(asdict(case))
        raise AssertionError(
            f"{error}\nrepeat: {envs.TILE.name}={envs.TILE.get()} CASE='{problem}' "
            "python -m pytest tests/test_emulator.py -k a_given_case"
        ) from error


@pytest.mark.parametrize("tile", ["", "wgmma"])
@settings(max_examples=40, deadline=None)
@given(case=problems())
def test_any_problem(tile, case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "launch", Emulator().launch)
        patch.setenv(envs.TILE.name, tile)
        run_both(case)


def test_a_given_case(emulator):
    """The problem in the variable CASE, as a failure prints it."""
    given_case = json.loads(os.environ.get("CASE", "null")) or asdict(Case(5, 2, 64, 64, 3, Quantization(4, 64)))
    quantizations = {
        name: q and Quantization(**q) for name, q in given_case.items() if name in ("quantization", "down")
    }
    run_both(replace(Case(**{**given_case, **quantizations})))


def test_counters_of_the_page():
    kernel_counters = importlib.import_module("kernel_counters")
    page = kernel_counters.PAGE.read_text()
    assert kernel_counters.BLOCK.search(page) and kernel_counters.table() in page


# ---- the emulator itself ---------------------------------------------------------------------------------------------


def test_host_and_device_wrappers_are_the_same():
    """Every wrapper of kernels/ptx*.cuh has its host twin, with the same result and arguments."""

    def signatures(path: Path) -> set[str]:
        found = re.findall(r"^(DEVICE [^;{]*?\))\s*\{", path.read_text(), re.M | re.S)
        return {re.sub(r"\s+", " ", s) for s in found}

    for file in (ROOT / "kernels").glob("ptx*.cuh"):
        device, host = signatures(file), signatures(ROOT / "tests" / "emulator" / file.name)
        assert len(device) > 15 and device <= host


FAULTS = {
    "a read past the end of a buffer": ("out[t] = in[n + t];", "heap-buffer-overflow"),
    "a write before the start": ("if (t == 0) out[-1] = 1;", "heap-buffer-overflow"),
    "a write past the end": ("if (t == 0) out[n] = 1;", "heap-buffer-overflow"),
    "overflow of an offset": ("out[t] = static_cast<u16>((n << 24) * (n + 1) / 3);", "signed integer overflow"),
    "shared memory never written": (
        "out[t] = ptx::lds32(t * 4);",
        "were never written|was never written|never written",
    ),
    "shared memory past the end": ("ptx::sts32(1024 + t * 4, 1);", "shared memory ends at 1024"),
    "misaligned shared memory": ("ptx::sts64(4, make_uint2(1, 2));", "misaligned"),
    "misaligned access to global memory": ("ptx::load(reinterpret_cast<const u32*>(in + 1));", "misaligned"),
    "misaligned copy": ("ptx::cp_async16(0, in + 1);", "misaligned"),
    "lanes that read what another wrote": (
        "ptx::sts32(t * 4, t); __ballot_sync(0xFFFFFFFFu, true); out[t] = static_cast<u16>(ptx::lds32((t ^ 1) * 4));",
        "no __syncwarp since thread",
    ),
    "lanes that write what another read": (
        "ptx::sts32(t * 4, t); __syncwarp(); out[t] = static_cast<u16>(ptx::lds32((t ^ 1) * 4));\n"
        "__ballot_sync(0xFFFFFFFFu, true); ptx::sts32(t * 4, 0);",
        "no __syncwarp since thread",
    ),
    "copies to one place at once": ("ptx::cp_async16(t * 16, in); ptx::cp_async16(t * 16, in);", "is under way"),
    "a barrier that not all reach": (
        "if (t < 32) ptx::movmatrix_trans(t); else if (t < 40) ptx::movmatrix_trans(t);",
        "never come",
    ),
    "lanes in different operations": (
        "if (t % 2) ptx::movmatrix_trans(t); else __ballot_sync(0xFFFFFFFFu, true);",
        "while other lanes are at",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    body, message = FAULTS[name]
    sketch = Sketch(body)
    emulator = Emulator(sanitize=True, sources=sketch.sources)
    data = ops.mx.zeros((64,), ops.mx.bfloat16)
    with pytest.raises(Fault, match=message) as raised:
        emulator.launch(sketch, [data], [((64,), ops.mx.bfloat16)], [64], blocks=1)
    assert re.search(r"sketch: block 0, thread \d+", str(raised.value))


RACES = {
    # Each thread reads what a thread of the other warp has written.
    "a missing barrier": "ptx::sts32(t * 4, t);\n{}out[t] = static_cast<u16>(ptx::lds32((t ^ 32) * 4));",
    # A copy is there when the wait for it has returned, and for others after a barrier besides.
    "a missing wait": (
        "ptx::sts32(512 + t * 4, 0); __syncthreads();\n"
        "if (t < 8) ptx::cp_async16(512 + t * 16, in + t * 8);\nptx::cp_async_commit();\n"
        "{}out[t] = static_cast<u16>(ptx::lds32(512 + t / 2 * 4) >> (t % 2 * 16));"
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_races_change_results(name):
    """With its barrier or wait a sketch gives the same bits whatever the schedule; without, it does not."""
    data = ops.mx.array(np.arange(1, 65, dtype=np.float32)).astype(ops.mx.bfloat16)
    guard = {"a missing barrier": "__syncthreads();\n", "a missing wait": "ptx::cp_async_wait<0>(); __syncthreads();\n"}

    def found(body: str) -> set[str]:
        return outcomes(Sketch(body), [data], ((64,), ops.mx.bfloat16), 64)

    right = found(RACES[name].format(guard[name]))
    assert len(right) == 1 and "sketch" not in next(iter(right))
    assert len(found(RACES[name].format("")) | right) > 1
