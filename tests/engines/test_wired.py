"""Every message through real bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, reports, tensors

from fedgrove import methods, trees
from fedgrove.core import Packet
from fedgrove.engines import Serial, Wired, choose
from fedgrove.errors import EngineError
from fedgrove.runs.rounds import plan
from fedgrove.wire.codec import Dense, Known, Smallest
from fedgrove.wire.held import Held


def test_it_has_a_name_on_the_command_line() -> None:
    assert isinstance(choose("wired"), Wired)


@pytest.mark.parametrize(
    "method",
    [methods.FixedPrune(codec=Smallest()), methods.CAAFP(phases=(1, 1, 2), clusters=2, every=1)],
    ids=["fixedprune", "ca-afp"],
)
def test_it_is_serial_in_results_and_in_bytes_over_a_whole_run(method: Any, tmp_path: Path) -> None:
    """CA-AFP regrows weights: a zero with a sign would be sent as other bytes."""
    results = []
    for engine in (Serial(), Wired()):
        run = make_run(method, tmp_path / engine.name, dtype=torch.float32, rounds=4)
        state = run.initial_state
        costs = []
        while state.round < run.rounds:
            answers = list(reports(run, engine, plan(run, state)))
            costs.append([report.cost for report in answers])
            state = run.method.fold(state, answers)
        results.append((tensors(state), costs))
    (serial, serial_costs), (wired, wired_costs) = results
    assert trees.identical(serial, wired)
    assert serial_costs == wired_costs


@dataclass(frozen=True)
class Flattering(Dense):
    """Claims one byte less than it writes."""

    def cost(self, packet: Packet, known: Known | None = None) -> Mapping[str, int]:
        cost = dict(super().encode(packet, known).cost)
        cost["values"] -= 1
        return cost


def test_a_count_that_is_not_the_length_of_the_bytes_is_an_error(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(codec=Flattering()), tmp_path)
    with pytest.raises(EngineError, match=r"a task of \d+ bytes was counted as \d+ bytes"):
        list(reports(run, Wired(), plan(run, run.initial_state)))


def test_a_resumed_run_sends_what_an_uninterrupted_one_sends(tmp_path: Path) -> None:
    run = make_run(methods.FixedPrune(), tmp_path, dtype=torch.float32, rounds=4, cohort=4)
    state = run.initial_state
    first = Wired()
    for _ in range(2):
        state = run.method.fold(state, list(reports(run, first, plan(run, state))))
    assert run.held.masks
    other = replace(run, held=Held(run.held.masks))
    tasks = plan(run, state)
    # A new engine, as after a resume, and the old one.
    resumed = list(reports(other, Wired(), tasks))
    uninterrupted = list(reports(run, first, tasks))
    assert [r.cost for r in resumed] == [r.cost for r in uninterrupted]


def test_a_client_that_holds_another_mask_is_sent_the_whole_one(tmp_path: Path) -> None:
    """After a map that broke, the server is rolled back and the client is not."""
    run = make_run(methods.FixedPrune(), tmp_path, dtype=torch.float32, rounds=4, cohort=4)
    engine = Wired()
    state = run.initial_state
    for _ in range(2):
        state = run.method.fold(state, list(reports(run, engine, plan(run, state))))
    for key, mask in run.held.masks.items():
        run.held.masks[key] = {name: ~leaf for name, leaf in mask.items()}
    tasks = plan(run, state)
    again = list(reports(run, engine, tasks))
    assert len(again) == len(tasks)
    assert all(report.cost["down"].get("mask", 0) > 0 for report in again)
