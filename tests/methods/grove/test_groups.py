"""Grove's server with several groups, by hand: their models, which kind is better, when they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run
from torch import Tensor

from fedgrove import trees
from fedgrove.core import ClientInfo, Packet, Report
from fedgrove.methods.grove import client_views
from fedgrove.methods.grove.method import ALL, Grove, State
from fedgrove.methods.grove.stability import Found, HeldOutGroups
from fedgrove.trees import Tree

EAST = torch.tensor([1.0, 0.0])
NORTH = torch.tensor([0.0, 1.0])


@dataclass(frozen=True)
class ByTurns(HeldOutGroups):
    """Every second client into the other group, whenever it is asked."""

    def __call__(self, first: Tensor, second: Tensor) -> Found:
        return Found([row % 2 for row in range(len(first))], 0.5)


def tree(*numbers: float, name: str = "w") -> Tree:
    return {name: torch.tensor(numbers)}


def state_of(**words: Any) -> State:
    known = {
        "round": 3,
        "rounds": 10,
        "up": 0.5,
        "down": 1.0,
        "models": {ALL: tree(0.0, 0.0)},
        "statistics": {ALL: {}},
        "client_views": client_views.first(tree(0.0, 0.0), ALL, False),
        "groups": {},
        "evidence": {},
        "merits": {},
        "structure": (),
        "scores": {},
        "narrow": {},
    }
    return State(**{**known, **words})


def report(client: int, examples: int, update: Sequence[float], **trees: Tree) -> Report:
    packets = {"change": Packet(tree(*update))}
    packets |= {name: Packet(values) for name, values in trees.items()}
    return Report(client, packets, examples)


def with_head(client: int, head: Tensor) -> Report:
    return report(client, 1, (0.0, 0.0), evidence={"scores.head": head})


def test_each_group_moves_by_its_own_mean() -> None:
    """Group 1: (1 (4 0) + 3 (0 4)) / 4 = (1 3), twice that from (1 1) is (3 7); its statistic is
    (1 · 4 + 3 · 8) / 4 = 7. Group 2: twice (1 1) from (2 2), and 5. The others' model stays."""
    models = {ALL: tree(0.0, 0.0), 1: tree(1.0, 1.0), 2: tree(2.0, 2.0)}
    statistics = {group: tree(9.0, name="s") for group in models}
    state = state_of(models=models, statistics=statistics, groups={5: 1, 6: 1, 7: 2})
    given = [
        report(5, 1, (4.0, 0.0), statistics=tree(4.0, name="s")),
        report(7, 2, (1.0, 1.0), statistics=tree(5.0, name="s")),
        report(6, 3, (0.0, 4.0), statistics=tree(8.0, name="s")),
    ]
    method = Grove(up=0.5, down=0.9, step=2.0, own="none")
    after = method.fold(state, given)
    moved = {group: model["w"].tolist() for group, model in after.models.items()}
    assert moved == {ALL: [0.0, 0.0], 1: [3.0, 7.0], 2: [4.0, 4.0]}
    found = {group: leaf["s"].tolist() for group, leaf in after.statistics.items()}
    assert found == {ALL: [9.0], 1: [7.0], 2: [5.0]}
    # What a client is sent is its own group's: of (3 7) and of (2 2) - (1 1), which it has.
    sent = {client: method.plan(after, [client])[0].send for client in (5, 8)}
    assert sent[5]["statistics"].values["s"].tolist() == [7.0]
    assert sent[8]["statistics"].values["s"].tolist() == [9.0]
    assert sent[8]["change"].values["w"].tolist() == [0.0, 0.0]


def test_a_channel_counts_for_those_who_have_it(tmp_path: Path) -> None:
    """Client 2 lacks channels, and says 6 of the others, on 30 examples; client 0 says 2 of all, on 10:
    (10 · 2 + 30 · 6) / 40 = 5 of what both have, and 2 of the rest."""
    run = make_run(Grove(multiple=1, step=1.0, own="none"), tmp_path, net="har-cnn")
    clients = dict(run.federation.clients)
    clients[2] = replace(clients[2], info=ClientInfo(30, speed=0.4))
    run = replace(run, federation=replace(run.federation, clients=clients))
    state = run.initial_state
    (task,) = run.method.plan(state, [2])
    mask = task.send["change"].mask or {}
    before = state.models[ALL]
    wide = {name: torch.full_like(leaf, 2.0) for name, leaf in before.items()}
    narrow = trees.apply_mask({name: 3 * leaf for name, leaf in wide.items()}, mask)
    given = [
        Report(0, {"change": Packet(wide)}, 10),
        Report(2, {"change": Packet(narrow, mask)}, 30),
    ]
    after = run.method.fold(state, given).models[ALL]
    for name, leaf in before.items():
        expected = torch.where(mask[name], leaf + 5.0, leaf + 2.0)
        torch.testing.assert_close(after[name], expected)
    assert not all(bool(kept.all()) for kept in mask.values())
    # Of what nobody has nothing changes.
    alone = run.method.fold(state, given[1:]).models[ALL]
    for name, leaf in before.items():
        torch.testing.assert_close(alone[name], torch.where(mask[name], leaf + 6.0, leaf))


def test_models_move_by_a_step_too() -> None:
    """Where both directions send the model itself: from (4 -2) to (5 -3) twice is (6 -4)."""
    method = Grove(up=1.0, down=1.0, step=2.0, home=False, own="none")
    state = state_of(models={ALL: tree(4.0, -2.0)})
    given = [Report(0, {"model": Packet(tree(5.0, -3.0))}, 5)]
    assert method.fold(state, given).models[ALL]["w"].tolist() == [6.0, -4.0]


@pytest.mark.parametrize(("client", "is_pulled"), [(5, True), (6, False), (7, False)])
def test_each_group_has_its_own_better_kind(client: int, is_pulled: bool) -> None:
    """In group 1 personal models did better, in group 2 and before that offsets."""
    groups = {ALL: tree(0.0), 1: tree(0.0), 2: tree(0.0)}
    state = state_of(
        models=groups,
        statistics={group: {} for group in groups},
        client_views=client_views.first(tree(0.0), ALL, False),
        groups={5: 1, 6: 2},
        merits={ALL: (0.2, 4.0), 1: (-0.1, 4.0), 2: (0.1, 4.0)},
    )
    choice = Grove().deliver(state, client)["choice"].values["pulled"]
    assert choice.tolist() == [is_pulled]


def known(*clients: int, times: int = 2) -> dict[int, tuple[int, Tensor, Tensor]]:
    return {k: (times, *[EAST if k % 2 else NORTH] * 2) for k in clients}


def test_groups_must_show_twice_and_keep_what_they_know() -> None:
    method = Grove(finding=ByTurns(least=0.4))
    state = state_of(evidence=known(0, 1, 2, 3), merits={ALL: (-0.5, 2.0)})
    given = [with_head(0, NORTH), with_head(1, EAST)]
    once = method.fold(state, given)
    assert (once.groups, once.shared) == ({}, 0.5)
    twice = method.fold(once, given)
    assert twice.groups == {0: 1, 1: 2, 2: 1, 3: 2}
    assert twice.divided == 5
    assert twice.merits == {1: (-0.5, 2.0), 2: (-0.5, 2.0)}
    assert twice.models.keys() == {ALL, 1, 2}
    # What was too little the last time does not count as once.
    assert method.fold(replace(state, shared=0.39), given).groups == {}


def test_nine_tenths_of_the_clients_must_be_known() -> None:
    """Of ten clients nine have reported twice, or eight; of four one has not; three are too few."""
    method = Grove(finding=ByTurns())
    given = [with_head(0, NORTH), with_head(1, EAST)]
    cases = ((9, 1, True), (8, 2, False), (3, 1, False), (4, 0, True), (3, 0, False))
    for ready, waiting, is_divided in cases:
        evidence = known(*range(ready))
        evidence |= known(*range(ready, ready + waiting), times=1)
        state = state_of(evidence=evidence, shared=0.5)
        assert bool(method.fold(state, given).groups) == is_divided, (ready, waiting)


def test_a_client_that_reports_moves_to_those_who_do_as_it_does() -> None:
    """Client 4 went east twice, and is in the group that goes north; client 5 does not report."""
    groups = {0: 1, 2: 1, 4: 1, 5: 1, 1: 2, 3: 2}
    evidence = known(0, 2, 1, 3) | {4: (2, EAST, EAST), 5: (2, EAST, EAST)}
    models = {group: tree(0.0, 0.0) for group in (ALL, 1, 2)}
    statistics: dict[int, Tree] = {group: {} for group in models}
    state = state_of(models=models, statistics=statistics, groups=groups, evidence=evidence)
    after = Grove(own="none").fold(state, [with_head(4, EAST), with_head(0, NORTH)])
    assert after.groups == {**groups, 4: 2}
