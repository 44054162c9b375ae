"""Scores, allocations and masks: golden values and exact counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.parts.allocate import GlobalRank, Uniform
from fedgrove.parts.mask import top
from fedgrove.parts.score import Magnitude

SCORES = {"a": torch.tensor([[4.0, 1.0], [3.0, 2.0]]), "b": torch.tensor([5.0, 0.5])}


def test_magnitude_by_hand() -> None:
    assert Magnitude()({"w": torch.tensor([-3.0, 0.0, 2.0])})["w"].tolist() == [3.0, 0.0, 2.0]


def test_uniform_by_hand() -> None:
    """Half of 4 is 2, half of 2 is 1."""
    assert Uniform()(SCORES, 0.5) == {"a": 2, "b": 1}


def test_global_rank_by_hand() -> None:
    """Half of 6 is 3: the best are 5 (b), 4 and 3 (a)."""
    assert GlobalRank()(SCORES, 0.5) == {"a": 2, "b": 1}
    # a third of 6 is 2: 5 (b), 4 (a)
    assert GlobalRank()(SCORES, 1 / 3) == {"a": 1, "b": 1}


def test_top_by_hand() -> None:
    """The two largest of a are 4 and 3, in its first column; the largest of b comes first."""
    mask = top(SCORES, {"a": 2, "b": 1})
    assert mask["a"].tolist() == [[True, False], [True, False]]
    assert mask["b"].tolist() == [True, False]


def test_ties_go_to_those_that_come_first() -> None:
    assert top({"w": torch.ones(5)}, {"w": 2})["w"].tolist() == [True, True, False, False, False]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 2**31))
def test_counts_are_exact(sizes: list[int], density: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    # Few distinct scores, so that ties are common.
    scores = {str(i): torch.randint(0, 4, (n,), generator=g).float() for i, n in enumerate(sizes)}
    for allocation in (Uniform(), GlobalRank()):
        counts = allocation(scores, density)
        mask = top(scores, counts)
        assert {k: int(m.sum()) for k, m in mask.items()} == counts
    assert sum(GlobalRank()(scores, density).values()) == round(density * sum(sizes))


@given(st.integers(0, 2**31))
def test_what_is_kept_scores_at_least_what_is_not(seed: int) -> None:
    score = torch.randn(30, generator=torch.Generator().manual_seed(seed))
    mask = top({"w": score}, {"w": 11})["w"]
    assert score[mask].min() >= score[~mask].max()


def test_an_impossible_number_is_refused() -> None:
    with pytest.raises(InputError, match="kept in w is 6; it must be from 0 to 5"):
        top({"w": torch.ones(5)}, {"w": 6})
