"""Every message through real bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, reports, tensors

from fedgrove import methods, trees
from fedgrove.core import Packet
from fedgrove.engines import Serial, Wired, choose
from fedgrove.errors import EngineError
from fedgrove.runs.rounds import plan
from fedgrove.wire.codec import Dense, Known, Smallest


def test_it_has_a_name_on_the_command_line() -> None:
    assert isinstance(choose("wired"), Wired)


def test_it_is_serial_in_results_and_in_bytes_over_a_whole_run(tmp_path: Path) -> None:
    method = replace(methods.FixedPrune(), codec=Smallest())
    states = []
    for engine in (Serial(), Wired()):
        run = make_run(method, tmp_path / engine.name, dtype=torch.float32, rounds=3)
        states.append(tensors(play(run, engine)))
    assert trees.identical(*states)


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


def test_a_client_that_holds_nothing_is_sent_the_whole_mask(tmp_path: Path) -> None:
    """After a resume the server remembers what it sent; the clients of a new engine hold nothing."""
    run = make_run(methods.FixedPrune(), tmp_path, dtype=torch.float32, rounds=4, cohort=4)
    first = Wired()
    state = run.initial_state
    for _ in range(2):
        state = run.method.fold(state, reports(run, first, plan(run, state)))
    assert run.held.masks
    tasks = plan(run, state)
    again = list(reports(run, Wired(), tasks))
    assert len(again) == len(tasks)
    # What is not held must be sent: a mask costs bytes again.
    assert all(report.cost["down"].get("mask", 0) > 0 for report in again)
