import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_moe_fast import dispatch, envs
from mlx_moe_fast.dispatch import choose_tile, few_rows
from mlx_moe_fast.errors import MlxMoeFastError
from mlx_moe_fast.variants import TILES

EXPERTS = 8


@pytest.fixture(autouse=True)
def unforced(monkeypatch):
    monkeypatch.delenv(envs.TILE.name, raising=False)


def test_every_tile_serves_some_problem():
    assert {choose_tile(rows, EXPERTS).tile.m for rows in range(1, 200 * EXPERTS)} == set(TILES)


def test_every_named_tile_exists():
    assert {m for _, m in dispatch.ROWS_PER_EXPERT} | {dispatch.TALLEST} == set(TILES)


@pytest.mark.parametrize("most, m", dispatch.ROWS_PER_EXPERT)
def test_a_boundary_belongs_to_the_shorter_tile(most, m):
    assert choose_tile(most * EXPERTS, EXPERTS).tile.m == m
    assert choose_tile(most * EXPERTS + 1, EXPERTS).tile.m > m


@given(rows=st.integers(0, 1 << 20), more=st.integers(0, 1 << 20), experts=st.integers(1, 512))
def test_more_rows_never_get_a_shorter_tile(rows, more, experts):
    assert choose_tile(rows, experts).tile.m <= choose_tile(rows + more, experts).tile.m


def test_why_names_the_rows_an_expert():
    assert choose_tile(100, 8).why == "12.5 rows an expert"


@pytest.mark.parametrize("m", TILES)
def test_a_forced_tile_is_used_whatever_the_problem(monkeypatch, m):
    monkeypatch.setenv(envs.TILE.name, str(m))
    for rows in (1, 1 << 20):
        choice = choose_tile(rows, EXPERTS)
        assert choice.tile is TILES[m]
        assert envs.TILE.name in choice.why


# No number, no tile, a sign, a space, a float.
@pytest.mark.parametrize("value", ["tall", "0", "17", "-16", " 16", "16.0"])
def test_a_forced_tile_that_does_not_exist_is_an_error_that_lists_those_that_do(monkeypatch, value):
    monkeypatch.setenv(envs.TILE.name, value)
    with pytest.raises(MlxMoeFastError) as error:
        choose_tile(1, EXPERTS)
    assert repr(value) in str(error.value)
    assert all(str(m) in error.value.hint for m in TILES)


@given(n=st.integers(8, 1 << 15), k=st.integers(32, 1 << 15))
def test_what_pays_is_a_matter_of_work(n, k):
    rows = few_rows(n, k)
    assert (rows - 1) * n * k < dispatch.MIN_WORK <= rows * n * k


def test_a_forced_tile_always_pays(monkeypatch):
    assert few_rows(8, 32) > 1
    monkeypatch.setenv(envs.TILE.name, "16")
    assert few_rows(8, 32) == 0


def test_an_empty_variable_forces_nothing(monkeypatch):
    monkeypatch.setenv(envs.TILE.name, "")
    assert choose_tile(1, EXPERTS).tile.m == min(TILES)
