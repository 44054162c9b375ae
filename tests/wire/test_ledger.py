"""What a table shows."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.core import Report
from fedgrove.runs.scoring import spread
from fedgrove.wire.ledger import Ledger, causes

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


def test_ledger_adds_by_direction_and_part() -> None:
    ledger = Ledger()
    reports = [
        Report(0, cost={"up": {"values": 10, "header": 2}, "down": {"values": 5}}),
        Report(1, cost={"up": {"values": 1, "mask": 4}}),
        Report(2),
    ]
    assert list(ledger.tally(iter(reports))) == reports
    # up: values 10 + 1, header 2, mask 4: 17; down: 5
    assert ledger.totals() == {
        "bytes_up": 17,
        "bytes_down": 5,
        "bytes_up_parts": {"header": 2, "mask": 4, "values": 11},
        "bytes_down_parts": {"values": 5},
    }
    assert set(ledger.totals("x")) == {"x_up", "x_down", "x_up_parts", "x_down_parts"}


def test_ledger_counts_what_passed_not_what_is_to_come() -> None:
    ledger = Ledger()
    stream = ledger.tally(Report(k, cost={"up": {"values": 1}}) for k in range(3))
    next(stream)
    assert ledger.totals()["bytes_up"] == 1


def test_a_ledger_takes_anothers_totals_in_and_leaves_its_own_alone() -> None:
    ledger, cost = Ledger(), {"up": {"values": 1}, "down": {}}
    ledger.add(cost)
    ledger.add(cost)
    assert ledger.up == {"values": 2}
    assert cost == {"up": {"values": 1}, "down": {}}
    ledger.totals()["bytes_up_parts"].clear()  # type: ignore[union-attr]
    assert ledger.up == {"values": 2}


def test_causes_by_hand() -> None:
    lines = [
        {
            "counts": False,
            "bytes_up_parts": {"values": 5, "scores": 2, "header": 1},
            "bytes_down_parts": {"header": 1},
        },
        {
            "counts": True,
            "bytes_up_parts": {"values": 7, "scores": 3, "header": 1},
            "bytes_down_parts": {"mask": 4},
        },
        {
            "counts": True,
            "bytes_up_parts": {"codebook": 1, "indices": 2},
            "bytes_down_parts": {"values": 10},
        },
    ]
    # the exchange, whole: 5 + 2 + 1 + 1 = 9; values 7 + 1 + 2 + 10 = 20
    assert causes(lines) == {"exchanges": 9, "values": 20, "masks": 4, "evidence": 3, "headers": 1}
