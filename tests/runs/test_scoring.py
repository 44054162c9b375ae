"""Figures over clients."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.runs.scoring import spread

ACCURACIES = st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=35)


def test_spread_of_four_clients() -> None:
    # mean (0.2 + 0.4 + 0.9 + 0.5) / 4 = 0.5
    # variance ((-0.3)^2 + (-0.1)^2 + 0.4^2 + 0) / 4 = (0.09 + 0.01 + 0.16) / 4 = 0.065, its root 0.25495098 (over
    # clients: divided by K, not K - 1); the worst tenth of four is ceil(0.4) = 1 client
    assert spread([0.2, 0.4, 0.9, 0.5]) == {
        "accuracy_mean": 0.5,
        "accuracy_std": 0.25495098,
        "accuracy_worst": 0.2,
        "accuracy_worst10": 0.2,
    }


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_tenth_is_rounded_up(clients: int, tenth: int) -> None:
    # accuracies 0/100, 1/100, ...: the worst n of them have the mean (n - 1) / 200
    found = spread([i / 100 for i in reversed(range(clients))], prefix="a")
    assert found["a_worst10"] == pytest.approx((tenth - 1) / 200)
    assert found["a_worst"] == 0


def test_spread_of_nobody_is_not_a_number() -> None:
    found = spread([])
    assert set(found) == {"accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_worst10"}
    assert all(math.isnan(v) for v in found.values())


@given(ACCURACIES)
def test_spread_agrees_with_the_standard_library_in_any_order(accuracies: list[float]) -> None:
    found = spread(accuracies)
    assert found["accuracy_mean"] == pytest.approx(fmean(accuracies), abs=1e-8)
    assert found["accuracy_std"] == pytest.approx(pstdev(accuracies), abs=1e-7)
    assert found["accuracy_worst"] == round(min(accuracies), 8)
    assert found["accuracy_worst"] <= found["accuracy_worst10"] <= found["accuracy_mean"] + 1e-8
    assert found == spread(accuracies[::-1])
