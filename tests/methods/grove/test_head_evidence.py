"""Evidence from heads: what is unlike others, what is kept of it, who is near to whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedgrove.methods.grove import head_evidence
from fedgrove.methods.grove.head_evidence import (
    gathered,
    halves,
    head_change,
    nearest_group,
    regrouped,
    unlike_others,
)

EAST = torch.tensor([1.0, 0.0])
NORTH = torch.tensor([0.0, 1.0])


class Heads:
    """A layout of which only the head is asked."""

    head = ("fc.weight", "fc.bias")


def test_the_larger_half_of_a_heads_change_as_signs() -> None:
    """Changes 4, -1, 0.5 and -2: half of four are 4 and -2, of mean magnitude 3."""
    before = {"fc.weight": torch.tensor([[1.0, 1.0]]), "fc.bias": torch.tensor([0.0, 0.0])}
    after = {"fc.weight": torch.tensor([[5.0, 0.0]]), "fc.bias": torch.tensor([0.5, -2.0])}
    found = head_change({"model": before, "local": after}, Heads())  # type: ignore[arg-type]
    assert found.tolist() == [3.0, 0.0, 0.0, -3.0]


def test_unlike_others_by_hand() -> None:
    """The mean of (3 0), (0 3) and (0 0) is (1 1): (2 -1), (-1 2), (-1 -1), of length 1."""
    found = unlike_others({1: 3 * EAST, 2: 3 * NORTH, 3: 0 * EAST})
    assert found[1].tolist() == pytest.approx([2 / 5**0.5, -1 / 5**0.5])
    assert found[3].tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5)])
    assert unlike_others({}) == {}
    assert unlike_others({4: EAST})[4].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("huge", [1e6, 1e30, 1e38])
def test_one_long_head_is_shortened(huge: float) -> None:
    """Of lengths 1, 1, 1, 1 and a huge one the median is 1: it counts as one of length 5."""
    heads = {k: EAST if k < 2 else NORTH for k in range(4)}
    spoilt = unlike_others({**heads, 9: huge * NORTH})
    expected = unlike_others({**heads, 9: 5 * NORTH})
    for client, vector in expected.items():
        assert spoilt[client].tolist() == pytest.approx(vector.tolist(), abs=1e-6)
    # One that is only longer than others stays as it is.
    assert torch.equal(unlike_others({**heads, 9: 4 * NORTH})[9], NORTH * 0 + unlike(heads, 4))


def unlike(heads: dict[int, Tensor], times: float) -> Tensor:
    """(0 4) less the mean of all five, ((2 0) + (0 2) + (0 4)) / 5, of length 1."""
    mean = torch.stack([*heads.values(), times * NORTH]).mean(0)
    return torch.nn.functional.normalize(times * NORTH - mean, dim=0)


def test_evidence_by_hand() -> None:
    """The third report joins the first: .7 of it and the new one."""
    evidence = gathered({}, {7: EAST}, 0.3, 10)
    evidence = gathered(evidence, {7: NORTH}, 0.3, 10)
    evidence = gathered(evidence, {7: NORTH, 2: EAST}, 0.3, 10)
    assert list(evidence) == [2, 7]
    count, odd, even = evidence[7]
    assert count == 3
    assert odd.tolist() == pytest.approx([0.7, 1.0])
    assert even.tolist() == [0.0, 1.0]
    ready, first, second = halves(evidence)
    assert ready == [7]
    assert first.tolist() == [odd.tolist()]
    assert second.tolist() == [even.tolist()]
    # The fourth joins the second in the same way, and the first and third stay.
    count, odd, even = gathered(evidence, {7: EAST}, 0.3, 10)[7]
    assert count == 4
    assert odd.tolist() == pytest.approx([0.7, 1.0])
    assert even.tolist() == pytest.approx([1.0, 0.7])


def test_evidence_of_a_few_clients_only() -> None:
    evidence = gathered({}, {1: EAST, 2: NORTH, 3: EAST}, 0.3, 2)
    assert list(evidence) == [1, 2]
    after = gathered(evidence, {2: NORTH, 3: EAST}, 0.3, 2)
    assert [count for count, _, _ in after.values()] == [1, 2]


KNOWN = {
    1: (2, EAST, EAST),
    2: (2, EAST, EAST),
    3: (2, NORTH, NORTH),
    4: (2, NORTH, NORTH),
    5: (2, NORTH, NORTH),
    6: (1, EAST, 0 * EAST),
}
GROUPS = {1: 1, 2: 1, 3: 2, 4: 2, 5: 1}


def test_a_client_moves_to_those_who_do_as_it_does() -> None:
    """Client 5 goes north with the second group; it moves with its own report, not before."""
    assert regrouped(GROUPS, KNOWN, {1: EAST}) == GROUPS
    assert regrouped(GROUPS, KNOWN, {5: NORTH}) == {**GROUPS, 5: 2}
    # Where no evidence is kept, it may be otherwise with every report.
    joined = regrouped(GROUPS, KNOWN, {8: EAST})
    assert joined == {**GROUPS, 8: 1}
    assert regrouped(joined, KNOWN, {8: NORTH})[8] == 2
    members = {client: KNOWN[client] for client in GROUPS}
    assert nearest_group(NORTH, members, GROUPS) == 2


def test_of_three_clients_none_moves() -> None:
    """Client 5 goes north as client 3 does; with a fourth that is known well it moves."""
    groups = {1: 1, 3: 2, 5: 1}
    known = {client: KNOWN[client] for client in groups}
    assert regrouped(groups, known, {5: NORTH}) == groups
    more = {**groups, 4: 2}
    assert regrouped(more, {**known, 4: KNOWN[4]}, {5: NORTH}) == {**more, 5: 2}


@pytest.mark.parametrize(
    ("odd", "even"), [(EAST, 3 * NORTH), (3 * NORTH, EAST)], ids=["even", "odd"]
)
def test_the_sum_of_both_halves_decides(odd: torch.Tensor, even: torch.Tensor) -> None:
    """One half of what client 5 does is east, the other three times as far north."""
    known = {**KNOWN, 5: (2, odd, even)}
    assert regrouped(GROUPS, known, {5: EAST}) == {**GROUPS, 5: 2}


def test_a_newcomer_joins_by_direction_alone() -> None:
    """(.6 .8) is a cosine of .6 from three that go east and of .8 from one that goes north, however
    many they are. Of two members each counts once: 10 east and 1 north are (1 1), a cosine of .99."""
    known = dict.fromkeys((1, 2, 3), (2, EAST, EAST)) | {8: (2, NORTH, NORTH)}
    moved = torch.tensor([0.6, 0.8])
    assert nearest_group(moved, known, {1: 1, 2: 1, 3: 1, 8: 2}) == 2
    known = {1: (2, 10 * EAST, 10 * EAST), 2: (2, NORTH, NORTH), 8: (2, NORTH, NORTH)}
    assert nearest_group(moved, known, {1: 1, 2: 1, 8: 2}) == 1


def test_who_is_new_joins_with_its_first_report() -> None:
    """Client 6 goes east, with the first group; others who are new are no group to join."""
    assert regrouped(GROUPS, KNOWN, {6: EAST}) == {**GROUPS, 6: 1}
    several = {**KNOWN, 7: (2, EAST, EAST), 9: (2, EAST, EAST)}
    assert regrouped(GROUPS, several, {7: EAST, 9: EAST}) == {**GROUPS, 7: 1, 9: 1}


def test_not_all_who_joined_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's memory does not grow with its clients: who joined first is forgotten."""
    monkeypatch.setattr(head_evidence, "MOST_AT_ONCE", 2)
    groups = dict(GROUPS)
    for client in (11, 12, 11, 13):
        groups = regrouped(groups, KNOWN, {client: EAST})
    assert set(groups) == {*GROUPS, 11, 13}
