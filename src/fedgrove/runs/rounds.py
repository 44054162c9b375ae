"""The loop of a run: plan tasks, decide which answers count, fold them.

:func:`rounds` is a generator: the caller maps tasks, logs, writes checkpoints and stops::

    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        answers = engine.map((run, task) for task in exchange.tasks)
        exchange = loop.send((task, answer) for (_, task), answer in answers)

Several generators and one ``engine.map`` make runs in lockstep.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import seeds
from ..core import (
    SCORING_VERBS,
    Answer,
    Lost,
    Packet,
    Report,
    Server,
    Task,
    WithChangingDevices,
    WithServerTraining,
    check_names,
)
from ..errors import EngineError, FedgroveError, clean_text, spell_option
from ..methods import name_of
from .gate import FEW_LENGTHS, REFUSALS, Lengths, RecentLengths, Refusal, Ruler, malformed
from .guard import check_planned, check_sent, check_state, explain_errors, record_errors
from .memory import make_version
from .privacy import check_tasks
from .run import Run, attempt_seed

Answers = Iterable[tuple[Task, Answer]]

MOST_EXCHANGES = 100
"""The most exchanges that a round may take; the methods of this library need a few."""


@dataclass(frozen=True)
class Tally:
    """The clients whose answers were not folded, by reason."""

    lost: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, list[int]] = field(default_factory=dict)
    sentences: dict[str, str] = field(default_factory=dict)
    """The first sentence for each reason."""

    def add_lost(self, client: int, lost: Lost) -> None:
        """Count a task of the round that got no usable reply."""
        self.lost.setdefault(lost.reason, []).append(client)
        self._note(lost.reason, lost.detail)

    def add_refused(self, client: int, refusal: Refusal) -> None:
        """Count a report of the round that was refused."""
        self.refused.setdefault(refusal.reason, []).append(client)
        self._note(refusal.reason, refusal.sentence)

    def _note(self, reason: str, sentence: str) -> None:
        """Keep the first sentence for a reason; a part of it may be a client's own words."""
        self.sentences.setdefault(reason, clean_text(sentence))

    def to_line(self) -> dict[str, Any]:
        """Return the entries of a line of metrics.jsonl; none if all answers were folded."""
        entries: dict[str, dict[str, Any]] = {
            "lost": self.lost,
            "refused": self.refused,
            "why": self.sentences,
        }
        return {key: dict(sorted(value.items())) for key, value in entries.items() if value}


@dataclass(frozen=True)
class Exchange:
    """The tasks that follow from a state; no tasks after the last round.

    ``tally`` counts the answers of the previous exchange that were not folded. If there were too
    many, that exchange was abandoned: the state is unchanged, and ``attempt`` counts how often.
    """

    state: Any
    tasks: list[Task]
    attempt: int = 0
    tally: Tally = field(default_factory=Tally)
    why_abandoned: str = ""
    number: int = 0
    """The number of earlier exchanges of the run, abandoned ones included."""


def rounds(
    run: Run,
    state: Any = None,
    attempt: int = 0,
    number: int = 0,
    now: Callable[[], float] | None = None,
) -> Generator[Exchange, Answers, None]:
    """Loop over the rounds of a run: plan, wait for answers, check and fold them.

    Randomness depends on the arguments and not on what happened before, so that a loop can be
    continued from any exchange.

    Args:
        run: The run.
        state: The state to continue from; None: the initial state.
        attempt: How often the next exchange was abandoned before.
        number: The number of earlier exchanges.
        now: Returns the virtual second in which the next exchange begins, for methods that follow a
            bandwidth trace; None: they use the bandwidths before the first round.

    Yields:
        The next exchange; the caller sends the answers to its tasks. The last one has no tasks.

    Raises:
        EngineError: The method's plan or state cannot be used.
    """
    if state is None:
        state = run.initial_state
    tally = Tally()
    why_abandoned = ""
    exchanges = 0
    while state.round < run.rounds:
        if now is not None:
            state = follow_devices(run, state, now())
        tasks = plan(run, state, attempt)
        answers = yield Exchange(state, tasks, attempt, tally, why_abandoned, number)
        number += 1
        admission = Admission(run, tasks, run.quorum)
        tally = admission.tally
        try:
            # Lazy: reports pass the gate while `fold` draws them through it.
            passed_through: list[BaseException] = []
            reports = record_errors(admission.admit(answers), passed_through)
            with explain_errors(run.method, "fold", passed_through):
                folded = run.server.fold(state, reports)
            check_state(run.method, "fold", folded)
            # A method that stops early has not seen all: the rest still counts towards the quorum.
            deque(reports, maxlen=0)
        except TooFewReports as error:
            attempt += 1
            why_abandoned = str(error)
            continue
        admission.commit()
        exchanges = count_exchanges(run, state, folded, exchanges)
        state = folded
        if isinstance(run.server, WithServerTraining):
            state = _train_server(run, run.server, state, number)
        attempt = 0
        why_abandoned = ""
    yield Exchange(state, [], 0, tally, number=number)


def follow_devices(run: Run, state: Any, second: float) -> Any:
    """Return a run's state at the start of an exchange, after the server has looked at the devices.

    It depends on the trace and the second alone, so a resumed run plans the same exchange.
    """
    server = run.server
    if run.federation.trace is None or not isinstance(server, WithChangingDevices):
        return state
    with explain_errors(run.method, "follow_devices"):
        followed = server.follow_devices(state, run.federation.infos_at(second))
    check_state(run.method, "follow_devices", followed)
    return followed


def _train_server(run: Run, server: WithServerTraining[Any], state: Any, number: int) -> Any:
    """Return the state after the server's training, equal to the bit on every engine.

    The seed depends on ``number``, the exchanges so far: several may belong to one round.
    """
    seed = seeds.derive(run.seed, state.round, "server", number)
    with seeds.single_thread(), seeds.preserve_rng():
        # For dropout, which draws from torch's global generator, as on a client.
        torch.default_generator.manual_seed(seed)
        with explain_errors(run.method, "train_server"):
            trained = server.train_server(state, Server(run.nets, seed))
    check_state(run.method, "train_server", trained)
    return trained


def count_exchanges(run: Run, before: Any, after: Any, exchanges: int) -> int:
    """Return how many exchanges the current round has taken; 0 if the last one completed it.

    Raises:
        EngineError: There are too many: a method that forgets to count the round would never end.
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


# ---- planning ------------------------------------------------------------------------------------


def plan(run: Run, state: Any, attempt: int = 0) -> list[Task]:
    """Plan the tasks of a run's next exchange, with round, attempt and version of memory."""
    cohort = draw_cohort(run, state.round, attempt)
    with explain_errors(run.method, "plan"):
        planned = run.server.plan(state, cohort)
        check_planned(run.method, planned)
        clients = [task.to for task in planned]
    if not clients:
        raise EngineError(f"the method planned no task for round {state.round}.")
    if len(set(clients)) < len(clients):
        raise EngineError("the method planned two tasks for one client in one exchange.")
    tasks = [complete_task(run, task, state.round, attempt) for task in planned]
    check_tasks(run, tasks)
    return tasks


def plan_scoring(
    run: Run,
    state: Any,
    verb: str = "evaluate",
    packets: Mapping[int, Mapping[str, Packet]] | None = None,
) -> list[Task]:
    """Return the tasks in which clients score the models that they would use now.

    Args:
        run: The run.
        state: The current state.
        verb: "evaluate" or "finetune".
        packets: What clients are delivered, if that is known.
    """
    if packets is None:
        packets = run.deliver_to(state, run.scored)
    tasks = [Task(k, packets[k], verb=verb) for k in run.scored]
    return [complete_task(run, task, state.round) for task in tasks]


def complete_task(run: Run, task: Task, round: int, attempt: int = 0) -> Task:
    """Fill in what the round loop knows about a task."""
    check_sent(run.method, task)
    check_names(task.send, "a packet")
    return replace(task, round=round, attempt=attempt, memory=run.memory.files.get(task.to))


def draw_cohort(run: Run, round: int, attempt: int = 0) -> list[int]:
    """Draw the clients of a round without replacement; return them in order.

    Another attempt draws others: clients that could not be reached may still be away.
    """
    rng = seeds.numpy_rng(run.seed, round, "cohort", *attempt_seed(attempt))
    ids = run.federation.ids
    # Places are drawn, not ids: a few of a million take no longer than a few of ten.
    places = rng.choice(len(ids), run.cohort, replace=False)
    return sorted(ids[int(place)] for place in places)


# ---- which answers count -------------------------------------------------------------------------


class TooFewReports(FedgroveError):
    """An exchange in which fewer clients reported than the quorum; it is abandoned."""


def lose_unanswered(task: Task) -> Lost:
    """Return the loss of a round's task that the engine gave no answer for."""
    return Lost(task.to, "unanswered", f"the engine gave no answer for client {task.to}.")


class Admission:
    """Decides which answers to an exchange's tasks reach the method's ``fold``.

    State and memory do not change before :meth:`commit`: an exchange that is abandoned leaves them
    as they were. The masks that clients are known to have follow what was really sent, and are
    unknown for clients whose tasks were lost.
    """

    def __init__(self, run: Run, tasks: Sequence[Task], quorum: float = 0.0) -> None:
        self.tally = Tally()
        self._run = run
        self._open = {id(task): task for task in tasks}
        self._planned = len(tasks)
        # 0.28 of 25 tasks is 7, though the product is a little more.
        self._needed = max(1, math.ceil(quorum * len(tasks) - 1e-9))
        self._admitted: list[tuple[Task, str | None, Lengths]] = []
        self._lost: list[Task] = []
        self._recent = RecentLengths(run.lengths.by_kind)
        self._ruler = Ruler()

    def admit(self, answers: Iterable[tuple[Task, Answer]]) -> Iterator[Report]:
        """Yield the reports that may be folded, in task order.

        Raises:
            TooFewReports: At the end, if there are fewer than the quorum.
        """
        waiting: list[tuple[Task, Report, Lengths]] = []
        for task, answer in answers:
            report = self._check(task, answer)
            if report is None:
                continue
            try:
                lengths = self._run.gate.lengths(report, task, self._ruler)
            except Exception as error:
                self.tally.add_refused(task.to, malformed(task, error))
                continue
            waiting.append((task, report, lengths))
            # The first reports of their kind wait for each other, since only together do they show
            # what is usual. All later ones pass one by one.
            all_known = all(self._recent.knows(task, lengths) for task, _, lengths in waiting)
            if all_known or len(waiting) == FEW_LENGTHS:
                yield from self._release(waiting)
        yield from self._release(waiting)
        for task in list(self._open.values()):
            self._check(task, lose_unanswered(task))
        # Only now that all tasks are sent: it must not depend on when an engine reports a loss.
        self._forget_masks_of_lost()
        if len(self._admitted) < self._needed:
            raise TooFewReports(self._explain_too_few())

    def _check(self, task: Task, answer: Answer) -> Report | None:
        """Return the report in an answer, if it is what the task requests; otherwise count it."""
        is_open = self._open.pop(id(task), None) is not None
        if isinstance(answer, Lost):
            # A loss after the answer changes nothing.
            if is_open and answer.reason in REFUSALS:
                # The wire refused it, before anything was decoded.
                self.tally.add_refused(task.to, Refusal(answer.reason, answer.detail))
            elif is_open:
                self._lost.append(task)
                self.tally.add_lost(task.to, answer)
            return None
        if is_open:
            expected = self._run.expected(task)
            info = self._run.federation.info(task.to, task.round)
            refusal = self._run.gate.refuses(answer, task, expected, info, self._ruler)
            if refusal is None:
                refusal = self._refuses_memory(task, answer.memory)
        else:
            refusal = Refusal("duplicate", f"client {task.to} answered a task again.")
        if refusal is not None:
            self.tally.add_refused(task.to, refusal)
            return None
        return answer

    def _refuses_memory(self, task: Task, version: str | None) -> Refusal | None:
        """Return why this task cannot have made a version of memory; None if it can."""
        if version is None:
            return None
        is_of_task = version.startswith(make_version(task.round, task.verb, ""))
        if is_of_task and self._run.memory.has(task.to, version):
            return None
        sentence = f"client {task.to} names {version!r} as its memory, which does not exist."
        return Refusal("memory", sentence)

    def _release(self, waiting: list[tuple[Task, Report, Lengths]]) -> Iterator[Report]:
        """Yield the reports whose updates are not too long; ``waiting`` is emptied."""
        refused = self._refuse_long([(task, lengths) for task, _, lengths in waiting])
        for task, report, lengths in waiting:
            if id(task) in refused:
                self.tally.add_refused(task.to, refused[id(task)])
                continue
            if not self._run.lengths.knows(task, lengths):
                self._recent.add(task, lengths)
            self._admitted.append((task, report.memory, lengths))
            yield report
        waiting.clear()

    def _refuse_long(self, waiting: list[tuple[Task, Lengths]]) -> dict[int, Refusal]:
        """Return the refusals of updates that are too long, by the id of their task."""
        refused: dict[int, Refusal] = {}
        # Without the refused ones another length is usual, and more may be too long.
        while True:
            left = [(task, lengths) for task, lengths in waiting if id(task) not in refused]
            usual = self._recent.usual(left)
            before = len(refused)
            for task, lengths in left:
                refusal = self._run.gate.refuses_lengths(task, lengths, usual)
                if refusal is not None:
                    refused[id(task)] = refusal
            if len(refused) == before:
                return refused

    def _forget_masks_of_lost(self) -> None:
        """Forget the known masks of clients that may not have received their tasks."""
        for task in self._lost:
            # Scoring changes no known mask.
            if task.verb not in SCORING_VERBS:
                self._run.known_state.forget(task.to)

    def _explain_too_few(self) -> str:
        reasons = " ".join(self.tally.sentences.values())
        advice = ""
        if "late" in self.tally.lost:
            longer = spell_option("timeout")
            if self._run.deadline is not None:
                longer = f"{spell_option('deadline')} or {longer}"
            advice = f" A longer {longer} may help."
        return (
            f"{len(self._admitted)} of {self._planned} clients sent a usable report, and the "
            f"quorum is {self._needed}: {reasons}{advice}"
        )

    def commit(self) -> None:
        """Accept what the admitted clients remember, and the lengths of their updates."""
        for task, memory, lengths in self._admitted:
            self._run.memory.accept(task.to, memory)
            self._run.lengths.add(task, lengths)
