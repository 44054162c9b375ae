"""Allocations and masks: golden values and exact counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.ca_afp.phases import Churn
from fedgrove.parts.allocate import ERK, GlobalRank, Uniform
from fedgrove.parts.mask import best, prune, regrow, top

SCORES = {"a": torch.tensor([[4.0, 1.0], [3.0, 2.0]]), "b": torch.tensor([5.0, 0.5])}


def test_uniform_by_hand() -> None:
    """Half of 4 is 2, half of 2 is 1."""
    assert Uniform()(SCORES, 0.5) == {"a": 2, "b": 1}


def test_global_rank_by_hand() -> None:
    """Half of 6 is 3: the best are 5 (b), 4 and 3 (a)."""
    assert GlobalRank()(SCORES, 0.5) == {"a": 2, "b": 1}
    # a third of 6 is 2: 5 (b), 4 (a)
    assert GlobalRank()(SCORES, 1 / 3) == {"a": 1, "b": 1}


def test_erk_by_hand() -> None:
    """Layers of 24, 100 and 4 weights, whose dimensions sum to 10, 20 and 4.

    A quarter of 128 is 32: epsilon 32/34 gives 9.41, 18.82 and 3.76. Rounded down that is 30; the
    two that are left go to the remainders .82 and .76.
    Half is 64: epsilon 64/34 would give the last one 7.5 of its 4. It is full; 60 over 30 is 2, and
    the others keep 20 and 40.
    """
    scores = {"a": torch.ones(4, 6), "b": torch.ones(10, 10), "c": torch.ones(2, 2)}
    assert ERK()(scores, 0.25) == {"a": 9, "b": 19, "c": 4}
    assert ERK()(scores, 0.5) == {"a": 20, "b": 40, "c": 4}
    assert ERK()(scores, 0.0) == {"a": 0, "b": 0, "c": 0}
    assert ERK()(scores, 1.0) == {"a": 24, "b": 100, "c": 4}


def test_erk_counts_a_kernels_dimensions() -> None:
    """(8, 4, 3, 3): 18 of 288; (10, 8): 18 of 80. Of 36 weights each keeps 18, though one is larger."""
    scores = {"conv": torch.ones(8, 4, 3, 3), "linear": torch.ones(10, 8)}
    assert ERK()(scores, 36 / 368) == {"conv": 18, "linear": 18}


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4), min_size=1, max_size=5),
    st.floats(0, 1),
)
def test_erk_is_exact_and_fills_no_layer_beyond_its_size(
    shapes: list[list[int]], density: float
) -> None:
    scores = {str(i): torch.ones(shape) for i, shape in enumerate(shapes)}
    counts = ERK()(scores, density)
    assert sum(counts.values()) == round(density * sum(s.numel() for s in scores.values()))
    assert all(0 <= counts[layer] <= score.numel() for layer, score in scores.items())


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


# ---- prune and regrow ----------------------------------------------------------------------------


def bits(*places: int) -> torch.Tensor:
    return torch.tensor(places).bool()


def test_best_by_hand() -> None:
    """Of 1, 3, 2, 3 the two best are the threes; among the others 2 is the best."""
    score = torch.tensor([1.0, 3.0, 2.0, 3.0])
    assert best(score, 2).tolist() == [False, True, False, True]
    assert best(score, 1).tolist() == [False, True, False, False]  # of equal ones the first
    assert best(score, 1, among=bits(1, 0, 1, 0)).tolist() == [False, False, True, False]
    assert best(score, 9, among=bits(1, 0, 1, 0)).tolist() == [True, False, True, False]
    assert not best(score, 0).any()


def test_prune_by_hand() -> None:
    """In use: scores 5, 1, 3, 2. The two lowest are 1 and 2; the 0 outside is not looked at."""
    mask = bits(1, 1, 0, 1, 1)
    score = torch.tensor([5.0, 1.0, 0.0, 3.0, 2.0])
    assert prune(mask, score, 2).tolist() == [True, False, False, True, False]
    assert prune(mask, score, 0).tolist() == mask.tolist()
    assert not prune(mask, score, 4).any()


def test_of_equal_scores_the_last_are_pruned() -> None:
    mask = prune(bits(1, 1, 0, 1, 1), torch.ones(5), 2)
    assert torch.equal(mask, bits(1, 1, 0, 0, 0))


def test_more_than_are_in_use_cannot_be_pruned() -> None:
    """A count below 0 would keep all but a few, silently."""
    with pytest.raises(InputError, match=r"pruned is 3; it must be from 0 to 2, those in use"):
        prune(bits(1, 0, 1), torch.ones(3), 3)
    with pytest.raises(InputError, match="pruned is -1"):
        prune(bits(1, 0, 1), torch.ones(3), -1)


def test_regrow_by_hand() -> None:
    """Outside, |gradient| is 4, 2, 3; 4 is barred, so 3 and then 2 come; the 9 in use is not looked
    at.
    """
    mask = bits(1, 0, 0, 0)
    gradient = torch.tensor([9.0, -4.0, 2.0, -3.0])
    barred = bits(0, 1, 0, 0)
    assert regrow(mask, gradient, 1, barred).tolist() == [True, False, False, True]
    assert regrow(mask, gradient, 2, barred).tolist() == [True, False, True, True]
    # Three are asked for, but the barred one stays out.
    assert regrow(mask, gradient, 3, barred).tolist() == [True, False, True, True]
    assert regrow(mask, gradient, 0, barred).tolist() == mask.tolist()


def test_a_gradient_of_zero_regrows_too_and_of_equal_ones_the_first() -> None:
    mask = regrow(bits(0, 0, 1, 0), torch.zeros(4), 2, bits(0, 0, 0, 0))
    assert torch.equal(mask, bits(1, 1, 1, 0))


def test_inputs_are_left_alone() -> None:
    mask = bits(1, 0, 1, 0)
    score = torch.tensor([1.0, 2.0, 3.0, 4.0])
    barred = bits(0, 0, 0, 0)
    prune(mask, score, 1)
    regrow(mask, score, 1, barred)
    assert mask.tolist() == [True, False, True, False]
    assert score.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert not barred.any()


STEPS = st.tuples(
    st.integers(1, 4), st.integers(1, 14), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)
)


@given(st.integers(1, 120), STEPS, st.integers(0, 2**31))
def test_density_is_exact_after_any_steps(
    total: int, steps: tuple[int, int, float, float, float], seed: int
) -> None:
    """Steps of a schedule with scores and gradients that tie often: every count is exact, the
    barred stay out.
    """
    every, rounds, rate, first, last = steps
    rule = Churn(every, rate)
    target = round(last * total)
    g = torch.Generator().manual_seed(seed)
    mask = top({"w": torch.rand(total, generator=g)}, {"w": round(first * total)})["w"]
    for t in rule.steps(rounds):
        score, gradient = (torch.randint(0, 4, (total,), generator=g).float() - 2 for _ in range(2))
        before = mask
        cut, grow = rule.sizes(t, rounds, int(before.sum()), target, total)
        left = prune(before, score, cut)
        mask = regrow(left, gradient, grow, barred=before & ~left)
        assert int((before & ~mask).sum()) == cut  # none of those pruned is back
        assert int((mask & ~before).sum()) == grow
        assert bool((left <= before).all())
        assert bool((left <= mask).all())
    if rule.steps(rounds):
        assert int(mask.sum()) == target


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, float("-inf")]), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_best_is_a_stable_sort(scores: list[float], n: int) -> None:
    score = torch.tensor(scores)
    expected = torch.zeros(len(scores), dtype=torch.bool)
    expected[torch.argsort(score, descending=True, stable=True)[:n]] = True
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(best(score.to(dtype), n), expected)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 2.0, -torch.inf, torch.nan]), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 13),
)
def test_best_among_places_is_best_where_all_others_are_last(
    rows: list[tuple[float, bool]], n: int
) -> None:
    """Ties, too few places, scores of -inf and NaN: as with -inf at the places not allowed."""
    score = torch.tensor([one for one, _ in rows])
    among = torch.tensor([allowed for _, allowed in rows])
    expected = best(score.masked_fill(~among, -torch.inf), n) & among
    assert torch.equal(best(score, n, among=among), expected)


def test_best_among_places_takes_whole_numbers() -> None:
    among = torch.tensor([True, False, True, True])
    assert best(torch.tensor([1, 9, 3, 2]), 2, among).tolist() == [False, False, True, True]


def test_best_among_fewer_places_than_asked_takes_none_without_a_score() -> None:
    """Two of three places are allowed and two or more asked for; -inf ties with what is not."""
    among = torch.tensor([False, True, True])
    for n in (2, 3):
        assert best(torch.tensor([5.0, 1.0, 2.0]), n, among).tolist() == [False, True, True]
        assert best(torch.tensor([5, 1, 2]), n, among).tolist() == [False, True, True]
    # 2 > -inf is the first; of the two tied at -inf the first, which is not allowed, is the second.
    lowest = torch.tensor([5.0, -torch.inf, 2.0])
    assert best(lowest, 2, among).tolist() == [False, False, True]
    assert best(lowest, 3, among).tolist() == [False, True, True]
