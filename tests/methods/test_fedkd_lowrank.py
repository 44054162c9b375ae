import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.fedkd import (
    Energy,
    empty_factors,
    factorable,
    factored,
    largest_rank,
    product,
    rank_at,
    split,
)


def test_the_energy_rises_evenly_from_first_to_last():
    # .95 + (.98 - .95) * .5 = .965
    assert [Energy()(t) for t in (0, 0.5, 1)] == pytest.approx([0.95, 0.965, 0.98])
    assert not Energy().is_all
    assert not Energy(0.95, 1.0).is_all


@pytest.mark.parametrize(("first", "last"), [(0, 0.5), (0.9, 0.8), (0.9, 1.1), (-1, 1)])
def test_impossible_energies_are_refused(first, last):
    with pytest.raises(InputError, match="it must be"):
        Energy(first, last)


def test_the_rank_is_the_least_that_holds_the_energy():
    # Squares 9, 4, 1 of 14: 9/14 = .643, 13/14 = .929, 1.
    sigma = torch.tensor([3.0, 2.0, 1.0])
    assert [rank_at(sigma, t) for t in (0.6, 0.65, 0.92, 0.93, 1.0)] == [1, 2, 2, 3, 3]
    assert rank_at(torch.zeros(3), 0.95) == 0


def test_the_largest_rank_is_where_factors_are_no_longer_fewer_numbers():
    # 4 x 6: 24 numbers; rank 2 takes 2 (4 + 6 + 1) = 22, rank 3 takes 33.
    assert largest_rank((4, 6)) == 2
    assert largest_rank((4, 3, 2)) == 2
    # 3 x 3: rank 1 takes 7 of 9. 2 x 2: rank 1 takes 5 of 4. 2 x 6: rank 1 takes 9 of 12.
    assert [largest_rank(shape) for shape in ((3, 3), (2, 2), (2, 6), (5,), ())] == [1, 0, 1, 0, 0]
    # Not "fewer or equal": 3 x 4 is 12 numbers and rank 1 takes 8; 2 x 5 is 10 and takes 8.
    assert largest_rank((3, 4)) == 1
    assert factorable({"a": (4, 6), "b": (5,), "c": (2, 2)}) == ("a",)


def test_factors_by_hand():
    # 2 e1 (x) (0, 3, 4)/5: one singular value of 2, the left vector e1, the right (0, .6, .8).
    matrix = torch.zeros(4, 3, dtype=torch.float64)
    matrix[0] = torch.tensor([0.0, 1.2, 1.6])
    u, s, v = factored(matrix, 0.95)
    # 12 numbers, rank 1 takes 8: one row at most.
    assert (u.shape, s.shape, v.shape) == ((1, 4), (1,), (1, 3))
    assert torch.allclose(u, torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))
    assert torch.allclose(s, torch.tensor([2.0], dtype=torch.float64))
    assert torch.allclose(v, torch.tensor([[0, 0.6, 0.8]], dtype=torch.float64))
    # The opposite matrix: the left vector keeps its sign, the right one turns.
    assert torch.allclose(factored(-matrix, 0.95)[2], -v)


def test_rows_beyond_the_rank_are_zeros():
    matrix = torch.zeros(8, 8)
    matrix[0, 0] = 5.0
    matrix[1, 1] = 4.0
    # 64 numbers, rank 3 takes 51. 25/41 = .61 of the energy is in one, all in two.
    for energy, rank in ((0.5, 1), (0.95, 2)):
        u, s, v = factored(matrix, energy)
        assert len(s) == 3
        for factor in (u, s, v):
            assert bool(factor[:rank].any())
            assert not bool(factor[rank:].any())
    assert torch.allclose(product(u, s, v, (8, 8)), matrix.double(), atol=1e-6)


def test_what_has_no_cheap_factors_travels_whole():
    # The unit matrix has all its energy spread evenly: .95 takes all 8, and 3 are allowed.
    whole, u, s, v = split({"a": torch.eye(8), "b": torch.ones(8, 8)}, 0.95)
    assert torch.equal(whole["a"], torch.eye(8))
    assert not bool(u["a"].any())
    assert not bool(whole["b"].any())
    assert torch.allclose(
        product(u["b"], s["b"], v["b"], (8, 8)), torch.ones(8, 8).double(), atol=1e-5
    )


def test_an_update_of_zeros_and_one_that_is_not_finite():
    u, s, v = factored(torch.zeros(8, 8), 0.95)
    assert not bool(u.any() | s.any() | v.any())
    # The gate refuses it when it arrives whole; a solver would end the client's work.
    assert factored(torch.full((8, 8), float("nan")), 0.95) is None


def test_products_of_large_numbers_stay_finite():
    u, s, v = (factor + 1e20 for factor in empty_factors(torch.zeros(8, 8)))
    assert bool(torch.isfinite(product(u, s, v, (8, 8))).all())


@given(
    rows=st.integers(3, 9),
    columns=st.integers(3, 9),
    energy=st.floats(0.5, 0.999),
    seed=st.integers(0, 99),
)
def test_what_is_lost_is_at_most_the_energy_left_out(rows, columns, energy, seed):
    matrix = torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    whole, u, s, v = split({"w": matrix}, energy)
    got = whole["w"] + product(u["w"], s["w"], v["w"], (rows, columns))
    lost = (matrix - got).square().sum()
    assert lost <= (1 - energy) * matrix.square().sum() * (1 + 1e-9)
