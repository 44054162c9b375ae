"""Which channels stay, worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove import nets
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.groups import ChannelGroup, Place
from fedgrove.channels.selection import (
    Even,
    FilterL1,
    FilterL2,
    Gamma,
    Overlap,
    Slim,
    select_best_in_steps,
    select_first,
)
from fedgrove.errors import InputError
from fedgrove.nets import Net

BOTH = (0, 1)
STREAM = ChannelGroup(
    "stem",
    2,
    (
        Place("stem.w", 0, BOTH, "filter"),
        Place("stem.b", 0, BOTH, "bias"),
        Place("stem.n", 0, BOTH, "scale"),
        Place("block.w", 0, BOTH, "filter"),
        Place("block.n", 0, BOTH, "scale"),
        Place("head.w", 1, (0, 0, 1, 1), "input"),
    ),
)
UP = ChannelGroup("up", 2, (Place("up.w", 1, BOTH, "filter"),))
PARAMS = {
    "stem.w": torch.tensor([[1.0, -2.0], [0.0, 3.0]]),
    "stem.b": torch.tensor([100.0, 100.0]),
    "stem.n": torch.tensor([-1.0, 0.5]),
    "block.w": torch.tensor([[2.0, 0.0], [4.0, 0.0]]),
    "block.n": torch.tensor([3.0, -0.5]),
    "up.w": torch.tensor([[3.0, 0.0], [4.0, -1.0]]),
    "head.w": torch.full((1, 4), 50.0),
}


# ---- scores --------------------------------------------------------------------------------------


def test_gamma_is_the_mean_over_the_norms_of_a_stream() -> None:
    """(|-1| + |3|) / 2 = 2, (|.5| + |-.5|) / 2 = .5; the group without a norm gets no score."""
    found = Gamma()(PARAMS, (STREAM, UP))
    assert {k: v.tolist() for k, v in found.items()} == {"stem": [2.0, 0.5]}


def test_gamma_needs_norms() -> None:
    with pytest.raises(
        InputError, match="no norm layers after its channels; score them by FilterL1"
    ):
        Gamma()(PARAMS, (UP,))


def test_filters_count_all_that_make_a_channel() -> None:
    """Channel 0: 1, -2 of the stem and 2, 0 of the block; channel 1: 0, 3 and 4, 0. Of a transposed convolution the
    columns: 3, 4 and 0, -1. Biases and readers do not count.
    """
    one, two = (score(PARAMS, (STREAM, UP)) for score in (FilterL1(), FilterL2()))
    assert {k: v.tolist() for k, v in one.items()} == {"stem": [5.0, 7.0], "up": [7.0, 1.0]}
    assert {k: v.tolist() for k, v in two.items()} == {"stem": [3.0, 5.0], "up": [5.0, 1.0]}


def test_scores_fit_a_real_net() -> None:
    net = nets.build("resnet18", (1, 8, 8), 3, 0, width=2)
    params = dict(net.named_parameters())
    net = Net(net, (1, 8, 8))
    for score in (Gamma(), FilterL1(), FilterL2()):
        found = score(params, find_groups(net))
        assert {k: len(v) for k, v in found.items()} == {g.name: g.size for g in find_groups(net)}
        assert make_channel_mask(net, Slim()(found, 0.5))
    assert set(torch.cat([*Gamma()(params, find_groups(net)).values()]).tolist()) == {1.0}


# ---- choices -------------------------------------------------------------------------------------


def test_slimming_ranks_all_groups_together() -> None:
    """Six channels, density .5: three stay. a's best (.9) and b's best (.2) stay anyway; the third is a's .8."""
    scores = {"a": torch.tensor([0.9, 0.7, 0.8]), "b": torch.tensor([0.1, 0.2, 0.0])}
    kept = Slim()(scores, 0.5)
    assert {k: v.int().tolist() for k, v in kept.items()} == {"a": [1, 0, 1], "b": [0, 1, 0]}
    assert [
        int(sum(v.sum() for v in Slim()(scores, d).values())) for d in (0.0, 0.3, 0.7, 1.0)
    ] == [2, 2, 4, 6]


def test_ties_go_to_those_that_come_first_in_their_groups() -> None:
    """All equal, 3 of 6 stay: places 0, 0, then 1/4 (of b) before 1/2 (of a)."""
    kept = Slim()({"a": torch.ones(2), "b": torch.ones(4)}, 0.5)
    assert {k: v.int().tolist() for k, v in kept.items()} == {"a": [1, 0], "b": [1, 1, 0, 0]}


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4),
    st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_slimming_is_exact_and_leaves_no_group_empty(
    numbers: list[list[int]], density: float
) -> None:
    scores = {str(i): torch.tensor(some, dtype=torch.float32) for i, some in enumerate(numbers)}
    kept = Slim()(scores, density)
    total = sum(len(some) for some in numbers)
    assert sum(int(k.sum()) for k in kept.values()) == max(len(scores), round(density * total))
    for name, flags in kept.items():
        assert bool(flags.any())
        assert scores[name][flags].min() >= (
            scores[name][~flags].max() if not bool(flags.all()) else 0
        )


def test_even_shares_and_nested_ones() -> None:
    scores = {"a": torch.tensor([0.0, 3.0, 2.0, 1.0]), "b": torch.tensor([1.0, 1.0, 1.0])}
    assert {k: v.int().tolist() for k, v in Even()(scores, 0.5).items()} == {
        "a": [0, 1, 1, 0],
        "b": [1, 1, 0],
    }
    assert {k: int(v.sum()) for k, v in Even()(scores, 0.0).items()} == {"a": 1, "b": 1}
    small, large = select_first((STREAM, UP), 0.2), select_first((STREAM, UP), 1.0)
    assert {k: v.int().tolist() for k, v in small.items()} == {"stem": [1, 0], "up": [1, 0]}
    assert all(bool(v.all()) for v in large.values())


@pytest.mark.parametrize("choice", [Slim(), Even()])
def test_a_density_is_a_share(choice: Slim | Even) -> None:
    with pytest.raises(InputError, match=r"density is 1.5; it must be in \[0, 1\]"):
        choice({"a": torch.ones(2)}, 1.5)


# ---- overlap counting ----------------------------------------------------------------------------


def flags(*bits: int) -> torch.Tensor:
    return torch.tensor(bits).bool()


def counted(*clients: dict[str, list[int]]) -> Overlap:
    overlap = Overlap()
    for client in clients:
        overlap.add({k: torch.tensor(v).bool() for k, v in client.items()})
    return overlap


def counts(widths: tuple[int, ...], density: float, multiple: int) -> list[int]:
    scores = {str(number): torch.arange(float(width)) for number, width in enumerate(widths)}
    return [int(kept.sum()) for kept in select_best_in_steps(scores, density, multiple).values()]


def test_widths_in_steps_by_hand() -> None:
    """Of 64, 20, 16 and 15: .3 are 19.2, 6, 4.8 and 4.5, in eights 16, 8, 8 (at least), not rounded 4."""
    assert counts((64, 20, 16, 15), 0.3, 8) == [16, 8, 8, 4]
    # .97 of 20 is 19.4, two steps of eight and a half: 16; never more than there are.
    assert counts((64, 20, 16, 15), 0.97, 8) == [64, 16, 16, 15]
    assert counts((20, 3), 0.3, 1) == [6, 1]
    scores = {"a": torch.tensor([1.0, 5.0, 5.0, 3.0])}
    assert select_best_in_steps(scores, 0.25, 1)["a"].tolist() == [False, True, False, False]


@given(st.integers(1, 70), st.floats(0.01, 1), st.floats(0.01, 1), st.sampled_from([1, 4, 8]))
def test_narrower_lies_within_wider(width: int, one: float, other: float, multiple: int) -> None:
    scores = {"a": torch.rand(width, generator=torch.Generator().manual_seed(width))}
    less, more = (
        select_best_in_steps(scores, share, multiple)["a"] for share in sorted((one, other))
    )
    assert bool(less.any())
    assert not bool((less & ~more).any())


def test_overlap_counting_by_hand() -> None:
    """Three clients; x = a: 3 1 0 2, b: 0 3. Half of six is three: a's 3, b's 3, then a's 2."""
    overlap = counted(
        {"a": [1, 1, 0, 1], "b": [0, 1]},
        {"a": [1, 0, 0, 1], "b": [0, 1]},
        {"a": [1, 0, 0, 0], "b": [0, 1]},
    )
    assert {k: v.tolist() for k, v in overlap.counts.items()} == {"a": [3, 1, 0, 2], "b": [0, 3]}
    assert {k: v.int().tolist() for k, v in overlap.value(0.5).items()} == {
        "a": [1, 0, 0, 1],
        "b": [0, 1],
    }


def test_channels_tied_at_the_threshold_are_decided_by_their_mean_score() -> None:
    """x = a: 2 1 1 0, b: 1 1. Half of six is three: a's 2, the best of b, and one more of those with 1.

    Means over the clients that have it: a's second .3, a's third .6, b's .5 and .5, of which the
    first comes first. What clients say of channels they lack (9) does not count.
    """
    overlap = Overlap()
    first = {"a": flags(1, 1, 0, 0), "b": flags(1, 0)}
    second = {"a": flags(1, 0, 1, 0), "b": flags(0, 1)}
    overlap.add(first, {"a": torch.tensor([0.1, 0.3, 9, 9]), "b": torch.tensor([0.5, 9])})
    overlap.add(second, {"a": torch.tensor([0.1, 9, 0.6, 9]), "b": torch.tensor([9, 0.5])})
    assert {k: v.int().tolist() for k, v in overlap.value(0.5).items()} == {
        "a": [1, 0, 1, 0],
        "b": [1, 0],
    }


def test_a_higher_count_is_worth_more_than_any_score() -> None:
    overlap = Overlap()
    overlap.add({"a": flags(1, 1)}, {"a": torch.tensor([0.1, 7.0])})
    overlap.add({"a": flags(1, 0)}, {"a": torch.tensor([0.1, 0.0])})
    assert overlap.value(0.5)["a"].tolist() == [True, False]


def test_groups_without_a_score_are_tied_by_place() -> None:
    overlap = Overlap()
    overlap.add({"a": flags(1, 0, 1), "b": flags(1, 1)}, {"b": torch.tensor([0.1, 0.2])})
    assert {k: v.int().tolist() for k, v in overlap.value(0.4).items()} == {
        "a": [1, 0, 0],
        "b": [0, 1],
    }


def test_one_client_agrees_with_itself() -> None:
    mine = {"a": [0, 1, 1, 0], "b": [1, 0]}
    assert {k: v.int().tolist() for k, v in counted(mine).value(0.5).items()} == mine


def test_the_order_of_clients_does_not_matter() -> None:
    one, two = {"a": [1, 1, 0, 0]}, {"a": [0, 1, 0, 1]}
    first, second = counted(one, two), counted(two, one)
    for density in (0.25, 0.5, 0.75):  # ties: channel 0 before channel 3
        assert first.value(density)["a"].tolist() == second.value(density)["a"].tolist()
    assert first.value(0.5)["a"].int().tolist() == [1, 1, 0, 0]


def test_counting_nothing_or_other_groups() -> None:
    with pytest.raises(ValueError, match="nothing was counted"):
        Overlap().value(0.5)
    with pytest.raises(ValueError, match=r"differ in groups: \['b'\]"):
        counted({"a": [1]}, {"a": [1], "b": [1]})
