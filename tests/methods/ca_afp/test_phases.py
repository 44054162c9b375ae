"""CA-AFP's deficit and churn: the arithmetic of Alg. 1, lines 44-53, step by step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.ca_afp.phases import Churn
from fedgrove.methods.safl.slimming import stepwise


def density(rule: Churn, rounds: int, active: int, target: int, total: int) -> list[int]:
    """How many weights are in use after each step."""
    in_use = []
    for t in rule.steps(rounds):
        cut, grow = rule.sizes(t, rounds, active, target, total)
        active += grow - cut
        in_use.append(active)
    return in_use


def test_the_papers_ablation_by_hand() -> None:
    """Density .7 -> .3 of 1000 weights over 15 rounds, f = 5, churn .05.

    t=5:  R = (15-5)//5 = 2, deficit (700-300)/2 = 200, churn 35: prune 235, regrow 35 -> 500
    t=10: R = 1,             deficit (500-300)/1 = 200, churn 25: prune 225, regrow 25 -> 300
    t=15: R = max(1, 0) = 1, deficit 0,                 churn 15: prune 15,  regrow 15 -> 300
    """
    rule = Churn(every=5, rate=0.05)
    assert list(rule.steps(15)) == [5, 10, 15]
    assert [rule.left(t, 15) for t in (5, 10, 15)] == [2, 1, 1]
    assert rule.sizes(5, 15, 700, 300, 1000) == (235, 35)
    assert rule.sizes(10, 15, 500, 300, 1000) == (225, 25)
    assert rule.sizes(15, 15, 300, 300, 1000) == (15, 15)


def test_at_the_target_only_places_change() -> None:
    """.3 of 1000 weights from the start: 5 % of 300 go and come, in every step."""
    assert {Churn(5, 0.05).sizes(t, 50, 300, 300, 1000) for t in range(5, 51, 5)} == {(15, 15)}


def test_without_churn_only_the_deficit_goes() -> None:
    assert Churn(5, 0.0).sizes(5, 15, 700, 300, 1000) == (200, 0)
    assert Churn(5, 0.0).sizes(15, 15, 300, 300, 1000) == (0, 0)


def test_a_step_every_round() -> None:
    """P = 4, f = 1: R = 3, 2, 1, 1; from 70 to 30 of 100: the deficit 40 is shared as 13, 13.5 ->
    14 (to even), 13.
    """
    rule = Churn(every=1, rate=0.0)
    assert [rule.left(t, 4) for t in (1, 2, 3, 4)] == [3, 2, 1, 1]
    assert density(rule, 4, 70, 30, 100) == [57, 43, 30, 30]


def test_a_phase_shorter_than_f_has_no_step() -> None:
    assert list(Churn(every=5).steps(4)) == []
    assert list(Churn(every=5).steps(5)) == [5]
    assert list(Churn(every=1).steps(0)) == []


def test_rounding_is_made_good_at_the_last_step() -> None:
    """10 weights to 3 in three parts: 7/3 -> 2, then 5/2 = 2.5 -> 2, then what is left, 3."""
    assert density(Churn(every=1, rate=0.0), 4, 10, 3, 10) == [8, 6, 3, 3]


def test_with_nothing_inactive_nothing_can_regrow() -> None:
    """All 100 in use: no place to regrow in, so no churn; only the deficit (100-30)/2 = 35 is
    pruned.
    """
    assert Churn(5, 0.05).sizes(5, 15, 100, 30, 100) == (35, 0)


def test_with_few_inactive_the_churn_is_as_large_as_they_are() -> None:
    """5 % of 98 is 5, but only 2 places are free."""
    assert Churn(5, 0.05).sizes(5, 15, 98, 98, 100) == (2, 2)


def test_a_density_that_is_to_rise_is_regrown() -> None:
    """From 30 to 70 of 100 in two parts: 20 more and 3 that change places: prune 3, regrow 23."""
    assert Churn(5, 0.1).sizes(5, 15, 30, 70, 100) == (3, 23)
    assert density(Churn(5, 0.1), 15, 30, 70, 100) == [50, 70, 70]


def test_the_deficit_goes_before_the_churn_where_both_do_not_fit() -> None:
    """The churn is what fits beside the deficit.

    Rising from 70 to 95: 25 of the 30 free places go to the deficit, so 5 and not 7 change places.
    Falling from 40 to 30: all may change places (rate 1), but 10 go for good, so that 30 are left
    to change.
    """
    assert Churn(5, 0.1).sizes(10, 10, 70, 95, 100) == (5, 30)
    assert Churn(5, 1.0).sizes(10, 10, 40, 30, 100) == (40, 30)


@given(
    st.integers(1, 400),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 6),
    st.integers(0, 25),
)
def test_steps_are_possible_and_end_at_the_target(
    total: int, first: float, last: float, rate: float, every: int, rounds: int
) -> None:
    rule = Churn(every, rate)
    active = round(first * total)
    target = round(last * total)
    for t in rule.steps(rounds):
        cut, grow = rule.sizes(t, rounds, active, target, total)
        assert 0 <= cut <= active  # no more than there are
        assert 0 <= grow <= total - active  # those pruned in this step may not regrow in it
        before = active
        active = active - cut + grow
        # Never past the target, never away from it.
        assert min(before, target) <= active <= max(before, target)
        assert active == before - round((before - target) / rule.left(t, rounds))
    if rule.steps(rounds):
        assert active == target


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"every": 0}, r"^every is 0; it must be 1 or more rounds\.$"),
        ({"rate": 2.0}, r"^churn is 2\.0; it must be in \[0, 1\]\.$"),
        ({"rate": -0.1}, r"^churn is -0\.1; it must be in \[0, 1\]\.$"),
    ],
)
def test_bad_numbers_get_a_sentence(words: dict[str, float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Churn(**words)  # type: ignore[arg-type]


@given(st.floats(0.01, 1), st.floats(0.02, 1))
def test_steps_fall_to_the_target_and_no_step_is_longer(density: float, step: float) -> None:
    densities = stepwise(density, step)
    assert (densities[0], densities[-1]) == (1.0, pytest.approx(density, abs=2e-6))
    assert all(0 < a - b <= step + 3e-6 for a, b in pairwise(densities))


def test_a_target_is_a_share() -> None:
    with pytest.raises(InputError, match=r"^density is 0; it must be in \(0, 1\]"):
        stepwise(0)
