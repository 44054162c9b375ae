"""How many weights are worth their time."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.fedprune import RiskPerTime


def test_by_hand() -> None:
    """Four weights; the second, of importance 1, stays anyway; c0 = 1/2.

    1 / (.5 + .25) = 1.33; with 8: 9 / 1 = 9; with 6: 15 / 1.25 = 12; with 3: 18 / 1.5 = 12 again,
    which is no more: three weights.
    """
    importance = torch.tensor([8.0, 1.0, 6.0, 3.0])
    protected = torch.tensor([False, True, False, False])
    assert RiskPerTime(fixed=0.5)(importance, protected) == 3
    # With 1/4: 1 / .5 = 2, 9 / .75 = 12, 15 / 1 = 15, 18 / 1.25 = 14.4.
    assert RiskPerTime(fixed=0.25)(importance, protected) == 3
    # A round that takes long anyway may as well train all: 18 / 11 is the most.
    assert RiskPerTime(fixed=10.0)(importance, protected) == 4


def test_weights_that_are_worth_nothing_go() -> None:
    assert RiskPerTime()(torch.zeros(5), torch.zeros(5, dtype=torch.bool)) == 0
    assert RiskPerTime()(torch.zeros(5), torch.ones(5, dtype=torch.bool)) == 5


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([0.1, 0.5, 2.0]),
)
def test_no_other_set_gains_more_per_time(weights: list[tuple[int, bool]], fixed: float) -> None:
    """Against all sets that hold the protected weights."""
    importance = torch.tensor([float(g) for g, _ in weights])
    protected = torch.tensor([stays for _, stays in weights])
    free = [float(g) for g, stays in weights if not stays]
    base = float(importance[protected].sum())
    staying = int(protected.sum())

    def quotient(chosen: tuple[float, ...]) -> float:
        time = fixed + (staying + len(chosen)) / len(weights)
        return (base + sum(chosen)) / time

    sets = [s for n in range(len(free) + 1) for s in itertools.combinations(free, n)]
    count = RiskPerTime(fixed)(importance, protected) - staying
    mine = quotient(tuple(sorted(free, reverse=True)[:count]))
    assert mine == pytest.approx(max(quotient(s) for s in sets))


def test_a_round_that_takes_no_time_is_refused() -> None:
    with pytest.raises(InputError, match=r"^fixed is 0; it must be above 0\.$"):
        RiskPerTime(fixed=0)
