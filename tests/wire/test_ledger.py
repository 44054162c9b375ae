"""Adding up what messages cost."""

from __future__ import annotations

from fedgrove.core import Lost, Report, Task
from fedgrove.wire.ledger import Ledger, sum_by_cause


def test_ledger_adds_by_direction_and_part() -> None:
    ledger = Ledger()
    answers = [
        (Task(0), Report(0, cost={"up": {"values": 10, "header": 2}, "down": {"values": 5}})),
        (Task(1), Lost(1, "late", cost={"up": {"values": 1, "mask": 4}})),
        (Task(2), Report(2)),
    ]
    assert list(ledger.tally(iter(answers))) == answers
    # up: values 10 + 1, header 2, mask 4: 17; down: 5
    assert ledger.totals() == {"bytes_up": 17, "bytes_down": 5}
    assert ledger.parts() == {
        "bytes_up_parts": {"header": 2, "mask": 4, "values": 11},
        "bytes_down_parts": {"values": 5},
    }
    assert set(ledger.totals("x")) == {"x_up", "x_down"}
    assert set(ledger.parts("x")) == {"x_up_parts", "x_down_parts"}


def test_ledger_counts_what_passed_not_what_is_to_come() -> None:
    ledger = Ledger()
    stream = ledger.tally((Task(k), Report(k, cost={"up": {"values": 1}})) for k in range(3))
    next(stream)
    assert ledger.totals()["bytes_up"] == 1


def test_a_ledger_takes_anothers_totals_in_and_leaves_its_own_alone() -> None:
    ledger, cost = Ledger(), {"up": {"values": 1}, "down": {}}
    ledger.add(cost)
    ledger.add(cost)
    assert ledger.up == {"values": 2}
    assert cost == {"up": {"values": 1}, "down": {}}
    ledger.parts()["bytes_up_parts"].clear()
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
    assert sum_by_cause(lines) == {
        "exchanges": 9,
        "values": 20,
        "masks": 4,
        "evidence": 3,
        "headers": 1,
    }
