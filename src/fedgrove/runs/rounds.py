"""The loop of a run. ``rounds`` is a generator: the caller maps tasks, logs, checkpoints and stops.

::

    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        answers = engine.map((run, task) for task in exchange.tasks)
        exchange = loop.send((task, answer) for (_, task), answer in answers)

Several generators and one ``engine.map`` make runs in lockstep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import seeds
from ..core import Answer, Server, Task, WithServerTraining, check_names
from ..errors import EngineError
from ..methods import name_of
from .admission import Admission, Tally, TooFewReports
from .guard import calling, check_state, noted
from .privacy import check_tasks
from .run import Run, again

Answers = Iterable[tuple[Task, Answer]]

MOST_EXCHANGES = 100
"""So many exchanges may come before a round is complete; our own methods need a few."""


@dataclass(frozen=True)
class Exchange:
    """The tasks that follow from a state; no tasks once the last round is folded.

    ``tally`` says which answers of the previous exchange were left out. If they were too many, that
    exchange was abandoned: the state is the same, and ``attempt`` counts how often.
    """

    state: Any
    tasks: list[Task]
    attempt: int = 0
    tally: Tally = field(default_factory=Tally)
    why_abandoned: str = ""
    number: int = 0
    """How many exchanges of the run came before, those that were abandoned among them."""


def rounds(
    run: Run, state: Any = None, attempt: int = 0, number: int = 0
) -> Generator[Exchange, Answers, None]:
    """Plan, wait for the answers, gate and fold them, until ``run.rounds`` rounds are done.

    With ``state``, ``attempt`` and ``number`` of an exchange, continues from there: randomness
    depends on these, not on what happened before.
    """
    if state is None:
        state = run.initial_state
    tally = Tally()
    why_abandoned = ""
    exchanges = 0
    while state.round < run.rounds:
        tasks = plan(run, state, attempt)
        answers = yield Exchange(state, tasks, attempt, tally, why_abandoned, number)
        number += 1
        admission = Admission(run, tasks, run.quorum)
        tally = admission.tally
        try:
            # Lazy: reports pass the gate while `fold` draws them through it.
            broken: list[BaseException] = []
            reports = noted(admission.reports(answers), broken)
            with calling(run.method, "fold", others=broken):
                folded = run.server.fold(state, reports)
            check_state(run.method, "fold", folded)
            # A method that stops early has not seen all: the rest still counts towards the quorum.
            deque(reports, maxlen=0)
        except TooFewReports as error:
            attempt += 1
            why_abandoned = str(error)
            continue
        admission.settle()
        exchanges = exchanges_of_a_round(run, state, folded, exchanges)
        state = folded
        if isinstance(run.server, WithServerTraining):
            state = train_server(run, run.server, state, number)
        attempt = 0
        why_abandoned = ""
    yield Exchange(state, [], 0, tally, number=number)


def train_server(run: Run, server: WithServerTraining[Any], state: Any, number: int) -> Any:
    """The state after the server's own training, the same to the bit wherever clients train.

    ``number`` exchanges are done: of those that are no rounds, several may end in the same round.
    """
    seed = seeds.derive(run.seed, state.round, "server", number)
    with seeds.single_thread(), seeds.preserve_rng():
        # For dropout, which draws from torch's global generator, as on a client.
        torch.default_generator.manual_seed(seed)
        with calling(run.method, "train_server"):
            trained = server.train_server(state, Server(run.nets, seed))
    check_state(run.method, "train_server", trained)
    return trained


def exchanges_of_a_round(run: Run, before: Any, after: Any, exchanges: int) -> int:
    """How many exchanges the round at hand has taken, after one more; 0 if that completed it.

    Too many are refused: a method whose ``fold`` forgets to count the round would never end.
    """
    if after.round > before.round:
        return 0
    if after.round < before.round:
        raise EngineError(
            f"{name_of(run.method)} went back from round {before.round} to {after.round}; its fold "
            "must give a state with the same round or a later one."
        )
    if exchanges + 1 >= MOST_EXCHANGES:
        raise EngineError(
            f"{name_of(run.method)} has made {MOST_EXCHANGES} exchanges without completing round "
            f"{after.round + 1}; its fold must give a state with a round of one more when a round "
            "is done: replace(state, round=state.round + 1)."
        )
    return exchanges + 1


def plan(run: Run, state: Any, attempt: int = 0) -> list[Task]:
    """The tasks of the next exchange, stamped with round, attempt and version of memory."""
    cohort = draw_cohort(run, state.round, attempt)
    with calling(run.method, "plan"):
        planned = run.server.plan(state, cohort)
        clients = [task.to for task in planned]
    if not clients:
        raise EngineError(f"the method planned no task for round {state.round}.")
    if len(set(clients)) < len(clients):
        raise EngineError("the method planned two tasks for one client in one exchange.")
    tasks = [stamped(run, task, state.round, attempt) for task in planned]
    check_tasks(run, tasks)
    return tasks


def stamped(run: Run, task: Task, round: int, attempt: int = 0) -> Task:
    """A task with what the round loop knows of it."""
    check_names(task.send, "a packet")
    return replace(task, round=round, attempt=attempt, memory=run.memory.files.get(task.to))


def draw_cohort(run: Run, round: int, attempt: int = 0) -> list[int]:
    """The clients of a round: drawn without replacement, in order of their ids.

    Another attempt draws others: those who could not be reached may still be away.
    """
    rng = seeds.numpy_rng(run.seed, round, "cohort", *again(attempt))
    ids = run.federation.ids
    # Places are drawn, not ids: for a few of a million this takes no longer than for a few of ten.
    places = rng.choice(len(ids), run.cohort, replace=False)
    return sorted(ids[int(place)] for place in places)


def evaluation(run: Run, state: Any, verb: str = "evaluate") -> list[Task]:
    """Tasks that have every client that is scored score the model it would use now."""
    tasks = []
    for k in run.scored:
        model = run.deliver(state, k)
        tasks.append(stamped(run, Task(k, model, verb=verb), state.round))
    return tasks
