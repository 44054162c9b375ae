"""What is remembered of devices: sums of updates, switches, who is settled, who is forgotten."""

from __future__ import annotations

import pytest
import torch

from fedgrove.methods.fedapta import task_memory
from fedgrove.methods.fedapta.task_memory import (
    Trace,
    agreement,
    group_directions,
    has_switched,
    remembered,
)

NUMBERS = {"fade": 0.85, "settle": 0.5, "forget": 0.2}


def trace(*values: float) -> Trace:
    rows = torch.tensor(values)
    return Trace(rows, rows != 0)


def test_a_trace_by_hand() -> None:
    """(2, 0) + .5 · (1, 4) + .25 · (4, 0); there is a weight where there ever was one."""
    after = trace(2.0, 0.0).then(trace(1.0, 4.0), fade=0.5)
    assert after.total.tolist() == [2.5, 2.0]
    assert after.present.tolist() == [True, True]
    assert after.then(trace(4.0, 0.0), fade=0.5).total.tolist() == [3.5, 2.0]


def test_agreement_is_over_what_the_device_has() -> None:
    """(1, -) with (3, 4): over the first weight alone they are parallel."""
    assert agreement(trace(1.0, 0.0), torch.tensor([3.0, 4.0])) == pytest.approx(1.0)
    assert agreement(trace(1.0, 1.0), torch.tensor([0.0, 0.0])) == 0.0


def test_the_length_of_the_first_update_is_kept() -> None:
    """(3, 4) is 5 long, and so it stays."""
    first = trace(3.0, 4.0)
    after = first.then(trace(30.0, 40.0), fade=0.5).then(trace(1.0, 1.0), fade=0.5)
    assert first.first_length == after.first_length == pytest.approx(5.0)
    final = first.settled()
    assert (final.is_settled, final.first_length, final.total.tolist()) == (True, 5.0, [3.0, 4.0])
    assert not after.is_settled


def test_a_switch_by_hand() -> None:
    """The update (1, 2) has cosines .447 with east and .894 with north, .447 apart."""
    update, east, north = trace(1.0, 2.0), torch.tensor([5.0, 0.0]), torch.tensor([0.0, 1.0])
    long = 5**0.5
    assert has_switched(update, long, east, [north], margin=0.4)
    assert not has_switched(update, long, east, [north], margin=0.5)
    assert not has_switched(update, long, north, [east], margin=0.1)
    assert not has_switched(update, long, east, [], margin=0.1)


def test_a_short_update_is_no_switch() -> None:
    """Half as long as the first it counts half, .224; a longer one than the first counts once."""
    update, east, north = trace(1.0, 2.0), torch.tensor([5.0, 0.0]), torch.tensor([0.0, 1.0])
    twice = 2 * 5**0.5
    assert has_switched(update, twice, east, [north], margin=0.2)
    assert not has_switched(update, twice, east, [north], margin=0.23)
    assert not has_switched(update, 0.1, east, [north], margin=0.5)
    # A device that had not moved at all has nothing to be measured by.
    assert has_switched(update, 0.0, east, [north], margin=0.4)


def test_a_round_by_hand() -> None:
    """Devices 0 and 1 went east, 2 and 3 north, each by 4, and now

    0 goes east by 2, no less than half of its first: 4 + .85 · 2 = 5.7; 1 north by 4: it has
    switched, and is known by that alone; 2 north by 1: settled; 3 is away; 9 is new."""
    east, north = trace(4, 0.001), trace(0.001, 4)
    before = {0: east, 1: east, 2: north, 3: north}
    groups = {0: 0, 1: 0, 2: 1, 3: 1}
    updates = {0: trace(2, 0.001), 1: trace(0.001, 4), 2: trace(0.001, 1), 9: trace(1, 1)}
    after = remembered(before, groups, updates, **NUMBERS)
    # Who was away longest comes first.
    assert list(after) == [3, 0, 1, 2, 9]
    assert after[0].total[0].item() == pytest.approx(5.7)
    assert after[1] is updates[1]
    assert after[2].is_settled
    assert torch.equal(after[2].total, north.total)
    assert after[3] is north
    assert after[9] is updates[9]


def test_a_device_does_not_vouch_for_itself() -> None:
    """Device 0 has gone east by 8, 1, the other of its group, north by 4, and 2, of another, east.

    0 goes east again, by 8: its cosine is 1 with the other group and 0 with its own, which is 1
    alone. (With its own sum, (8, 4), it would be .894, less than .2 below the other group's.)
    """
    before = {0: trace(8, 0.001), 1: trace(0.001, 4), 2: trace(4, 0.001)}
    updates = {0: trace(8, 0.001)}
    after = remembered(before, {0: 0, 1: 0, 2: 1}, updates, **NUMBERS)
    assert after[0] is updates[0]


def test_a_device_alone_in_its_group_has_not_switched_to_it() -> None:
    """It agrees with its group's sum, which is its own, and with nobody else: its updates add up."""
    after = remembered({0: trace(1.0, 0.0)}, {0: 0}, {0: trace(1.0, 0.0)}, 0.5, 0.0, 0.2)
    assert after[0].total.tolist() == [1.5, 0.0]


def test_those_away_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_memory, "MOST_REMEMBERED", 2)
    before = {0: trace(1.0), 1: trace(1.0)}
    after = remembered(before, {0: 0, 1: 0}, {0: trace(1.0), 2: trace(1.0)}, **NUMBERS)
    assert list(after) == [0, 2]
    # Never those of this round.
    all_new = remembered(before, {0: 0, 1: 0}, {k: trace(1.0) for k in (5, 6, 7)}, **NUMBERS)
    assert list(all_new) == [5, 6, 7]


def test_directions_of_groups_by_hand() -> None:
    found = group_directions({0: trace(1, 2), 1: trace(3, 4), 2: trace(5, 6)}, {0: 7, 1: 7, 2: 8})
    assert {group: row.tolist() for group, row in found.items()} == {7: [4, 6], 8: [5, 6]}
