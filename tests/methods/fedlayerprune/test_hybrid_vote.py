"""The vote on a mask: shares worked by hand, ties, the ends of the threshold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.fedlayerprune.hybrid import Vote


def bits(*places: int) -> torch.Tensor:
    return torch.tensor(places).bool()


def voted(threshold: float, *ballots: tuple[torch.Tensor, float]) -> list[bool]:
    votes = Vote(threshold).start({"w": torch.ones(len(ballots[0][0])).bool()})
    for mask, weight in ballots:
        votes.add({"w": mask}, weight)
    kept: list[bool] = votes.value()["w"].tolist()
    return kept


def test_a_vote_by_hand() -> None:
    """Of 10 examples: weight 0 has 2 + 5 = .7, weight 1 .5, weight 2 .3, weight 3 .2."""
    ballots = [(bits(1, 0, 0, 1), 2.0), (bits(0, 0, 1, 0), 3.0), (bits(1, 1, 0, 0), 5.0)]
    assert voted(0.1, *ballots) == [True, True, True, True]
    assert voted(0.4, *ballots) == [True, True, False, False]
    assert voted(0.6, *ballots) == [True, False, False, False]


def test_a_share_equal_to_the_threshold_is_not_enough() -> None:
    """3 of 10 is not more than .3; in binary 29 of 100 is above 0.29 by rounding, and is not either."""
    kept, pruned = bits(1, 1), bits(1, 0)
    assert voted(0.3, (kept, 3.0), (pruned, 7.0)) == [True, False]
    assert voted(0.29, (kept, 29.0), (pruned, 71.0)) == [True, False]
    assert voted(0.7, *[(kept, 1.0)] * 7, *[(pruned, 1.0)] * 3) == [True, False]


def test_at_zero_anybody_is_enough() -> None:
    assert voted(0.0, (bits(1, 0, 0), 1.0), (bits(0, 1, 0), 1e6)) == [True, True, False]


@pytest.mark.parametrize("threshold", [1.0, 1.5, -0.1])
def test_a_threshold_that_no_mask_can_meet_is_refused(threshold: float) -> None:
    with pytest.raises(InputError, match=r"it must be in \[0, 1\): at 1 no weight could have more"):
        Vote(threshold)


def test_a_layer_is_never_emptied() -> None:
    """Nobody agrees on anything: both weights with two votes of five stay."""
    ballots = [bits(1, 0, 0), bits(1, 0, 0), bits(0, 1, 0), bits(0, 1, 0), bits(0, 0, 1)]
    assert voted(0.9, *[(mask, 1.0) for mask in ballots]) == [True, True, False]


def test_what_is_gone_stays_gone() -> None:
    votes = Vote(0.3).start({"w": bits(1, 0)})
    votes.add({"w": bits(1, 1)}, 1.0)
    assert votes.value()["w"].tolist() == [True, False]


def test_no_mask_is_a_vote_for_everything_and_no_votes_change_nothing() -> None:
    before = {"w": bits(1, 0, 1)}
    votes = Vote(0.3).start(before)
    assert votes.value()["w"].tolist() == [True, False, True]
    votes.add(None, 2.0)
    assert votes.value()["w"].tolist() == [True, False, True]
    assert votes.anybody()["w"].tolist() == [True, True, True]


@given(st.permutations(range(5)), st.floats(0, 0.99), st.integers(0, 2**31))
def test_the_order_of_clients_does_not_matter(
    order: list[int], threshold: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    ballots = [(torch.rand(20, generator=g) < 0.5, float(n)) for n in (1, 2, 3, 4, 50)]
    assert voted(threshold, *ballots) == voted(threshold, *[ballots[i] for i in order])
