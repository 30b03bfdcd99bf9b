"""The arithmetic of kernels/route.cu in NumPy: every slot is written once and every row has one place."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moe_fast import jit, ops, variants

THREADS = variants.ROUTE_THREADS
OUT_OF_RANGE = [-(2**31), -1, 2**31 - 1]


@st.composite
def routings(draw):
    """(ids, experts): some experts empty, some ids outside [0, experts), perhaps no row at all."""
    experts = draw(st.integers(1, 40))
    used = draw(st.lists(st.integers(0, experts - 1), max_size=experts)) + draw(
        st.lists(st.sampled_from([*OUT_OF_RANGE, experts]), max_size=2)
    )
    rows = draw(st.integers(0, 700)) if used else 0
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return np.array([used[i] for i in rng.integers(0, max(len(used), 1), rows)], np.int32), experts


tile_heights = st.sampled_from([*variants.TILES, 1, 3])


def clamp(ids, experts):
    """`expert_of`: ids out of range, negative ones included, become `experts`."""
    return np.minimum(ids.view(np.uint32), experts).astype(np.int64)


def tiles(ids, experts, tile_m):
    """What the blocks write: (slot, expert, first sorted row, rows), in the order of the blocks."""
    chosen = clamp(ids, experts)
    for expert in range(experts + 1):
        offset, count = int((chosen < expert).sum()), int((chosen == expert).sum())
        first, full = offset // tile_m, count // tile_m
        for slot in range(first, (offset + count) // tile_m):
            yield slot, expert, offset + (slot - first) * tile_m, tile_m if slot - first < full else 0
        yield len(ids) // tile_m + expert, expert, offset + full * tile_m, count - full * tile_m


@given(routings(), tile_heights)
def test_every_slot_is_written_once(routing, tile_m):
    ids, experts = routing
    written = [slot for slot, *_ in tiles(ids, experts, tile_m)]
    assert sorted(written) == list(range(len(ids) // tile_m + experts + 1))


@given(routings(), tile_heights)
def test_tiles_cover_every_sorted_row_once_and_hold_one_expert(routing, tile_m):
    ids, experts = routing
    in_order = np.sort(clamp(ids, experts), kind="stable")
    covered = []
    for _, expert, first, rows in tiles(ids, experts, tile_m):
        assert (in_order[first : first + rows] == expert).all() and rows <= tile_m
        covered += range(first, first + rows)
    assert sorted(covered) == list(range(len(ids)))


@given(routings(), tile_heights)
def test_short_tiles_run_last(routing, tile_m):
    ids, experts = routing
    short = [slot for slot, _, _, rows in tiles(ids, experts, tile_m) if 0 < rows < tile_m]
    assert all(slot >= len(ids) // tile_m for slot in short)


def segments(rows, threads):
    """The rows that each warp scans."""
    size = -(-rows // threads) * 32
    return [(min(w * size, rows), min(min(w * size, rows) + size, rows)) for w in range(threads // 32)]


def row_ids(ids, experts, threads):
    """`route_expert`'s compaction: each warp scans a segment, 32 ids at a time, and writes the rows of the
    block's expert after those of the warps before it."""
    rows, bounds = len(ids), segments(len(ids), threads)
    chosen, out = clamp(ids, experts), np.full(rows, -1)
    for expert in range(experts + 1):
        offset = sum(int((chosen[a:b] < expert).sum()) for a, b in bounds)
        for w, (begin, end) in enumerate(bounds):
            place = offset + sum(int((chosen[a:b] == expert).sum()) for a, b in bounds[:w])
            for i in range(begin, end, 32):
                votes = [i + lane < end and chosen[i + lane] == expert for lane in range(32)]
                for lane in np.flatnonzero(votes):
                    assert out[place + sum(votes[:lane])] == -1, "written twice"
                    out[place + sum(votes[:lane])] = i + lane
                place += sum(votes)
    return out


@settings(max_examples=30, deadline=None)
@given(routings(), st.sampled_from([32, 64, THREADS]))  # one warp, two, and the kernel's own
def test_rows_are_sorted_by_expert_and_stay_in_order_in_each(routing, threads):
    ids, experts = routing
    ids, experts = ids[:200], min(experts, 6)
    assert row_ids(ids, experts, threads).tolist() == np.argsort(clamp(ids, experts), kind="stable").tolist()


@given(st.integers(0, 1 << 20))
def test_the_segments_of_the_warps_are_all_rows(rows):
    bounds = segments(rows, THREADS)
    assert bounds[0][0] == 0 and bounds[-1][1] == rows
    assert all(end == begin for (_, end), (begin, _) in zip(bounds, bounds[1:], strict=False))


def test_the_model_is_the_kernels_arithmetic():
    # The lines that the functions above repeat; who changes them changes both.
    source = jit.sources()["route.cu"]
    for line in (
        "const int first = offset / tile_m, full = count / tile_m;",
        "ptx::store(tiles + slot, make_int4(expert, offset + i * tile_m, i < full ? tile_m : 0, 0));",
        "const int4 rest = make_int4(expert, offset + full * tile_m, count - full * tile_m, 0);",
        "ptx::store(tiles + rows / tile_m + expert, rest);",
        "const int segment = (rows + kThreads - 1) / kThreads * 32;",
        f"constexpr int kThreads = {THREADS};",
    ):
        assert line in source


@pytest.fixture
def launched(monkeypatch):
    """Keyword and positional arguments of the launches that `ops` asks for."""
    calls = []

    def launch(variant, inputs, outputs, scalars, blocks, contiguous=False):
        calls.append((variant, outputs, scalars, blocks))
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    monkeypatch.setattr(ops, "launch", launch)
    return calls


# Rows: one; a tile but one, a tile, one more. Experts: one, and more than rows. K: a block, a tail.
@pytest.mark.parametrize("rows, experts, k", [(1, 1, 128), (31, 8, 96), (32, 64, 160), (33, 2, 256)])
@pytest.mark.parametrize("bits", variants.BITS)
def test_the_launch_has_a_slot_and_a_thread_for_everything(launched, rows, experts, k, bits):
    tile = variants.TILES[32]
    ops.route(mx.zeros((rows,), mx.int32), mx.zeros((rows, k), mx.bfloat16), experts, bits, tile)
    ((variant, outputs, scalars, blocks),) = launched
    assert variant == variants.Route(bits)
    ids, slots = np.zeros(rows, np.int32), outputs[1][0][0]
    assert slots == len(list(tiles(ids, experts, tile.m)))
    assert scalars == [rows, experts, tile.m, experts + 1, rows, k, variants.padded(k, bits)]
    route_blocks, chunks = scalars[3], rows * variants.padded(k, bits) // 8
    assert 0 <= (blocks - route_blocks) * THREADS - chunks < THREADS
