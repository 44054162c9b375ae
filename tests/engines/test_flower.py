"""Flower as an engine, over real Flower messages in this process; and on Ray, where that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, remembered, small, tensors
from tests.engines.loopback import looped, payload

from fedgrove import methods, trees
from fedgrove.core import Answer, AnyMethod, Engine, Lost, Task
from fedgrove.engines import Serial
from fedgrove.engines.faulty import Faulty
from fedgrove.parts.gate import Gate
from fedgrove.runs.faults import Faults
from fedgrove.runs.rounds import evaluation, rounds
from fedgrove.runs.run import Run
from fedgrove.wire.ledger import Ledger

FEW = ("ca-afp", "heterofl", "ditto", "fedmask")
EVERY = [
    pytest.param(small(name), id=name, marks=() if name in FEW else pytest.mark.slow)
    for name in methods.names()
]
ANY_LENGTH = Gate(norm=0)


def played(run: Run, engine: Engine) -> tuple[trees.Tree, list[Any], Any]:
    """The final state with what clients remember; of all answers what they are and cost; and the groups."""
    seen: list[Any] = []

    def noted(tasks: list[Task]) -> Iterator[tuple[Task, Answer]]:
        for task, answer in answers(run, engine, tasks):
            macs = getattr(answer, "macs", 0)
            seen.append((type(answer).__name__, answer.of, answer.cost, macs))
            yield task, answer

    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(noted(exchange.tasks))
        assert exchange.attempt < 5, exchange.why_abandoned
    state = exchange.state
    list(noted(evaluation(run, state, "finetune")))
    return {**tensors(state), **remembered(run)}, seen, getattr(state, "groups", None)


@pytest.mark.parametrize("method", EVERY)
def test_a_loop_of_real_messages_is_serial(method: AnyMethod, tmp_path: Path) -> None:
    """Masks, groups, weights, bytes and what is remembered, with clients that crash or answer too late."""
    results = []
    for where in ("serial", "flower"):
        faults = Faults.parse("crash=0.2,late=0.1")
        run = make_run(method, tmp_path / where, rounds=3, faults=faults, gate=ANY_LENGTH)
        engine: Engine = Serial() if where == "serial" else looped(run)
        results.append((*played(run, Faulty(engine)), run.held.state()["clients"]))
    (serial, serial_seen, groups, held), (flower, flower_seen, groups2, held2) = results
    assert trees.identical(serial, flower)
    assert serial_seen == flower_seen
    assert groups == groups2
    assert held == held2
    assert {kind for kind, *_ in serial_seen} >= {"Report"}
