"""Tiny runs of CA-AFP, and every exchange of a run in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.conftest import make_run, reports

from fedgrove.core import Report, Task
from fedgrove.engines import Serial
from fedgrove.methods import CAAFP
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.rounds import rounds
from fedgrove.runs.run import Run

CALM = LocalTraining(1, 8, Adam(1e-2, eps=1e-3))  # see tests/contracts/test_batched.py
SIZES = (20, 13, 24, 17, 9)


def method(**words: Any) -> CAAFP:
    return CAAFP(**({"local": CALM, "every": 1, "clusters": 2} | words))


def tiny(folder: Path, *, length: int | None = None, **words: Any) -> Run:
    own = {
        k: words.pop(k)
        for k in list(words)
        if k in ("net", "sizes", "cohort", "seed", "dtype", "options")
    }
    made = method(**words)
    chosen = {"sizes": SIZES, "cohort": 4} | own
    return make_run(made, folder, rounds=length or sum(made.phases), **chosen)


Filter = Callable[[list[Report]], list[Report]]


def exchanges(
    run: Run, keep: Filter = list, state: Any = None
) -> Iterator[tuple[Any, list[Task], list[Report], Any]]:
    """State before, tasks, reports and state after of every exchange."""
    loop = rounds(run, state)
    exchange = next(loop)
    while exchange.tasks:
        before, tasks = exchange.state, exchange.tasks
        answers = keep(list(reports(run, Serial(), tasks)))
        asked = {task.to: task for task in tasks}
        exchange = loop.send([(asked[report.of], report) for report in answers])
        assert not exchange.why_abandoned, exchange.why_abandoned
        assert not exchange.tally.refused, exchange.tally
        yield before, tasks, answers, exchange.state


def verbs(tasks: Iterable[Task]) -> set[str]:
    return {task.verb for task in tasks}


def counts(state: Any) -> dict[int, int]:
    """Weights in use, by group."""
    return {g: sum(int(m.sum()) for m in mask.values()) for g, mask in state.masks.items()}
