import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_moe_fast import dispatch, envs
from mlx_moe_fast.dispatch import DENSE_ROWS, MOST_DECODE_ROWS, choose, choose_dense, few_rows, is_few, slots
from mlx_moe_fast.errors import MlxMoeFastError
from mlx_moe_fast.problem import Projection, Quantization
from mlx_moe_fast.variants import DENSE_STRIPS, EXPERT_STRIP, TILES, WARPS, Strip

EXPERTS = 128  # so many that few rows an expert are more than any batch has for decode


def projection(experts=EXPERTS, n=768, k=2048, bits=4):
    return Projection(experts, n, k, Quantization(bits, 64), "bf16")


def shape(rows, experts=EXPERTS):
    return choose(rows, projection(experts)).shape


def order(shape):
    """Shapes by the number of rows that they are for."""
    return 0 if isinstance(shape, Strip) else shape.m


@pytest.fixture(autouse=True)
def unforced(monkeypatch):
    monkeypatch.delenv(envs.TILE.name, raising=False)


def test_every_shape_serves_some_problem():
    assert {shape(rows) for rows in range(1, 200 * EXPERTS)} == {EXPERT_STRIP, *TILES.values()}


def test_every_named_tile_exists():
    assert {m for _, m in dispatch.ROWS_PER_EXPERT} | {dispatch.TALLEST} == set(TILES)


@pytest.mark.parametrize("most, m", dispatch.ROWS_PER_EXPERT)
def test_a_boundary_belongs_to_the_shorter_tile(most, m):
    assert shape(most * EXPERTS).m == m
    assert shape(most * EXPERTS + 1).m > m


@pytest.mark.parametrize(
    "experts, most",
    [
        (1, 64),  # any expert count: the bits of a row do not depend on the size of a small batch
        (8, 64),
        (16, 64),
        (17, 68),  # four rows an expert
        (128, 512),
        (256, 1024),
        (257, 1024),
        (512, 1024),
    ],
)
def test_few_rows_run_on_the_decode_kernel(experts, most):
    assert all(shape(rows, experts) is EXPERT_STRIP for rows in range(1, most + 1))
    assert shape(most + 1, experts) in TILES.values()


@given(rows=st.integers(0, 1 << 20), more=st.integers(0, 1 << 20), experts=st.integers(1, 512))
def test_more_rows_never_get_a_shorter_tile(rows, more, experts):
    assert order(shape(rows, experts)) <= order(shape(rows + more, experts))


def test_why_names_the_rows_an_expert():
    assert choose(100, projection(8)).why == "12.5 rows an expert"
    assert choose_dense(5, projection(1)).why == "5 rows"


def test_only_the_decode_kernel_splits_k():
    assert choose(MOST_DECODE_ROWS, projection(8)).split == 1
    assert choose(8, projection()).split == WARPS


@given(
    rows=st.integers(1, 1 << 12),
    experts=st.integers(1, 512),
    n=st.integers(1, 1 << 12),
    k=st.integers(1, 1 << 8),
    bits=st.sampled_from((4, 8)),
    glu=st.booleans(),
)
def test_all_warps_of_a_block_share_k_or_none(rows, experts, n, k, bits, glu):
    p = projection(experts, 8 * n, 64 * k, bits)
    assert choose(rows, p, glu).split in (1, WARPS)
    assert choose_dense(min(rows, DENSE_ROWS), p).split in (1, WARPS)


def test_k_is_shared_where_there_are_few_warps():
    rows, n, k = 8, 32, 1024
    warps = rows * n // (16 * EXPERT_STRIP.tiles)
    enough = -(-dispatch.ENOUGH_WARPS // warps)
    assert choose(rows, projection(n=n * enough, k=k)).split == 1
    assert choose(rows, projection(n=n * (enough - 1), k=k)).split == WARPS
    # Gate and up are twice as many warps.
    assert choose(rows, projection(n=n * enough // 2, k=k)).split == WARPS
    assert choose(rows, projection(n=n * enough // 2, k=k), glu=True).split == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_k_is_shared_where_it_is_long(bits):
    k = dispatch.SHORT_ROW * 8 // bits
    assert choose(64, projection(n=4096, k=k, bits=bits)).split == 1
    assert choose(64, projection(n=4096, k=k + 64, bits=bits)).split == WARPS
    assert choose_dense(1, projection(1, n=1 << 16, k=k, bits=bits)).split == 1
    assert choose_dense(1, projection(1, n=1 << 16, k=k + 64, bits=bits)).split == WARPS


@pytest.mark.parametrize("n, k", [(768, 2048), (2048, 768), (4096, 1024), (151936, 2048)])
def test_the_order_of_a_dense_sum_does_not_depend_on_the_rows(n, k):
    # A row gets the same bits alone as in a batch: what shares K is a matter of the matrix.
    assert len({choose_dense(rows, projection(1, n, k)).split for rows in range(1, DENSE_ROWS + 1)}) == 1


def test_every_row_count_of_a_dense_layer_has_the_narrowest_strip():
    assert DENSE_ROWS == 32
    for rows in range(1, DENSE_ROWS + 1):
        columns = choose_dense(rows, projection(1)).shape.columns
        assert columns == min(c for c in DENSE_STRIPS if c >= rows)
    assert {choose_dense(rows, projection(1)).shape for rows in range(1, 33)} == set(DENSE_STRIPS.values())


def test_more_rows_than_a_strip_has_columns_are_no_dense_problem():
    with pytest.raises(StopIteration):
        choose_dense(DENSE_ROWS + 1, projection(1))


@pytest.mark.parametrize("rows, experts, expected", [(1, 8, 1), (8, 8, 8), (9, 8, 9), (64, 8, 9), (8, 128, 8)])
def test_slots_are_for_the_experts_that_there_can_be(rows, experts, expected):
    assert slots(rows, experts) == expected


@pytest.mark.parametrize("name, tile", dispatch.FORCIBLE.items())
def test_a_forced_tile_is_used_whatever_the_problem(monkeypatch, name, tile):
    assert shape(1) is EXPERT_STRIP  # and is remembered
    monkeypatch.setenv(envs.TILE.name, name)
    for rows in (1, 64, 1 << 20):
        for glu in (False, True):
            choice = choose(rows, projection(), glu)
            assert (choice.shape, choice.split) == (tile, 1)
            assert envs.TILE.name in choice.why
    monkeypatch.delenv(envs.TILE.name)
    assert shape(1) is EXPERT_STRIP


# No number, no tile, a sign, a space, a float.
@pytest.mark.parametrize("value", ["tall", "WGMMA", "0", "17", "-16", " 16", "16.0"])
def test_a_forced_tile_that_does_not_exist_is_an_error_that_lists_those_that_do(monkeypatch, value):
    monkeypatch.setenv(envs.TILE.name, value)
    with pytest.raises(MlxMoeFastError) as error:
        choose(1, projection())
    assert repr(value) in str(error.value)
    assert all(name in error.value.hint for name in dispatch.FORCIBLE)


@given(n=st.integers(8, 1 << 15), k=st.integers(32, 1 << 15))
def test_what_pays_is_a_matter_of_work(n, k):
    rows = few_rows(n, k)
    assert (rows - 1) * n * k < dispatch.MIN_WORK <= rows * n * k


def test_rows_from_which_a_dense_layer_pays():
    assert few_rows(14336, 4096) == 1 and few_rows(14336, 4096, dense=True) == 2
    assert few_rows(151936, 2048, dense=True) == 1  # an output layer
    assert few_rows(512, 2048) > 8 == few_rows(512, 2048, dense=True) == few_rows(8, 32, dense=True)


@given(
    n=st.integers(1, 1 << 17).map(lambda n: 8 * n),
    sms=st.sampled_from([1, 20, 48, 84, 132, 148]),
    rows=st.integers(1, DENSE_ROWS),
)
def test_blocks_that_share_a_matrix_have_room_for_it_and_are_not_idle(n, sms, rows):
    choice = choose_dense(rows, projection(1, n=n, k=4096), sms)
    tiles, strip = -(-n // 16), choice.shape
    assert choice.split == WARPS and choice.sms == sms
    assert choice.per_sm * sms * strip.tiles >= tiles  # as kernels/decode.cu divides them, none gets more than it takes
    assert choice.per_sm == 1 or (choice.per_sm - 1) * sms < tiles


def test_without_a_number_of_multiprocessors_blocks_are_full():
    choice = choose_dense(1, projection(1, n=4096, k=4096))
    assert (choice.per_sm, choice.sms) == (0, 0)


@given(rows=st.integers(1, 1 << 12), experts=st.integers(1, 512))
def test_few_are_the_rows_of_the_decode_kernel(rows, experts):
    p = projection(experts)
    assert (
        is_few(rows, p) == (choose(rows, p).shape is EXPERT_STRIP) == (choose(rows, p, glu=True).shape is EXPERT_STRIP)
    )


def test_with_a_forced_tile_no_rows_are_few(monkeypatch):
    monkeypatch.setenv(envs.TILE.name, "16")
    assert not is_few(1, projection())


def test_a_forced_tile_always_pays(monkeypatch):
    assert few_rows(8, 32) > 1
    monkeypatch.setenv(envs.TILE.name, "16")
    assert few_rows(8, 32) == 0


def test_an_empty_variable_forces_nothing(monkeypatch):
    monkeypatch.setenv(envs.TILE.name, "")
    assert shape(1) is EXPERT_STRIP
