"""The loop of a run. ``rounds`` is a generator: the caller maps tasks, logs, checkpoints and stops.

::

    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        answers = engine.map((run, task) for task in exchange.tasks)
        exchange = loop.send(report for _, report in answers)

Several generators and one ``engine.map`` make runs in lockstep.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import seeds
from ..core import Report, Task
from ..errors import EngineError
from .run import Run


@dataclass(frozen=True)
class Exchange:
    """The tasks that follow from a state; no tasks once the last round is folded.

    ``refused`` says why reports of the previous exchange were left out.
    """

    state: Any
    tasks: list[Task]
    refused: tuple[str, ...] = ()


def rounds(run: Run, state: Any = None) -> Generator[Exchange, Iterable[Report], None]:
    """Plan, wait for the reports, gate and fold them, until ``run.rounds`` rounds are done.

    With ``state``, continues from there: randomness depends on the round, not on what happened
    before it.
    """
    if state is None:
        state = run.initial_state
    refused: list[str] = []
    while state.round < run.rounds:
        tasks = plan(run, state)
        reports = yield Exchange(state, tasks, tuple(refused))
        refused = []
        # The gate is lazy: it fills `refused` while `fold` draws reports through it.
        state = run.method.fold(state, gated(run, reports, refused, tasks))
    yield Exchange(state, [], tuple(refused))


def plan(run: Run, state: Any) -> list[Task]:
    """The tasks of the next exchange, stamped with the round."""
    tasks = run.method.plan(state, draw_cohort(run, state.round))
    return [replace(task, round=state.round) for task in tasks]


def draw_cohort(run: Run, round: int) -> list[int]:
    """The clients of a round: drawn without replacement, in order of their ids."""
    rng = seeds.numpy_rng(run.seed, round, "cohort")
    drawn = rng.choice(sorted(run.infos), run.cohort, replace=False)
    return sorted(int(k) for k in drawn)


def gated(
    run: Run, reports: Iterable[Report], refused: list[str], tasks: Sequence[Task] = ()
) -> Iterator[Report]:
    """The reports on ``tasks`` that a method may see.

    The reasons why others were refused are appended to ``refused``.
    """
    sent = {task.to: task.send for task in tasks}
    usable = 0
    for report in reports:
        reason = run.gate.refuses(report, run.net.layout, run.infos, sent.get(report.of))
        if reason is None:
            usable += 1
            yield report
        else:
            refused.append(reason)
    if not usable:
        cause = f": {refused[-1]}" if refused else "."
        raise EngineError(f"no usable report came back, so there is nothing to fold{cause}")


def evaluation(run: Run, state: Any, verb: str = "evaluate") -> list[Task]:
    """Tasks that have every client score the model it would use now."""
    tasks = []
    for k in run.infos:
        model = run.method.deliver(state, k)
        tasks.append(Task(k, model, verb=verb, round=state.round))
    return tasks
