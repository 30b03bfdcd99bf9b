"""Every wrapper of kernels/ptx_sm90.cuh in a small kernel: compiled, and run by the emulator and on a card."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from emulator import Emulator, Fault
from numerics import array
from sketches import Sketch, outcomes

from mlx_moe_fast import device, jit, launch


@dataclass(frozen=True)
class Example:
    """A sketch, what it is given, and what it has to leave: integers, so that every bit is determined."""

    sketch: Sketch
    inputs: list[mx.array]
    expected: np.ndarray
    n: int = 0

    @property
    def output(self) -> tuple[tuple[int, ...], mx.Dtype]:
        return self.expected.shape, {"f": mx.float32, "i": mx.int32, "u": mx.uint32}[self.expected.dtype.kind]


def words(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 24, shape, dtype=np.uint32)


def example(name: str, body: str, given: np.ndarray, expected: np.ndarray, n: int = 0, **kwargs) -> Example:
    sketch = Sketch(body, id=f"sketch_{name}", parameters="const u32* in, u32* out", header="ptx_sm90.cuh", **kwargs)
    return Example(sketch, [mx.array(given)], expected, n)


# D = A B of [64, 64] and [64, N]: rows of B, 64 elements of K, in pieces as wide as the swizzle.
WGMMA = """
  constexpr u32 kN = {n}, kWidth = {width};
  for (u32 i = t; i < kN * 8; i += 128) {{
    const u32 row = i / 8, byte = i % 8 * 16;
    const u32 offset = byte / kWidth * kN * kWidth + row * kWidth + byte % kWidth;
    ptx::cp_async16(smem + (offset ^ (offset >> 3 & (kWidth - 16))), b + row * 64 + byte / 2);
  }}
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  __syncthreads();

  const u32 row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  u32 a[4][4];
  for (u32 s = 0; s < 4; ++s) {{
    for (u32 i = 0; i < 4; ++i) {{
      const u16* pair = in + (row + i % 2 * 8) * 64 + s * 16 + i / 2 * 8 + column;
      a[s][i] = ptx::load(reinterpret_cast<const u32*>(pair));
    }}
  }}
  float d[kN / 2];
  ptx::wgmma_fence();
#pragma unroll
  for (u32 s = 0; s < 4; ++s) {{
    const ptx::Smem start = smem + s * 32 / kWidth * kN * kWidth + s * 32 % kWidth;
    const u64 descriptor = ptx::wgmma_descriptor(start, ptx::Swizzle::{swizzle}, 8 * kWidth, kN * 16);
    ptx::wgmma_{dtype}<kN>(d, a[s], descriptor, s > 0);
  }}
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(d);
#pragma unroll
  for (u32 i = 0; i < kN / 2; ++i) {{
    ptx::store(out + (row + i / 2 % 2 * 8) * kN + i / 4 * 8 + column + i % 2, d[i]);
  }}
"""


def wgmma(n: int, dtype: str, swizzle: str = "k128") -> Example:
    width = {"k128": 128, "k64": 64, "k32": 32, "kNone": 16}[swizzle]
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-8, 9, (rows, 64)).astype(np.float32) for rows in (64, n))
    sketch = Sketch(
        WGMMA.format(n=n, dtype=dtype, swizzle=swizzle, width=width),
        128,
        n * 128,
        f"sketch_wgmma_{n}_{dtype}_{swizzle}",
        "const u16* in, const u16* b, float* out",
        "ptx_sm90.cuh",
    )
    kind = {"bf16": mx.bfloat16, "fp16": mx.float16}[dtype]
    return Example(sketch, [mx.array(a).astype(kind), mx.array(b).astype(kind)], a @ b.T)


# Warp 0 copies, two stages ahead of the two warps that read.
BULK = """
  const ptx::Smem full = smem + 2048, empty = smem + 2064;
  if (t == 0) {
    for (u32 s = 0; s < 2; ++s) ptx::mbarrier_init(full + 8 * s, 1), ptx::mbarrier_init(empty + 8 * s, 64);
    ptx::fence_proxy_async();
  }
  __syncthreads();
  for (int i = 0; i < n && (t == 0 || t >= 32); ++i) {
    const u32 s = i % 2, parity = i / 2 % 2;
    if (t == 0) {
      ptx::mbarrier_wait(empty + 8 * s, parity ^ 1);
      ptx::mbarrier_arrive_expect(full + 8 * s, 1024);
      ptx::cp_async_bulk(smem + s * 1024, in + i * 256, 1024, full + 8 * s);
    } else {
      ptx::mbarrier_wait(full + 8 * s, parity);
      const uint4 v = ptx::lds128(smem + s * 1024 + (t - 32) * 16);
      ptx::mbarrier_arrive(empty + 8 * s);
      ptx::store(out + i * 64 + t - 32, v.x + v.y + v.z + v.w);
    }
  }
"""

# The same with copies of 16 bytes, which arrive by themselves.
COPIES = """
  const ptx::Smem full = smem + 1024, empty = smem + 1040;
  if (t == 0) {
    for (u32 s = 0; s < 2; ++s) ptx::mbarrier_init(full + 8 * s, 32), ptx::mbarrier_init(empty + 8 * s, 32);
  }
  __syncthreads();
  for (int i = 0; i < n; ++i) {
    const u32 s = i % 2, parity = i / 2 % 2;
    if (t < 32) {
      ptx::mbarrier_wait(empty + 8 * s, parity ^ 1);
      ptx::cp_async16(smem + s * 512 + t * 16, in + i * 128 + t * 4);
      ptx::cp_async_arrive(full + 8 * s);
    } else {
      ptx::mbarrier_wait(full + 8 * s, parity);
      const uint4 v = ptx::lds128(smem + s * 512 + (t ^ 63) * 16);
      ptx::mbarrier_arrive(empty + 8 * s);
      ptx::store(out + i * 32 + (t ^ 63), v.x + v.y + v.z + v.w);
    }
  }
"""

BARRIERS = """
  for (int i = 0; i < n; ++i) {
    if (t < 32) {
      if (i > 0) ptx::bar_sync(2, 64);
      ptx::sts32(smem + t * 4, ptx::load(in + i * 32 + t));
      ptx::bar_arrive(1, 64);
    } else {
      ptx::bar_sync(1, 64);
      ptx::store(out + i * 32 + t - 32, ptx::lds32(smem + (t ^ 63) * 4));
      if (i + 1 < n) ptx::bar_arrive(2, 64);
    }
  }
"""

STMATRIX = """
  ptx::stmatrix_x4(smem + t * 16, ptx::load(reinterpret_cast<const uint4*>(in) + t));
  __syncwarp();
  for (u32 j = 0; j < 4; ++j) ptx::store(out + t * 4 + j, ptx::lds32(smem + t * 16 + j * 4));
"""

WARP = """
  constexpr u32 kAll = 0xFFFFFFFFu;
  const u32 v = ptx::load(in + t);
  const u32 votes = __any_sync(kAll, t == 5) + 2 * __all_sync(kAll, t < 32) + 4 * __all_sync(kAll, t != 40);
  ptx::store(out + t, __shfl_up_sync(kAll, v, 3));
  ptx::store(out + 64 + t, __shfl_down_sync(kAll, v, 5));
  ptx::store(out + 128 + t, __shfl_sync(kAll, v, static_cast<int>(t * 7 % 32)));
  ptx::store(out + 192 + t, votes);
  if (t == 0) ptx::store(out + 256, 0u);
  __syncthreads();
  atomicAdd(out + 256, v);
"""

REGISTERS = """
  if (t < 128) {
    ptx::setmaxnreg_dec<40>();
    ptx::store(out + t, ptx::load(in + t) + 1);
  } else {
    ptx::setmaxnreg_inc<232>();
    ptx::store(out + t, ptx::load(in + t) + 2);
  }
"""


def warp_expected(v: np.ndarray) -> np.ndarray:
    lane, base = np.arange(64) % 32, np.arange(64) // 32 * 32
    up = v[base + np.where(lane < 3, lane, lane - 3)]
    down = v[base + np.where(lane > 26, lane, lane + 5)]
    votes = np.where(base == 0, 1 + 2 + 4, 0)
    return np.concatenate([up, down, v[base + np.arange(64) * 7 % 32], votes, [v.sum()]]).astype(np.uint32)


def stmatrix_expected(v: np.ndarray) -> np.ndarray:
    """Lane 4 r + j holds word j of row r of each of four matrices."""
    return v.reshape(8, 4, 4).transpose(2, 0, 1).reshape(-1)


DATA = words(6, 256)
EXAMPLES = [
    *(wgmma(n, dtype) for n in (16, 32, 64, 128, 256) for dtype in ("bf16", "fp16")),
    *(wgmma(64, "bf16", swizzle) for swizzle in ("k64", "k32", "kNone")),
    example("bulk", BULK, DATA, DATA.reshape(-1, 4).sum(1, dtype=np.uint32), 6, threads=96, shared_bytes=2080),
    example("copies", COPIES, DATA, DATA.reshape(-1, 4).sum(1, dtype=np.uint32), 12, shared_bytes=1056),
    example("barriers", BARRIERS, DATA, DATA.reshape(-1, 32)[:, ::-1].copy(), 48),
    example("stmatrix", STMATRIX, DATA[0, :128], stmatrix_expected(DATA[0, :128]), threads=32),
    example("warp", WARP, DATA[0, :64], warp_expected(DATA[0, :64])),
    example(
        "registers", REGISTERS, DATA.flatten()[:384], DATA.flatten()[:384] + 2 - (np.arange(384) < 128), threads=384
    ),
]
NAMED = {e.sketch.id: e for e in EXAMPLES}


def by_id(example: Example) -> str:
    return example.sketch.id


def add_source(monkeypatch, sketch: Sketch) -> None:
    found = {**jit.sources(), **sketch.sources}
    monkeypatch.setattr(jit, "sources", lambda: found)


@pytest.mark.parametrize("example", EXAMPLES, ids=by_id)
def test_compiles(monkeypatch, example):
    """Without a spill, and without wgmma being run one after the other (C7510 and its like)."""
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    add_source(monkeypatch, example.sketch)
    logs, read = [], nvrtc.getProgramLog
    monkeypatch.setattr(nvrtc, "getProgramLog", lambda program: logs.append(read(program)) or logs[-1])
    cubin, resources = jit.compile(example.sketch, "sm_90a")
    assert f".text.{example.sketch.id}\0".encode() in cubin
    assert not resources.spilled_bytes and "serialized" not in logs[-1] and "ignored" not in logs[-1]


@pytest.mark.parametrize("example", EXAMPLES, ids=by_id)
def test_emulator(example):
    found = outcomes(example.sketch, example.inputs, example.output, example.n)
    assert found == {example.expected.tobytes().hex()}


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES, ids=by_id)
def test_card(monkeypatch, example):
    if device.current().compute_capability != (9, 0):
        pytest.skip("needs a device of compute capability 9.0")
    add_source(monkeypatch, example.sketch)
    (out,) = launch.launch(example.sketch, example.inputs, [example.output], [example.n], blocks=1)
    np.testing.assert_array_equal(array(out), example.expected)


WGMMA_64 = "wgmma_64_bf16_k128"
FAULTS = {
    "bulk copy of misaligned size": ("bulk", "1024, full + 8 * s", "1000, full + 8 * s", "misaligned"),
    "wrong parity": (
        "bulk",
        "empty + 8 * s, parity ^ 1",
        "empty + 8 * s, parity",
        "mbarrier at 2064, which never ends",
    ),
    "bytes that never come": (
        "bulk",
        "full + 8 * s, 1024)",
        "full + 8 * s, 1040)",
        "mbarrier at 2064, which never ends",
    ),
    "mbarrier never made": ("bulk", "ptx::mbarrier_init(full + 8 * s, 1), ", "", "never written"),
    "too many arrivals": (
        "bulk",
        "mbarrier_init(full + 8 * s, 1)",
        "mbarrier_init(full + 8 * s, 0)",
        "more than 0 arrivals",
    ),
    "mbarriers made without a fence": ("bulk", "ptx::fence_proxy_async();", "", "no proxy fence"),
    "no fence before wgmma": (WGMMA_64, "ptx::fence_proxy_async();", "", "no proxy fence"),
    "rows of B misaligned": (WGMMA_64, "wgmma_descriptor(start,", "wgmma_descriptor(start + 128,", "aligned to 1024"),
    "a warp without wgmma": (WGMMA_64, "ptx::wgmma_fence();", "if (t < 32) return;", "waits in wgmma.m64n64k16"),
    "barrier of too many": ("barriers", "ptx::bar_sync(1, 64)", "ptx::bar_sync(1, 96)", "waits at barrier 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    """Without asking for luck: with copies at once or late, in one schedule."""
    sketch, old, new, message = FAULTS[name]
    example = NAMED[f"sketch_{sketch}"]
    broken = example.sketch.but(old, new)
    with pytest.raises(Fault, match=rf"{broken.id}: block 0, thread \d+: .*{message}"):
        for late in (True, False):
            emulator = Emulator(0, late, sources=broken.sources)
            emulator.launch(broken, example.inputs, [example.output], [example.n], blocks=1)


RACES = {
    "no wait for the full mbarrier": ("bulk", "ptx::mbarrier_wait(full + 8 * s, parity);", ""),
    "no wait for the empty mbarrier": ("bulk", "ptx::mbarrier_wait(empty + 8 * s, parity ^ 1);", ""),
    "no wait for copies": ("copies", "ptx::mbarrier_wait(full + 8 * s, parity);", ""),
    "arrival before the copy": (
        "copies",
        "ptx::cp_async16(smem + s * 512 + t * 16, in + i * 128 + t * 4);\n      ptx::cp_async_arrive(full + 8 * s);",
        "ptx::cp_async_arrive(full + 8 * s);\n      ptx::cp_async16(smem + s * 512 + t * 16, in + i * 128 + t * 4);",
    ),
    "barrier not waited at": ("barriers", "if (i > 0) ptx::bar_sync(2, 64);", "if (i > 0) ptx::bar_arrive(2, 64);"),
    "no wait for wgmma": (WGMMA_64, "ptx::wgmma_wait<0>();", ""),
    "wait that covers nothing": (WGMMA_64, "ptx::wgmma_wait<0>();", "ptx::wgmma_wait<1>();"),
    "accumulator read early": (
        WGMMA_64,
        "ptx::wgmma_wait<0>();",
        "const float early = d[0];\n  ptx::wgmma_wait<0>();\n  d[0] = early;",
    ),
    "B overwritten early": (
        WGMMA_64,
        "ptx::wgmma_wait<0>();",
        "ptx::sts32(smem + t * 4, 0);\n  ptx::wgmma_wait<0>();",
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_races_change_results(name):
    sketch, old, new = RACES[name]
    example = NAMED[f"sketch_{sketch}"]
    found = outcomes(example.sketch.but(old, new), example.inputs, example.output, example.n)
    assert found | {example.expected.tobytes().hex()} != {example.expected.tobytes().hex()}
