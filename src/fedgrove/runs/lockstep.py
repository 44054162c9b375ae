"""Runs in lockstep: several loops, one ``engine.map`` per exchange; a run alone is one of one.

Answers come in job order, so those of one run are contiguous in the stream: each loop is sent an
iterator over its own part, which is matched by run and task. An engine may stack the clients of all
runs, or spread them over cores; no result depends on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core import Answer, Engine, EngineWithNotes, Job, Report, Task
from ..errors import EngineError, FedgroveError
from ..wire.ledger import Ledger
from ..wire.message_costs import BroadcastCosts, count_task
from . import fits, privacy
from .admission import Admission, TooFewReports, unanswered
from .clock import Stopwatch, clock_of
from .folder import RunFolder
from .guard import server_metrics_of
from .purity import purity_of
from .rounds import Answers, Exchange, evaluation, rounds
from .run import Run
from .scoring import bytes_of_tasks, scores, summarise, task_names, untested, with_scores
from .serving import few_collections, serving

Watch = Callable[[Mapping[str, Any]], None]
"""Called with each line of metrics.jsonl as it is written."""

PATIENCE = 3
"""How often an exchange is tried, if too few clients report, before the run ends."""

FAILURES = (FedgroveError, OSError)
"""What ends one run and leaves the others alone; anything else is a bug and ends all."""


def ignore(line: Mapping[str, Any]) -> None:
    """A watch that does nothing."""


@dataclass(eq=False)
class Member:
    """A run in progress: its folder, its loop, and how it ended, by ``summary`` or by ``error``."""

    run: Run
    folder: RunFolder
    every: int = 1
    """Score clients every so many rounds; 0: only at the end."""
    watch: Watch = ignore
    name: str = ""
    summary: dict[str, Any] | None = None
    error: FedgroveError | OSError | None = None
    exchange: Exchange = field(init=False)
    line: dict[str, Any] = field(default_factory=dict, init=False)
    """The line of metrics.jsonl that is being made."""
    _loop: Generator[Exchange, Answers, None] = field(init=False)
    _first_attempt: int = field(default=0, init=False)
    _known_before: dict[str, Any] = field(default_factory=dict, init=False)
    _now: float = field(default=0.0, init=False)
    """The second of the virtual clock."""

    def restore(self) -> None:
        """Start the loop from the folder's last checkpoint, or from the beginning."""
        state, attempt = self.folder.restore(self.run)
        self._first_attempt = attempt
        lines = self.folder.metrics()
        self._now = clock_of(lines)
        # One line for each exchange so far.
        self._start_loop(state, attempt, len(lines))

    def _start_loop(self, state: Any, attempt: int, number: int) -> None:
        self._loop = rounds(self.run, state, attempt, number)
        self.exchange = next(self._loop)

    def mark(self) -> None:
        """Note what clients hold before a map, for :meth:`roll_back`."""
        self._known_before = self.run.known_state.state()

    def roll_back(self) -> None:
        """Undo what a broken map did; what clients remember was not accepted yet."""
        self.run.known_state.restore(self._known_before)
        self._start_loop(self.exchange.state, self.exchange.attempt, self.exchange.number)

    def fold(self, tasks: Sequence[Task], answers: Answers) -> None:
        """Send the loop its answers, and start the line of metrics that describes them."""
        ledger = Ledger(name_of=task_names(self.run))
        watch = Stopwatch(self.run, self._now)
        round_before = self.exchange.state.round
        self.exchange = self._loop.send(ledger.tally(watch.timed(answers)))
        watch.check_somebody_can(tasks)
        round_after = self.exchange.state.round
        self.line = {
            "round": round_after,
            # An exchange that is not a round (a clustering, a probe) does not count as one.
            "counts": round_after > round_before,
            **ledger.totals(),
            **ledger.parts(),
            **bytes_of_tasks(ledger),
            **self.exchange.tally.line(),
            **watch.line(),
            **privacy.asked(self.run, tasks),
        }
        self._now = self.line["virtual_clock"]
        self.line |= server_metrics_of(self.run.method, self.exchange.state)
        self.line |= purity_of(self.run, self.exchange.state, round_before)
        if self.exchange.why_abandoned:
            why = f"{self.exchange.why_abandoned} {watch.nobody_in_time}".strip()
            self.exchange = replace(self.exchange, why_abandoned=why)
            self.line["abandoned"] = why
        else:
            # The next exchange has all its attempts before it, also in a resumed run.
            self._first_attempt = 0

    @property
    def scores_are_due(self) -> bool:
        """Whether clients are to be scored after this exchange."""
        if not self.every or not self.line["counts"] or not self.run.scored:
            return False
        done = self.line["round"]
        return bool(done % self.every == 0 or done == self.run.rounds)

    def score(self, tasks: Sequence[Task], answers: Answers) -> None:
        """Add the clients' scores to the line."""
        ledger = Ledger()
        admission = Admission(self.run, tasks)
        reports: list[Report] = []
        try:
            reports = list(admission.reports(ledger.tally(answers)))
            self.line |= scores(self.run, self.exchange.state.round, reports)
        except TooFewReports:
            # Nobody could be scored: the line has no accuracy, and the run goes on.
            pass
        scored = len(with_scores(reports))
        if scored < len(tasks):
            tally = admission.tally
            self.line["scored"] = scored
            self.line["unscored"] = {**tally.lost, **tally.refused, **untested(reports)}
        self.line |= ledger.totals("bytes_evaluate")

    def commit(self, seconds: float) -> None:
        """Write the line and the checkpoint."""
        self.line["seconds"] = round(seconds, 4)
        self.folder.log(self.line)
        self.folder.save(self.run, self.exchange.state, self.exchange.attempt)
        self.watch(self.line)

    def check_patience(self) -> None:
        """End the run if its exchange was abandoned too often; a resumed run may try again."""
        tried = self.exchange.attempt - self._first_attempt
        if tried >= PATIENCE:
            raise EngineError(
                f"the exchange of round {self.exchange.state.round + 1} was abandoned {tried} "
                f"times: {self.exchange.why_abandoned}"
            )

    def finish(self, figures: dict[str, Any], seconds: float) -> None:
        """Write models and summary."""
        self.folder.save_models(self.run, self.exchange.state)
        spent = sum(line["seconds"] for line in self.folder.metrics()) + seconds
        summary = {**figures, "seconds": round(spent, 3)}
        self.folder.finish(summary)
        self.summary = summary

    def attempt(self, step: Callable[..., None], *arguments: Any) -> None:
        """Take a step; if it fails, this run is over."""
        try:
            step(*arguments)
        except FAILURES as error:
            self.error = error


def together(members: Sequence[Member], engine: Engine) -> Iterator[Member]:
    """Run all members to the end, one map per exchange of all; yields each as it ends.

    One that fails is left behind with its ``error``. The seconds of a map are shared evenly among
    its members.
    """
    with few_collections():
        yield from _together(members, engine)


def _together(members: Sequence[Member], engine: Engine) -> Iterator[Member]:
    active = list(members)
    for member in active:
        member.attempt(member.restore)
    while True:
        for member in active:
            if member.error is not None:
                yield member
        active = _without_errors(active)
        training = [member for member in active if member.exchange.tasks]
        if not training:
            break
        _advance(training, engine)
    # Members of fewer rounds wait here, so that one map fine-tunes and scores all of them.
    if active:
        _conclude(active, engine)
        yield from active


def train_alone(member: Member, engine: Engine) -> dict[str, Any]:
    """Take one run to its end: a lockstep of one. Returns its summary, or raises its error."""
    for _ in together([member], engine):
        if member.error is not None:
            raise member.error
    assert member.summary is not None
    return member.summary


def _without_errors(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if member.error is None]


def _advance(members: Sequence[Member], engine: Engine) -> None:
    """One exchange, the scores where they are due, and the checkpoints."""
    started = time.perf_counter()
    share(engine, members, lambda member: member.exchange.tasks, Member.fold)
    due = [member for member in _without_errors(members) if member.scores_are_due]
    if due:
        share(engine, due, lambda m: evaluation(m.run, m.exchange.state), Member.score)
    seconds = (time.perf_counter() - started) / len(members)
    for member in _without_errors(members):
        member.attempt(member.commit, seconds)
        member.attempt(member.check_patience)


def _conclude(members: Sequence[Member], engine: Engine) -> None:
    """Fine-tune, score every client with its own model, and write the results."""
    started = time.perf_counter()
    figures: dict[Member, dict[str, Any]] = {}

    def ask(member: Member) -> list[Task]:
        return evaluation(member.run, member.exchange.state, "finetune")

    def take(member: Member, tasks: Sequence[Task], answers: Answers) -> None:
        ledger = Ledger()
        admission = Admission(member.run, tasks)
        reports = []
        # With --score-on 0 nobody is asked, and so nobody must answer.
        if tasks:
            reports = list(admission.reports(ledger.tally(answers)))
        # Fine-tuned models are what clients remember from here on.
        admission.settle()
        lines = member.folder.metrics()
        state = member.exchange.state
        summary = summarise(member.run, lines, engine.name, state, reports, ledger)
        summary["notes"] += fits.notes(member.run, state, summary["density"])
        summary |= privacy.summary_of(member.run, lines)
        summary["notes"] += privacy.notes(summary)
        if isinstance(engine, EngineWithNotes):
            summary["notes"] += engine.notes(member.run)
        figures[member] = summary

    share(engine, members, ask, take)
    seconds = (time.perf_counter() - started) / len(members)
    for member in _without_errors(members):
        member.attempt(member.finish, figures[member], seconds)


# ---- one map for many ----------------------------------------------------------------------------


class _Stream:
    """A map's answers, one run after another; remembers whether it was the map that failed."""

    def __init__(self, answers: Iterator[tuple[Job, Answer]]) -> None:
        self._answers = answers
        self._next: tuple[Job, Answer] | None = None
        self.broken: FedgroveError | OSError | None = None

    def part(self, run: Run, tasks: Sequence[Task], later: Sequence[Run]) -> Answers:
        """The answers to one run's tasks: at least one for each, in their order.

        A task that the engine passed over is lost. Another answer to a task, or an answer to none
        of them, comes as it is, and the gate refuses it. An answer of one of the runs that come
        ``later`` ends the part.
        """
        waiting = deque(tasks)
        while True:
            self._look_ahead()
            if self._next is None:
                break
            (answered_run, task), answer = self._next
            if answered_run in later:
                break
            self._next = None
            if answered_run is not run:
                # A second answer to a run that was served before.
                continue
            if any(task is other for other in waiting):
                while waiting[0] is not task:
                    yield _passed_over(run, waiting.popleft())
                waiting.popleft()
            yield task, answer
        for task in waiting:
            yield _passed_over(run, task)

    def _look_ahead(self) -> None:
        if self._next is not None:
            return
        try:
            self._next = next(self._answers, None)
        except FAILURES as error:
            self.broken = error
            raise

    def drain(self, part: Answers) -> None:
        """Skip the rest of a part, so that the next one begins where it should."""
        try:
            deque(part, maxlen=0)
        except FAILURES as error:
            self.broken = error


def _passed_over(run: Run, task: Task) -> tuple[Task, Answer]:
    """A task that the engine gave no answer for; it was sent all the same."""
    cost = {"down": count_task(task, run.method.codec, run.known_state, BroadcastCosts())}
    return task, replace(unanswered(task), cost=cost)


Take = Callable[[Member, Sequence[Task], Answers], None]


def share(
    engine: Engine, members: Sequence[Member], ask: Callable[[Member], list[Task]], take: Take
) -> None:
    """One map over what all members ask; ``take`` gets each member's own answers, as they come.

    A member whose ``take`` fails is left with its error. If the map itself breaks, nobody knows
    whose job it was: the members that had not received all their answers try again, one by one, and
    only the one at fault fails.
    """
    tasks_of: dict[Member, list[Task]] = {}

    def note_tasks(member: Member) -> None:
        tasks_of[member] = ask(member)

    for member in members:
        member.mark()
        member.attempt(note_tasks, member)

    def jobs() -> Iterator[Job]:
        for member, tasks in tasks_of.items():
            for task in tasks:
                yield member.run, task

    stream = _Stream(engine.map(jobs()))
    unserved = deque(tasks_of.items())
    largest = max((member.run.net.layout.size for member in members), default=0)
    with serving(largest):
        while unserved and not stream.broken:
            member, tasks = unserved[0]
            later = [other.run for other, _ in unserved if other is not member]
            part = stream.part(member.run, tasks, later)
            try:
                take(member, tasks, part)
            except FAILURES as error:
                if stream.broken and len(tasks_of) > 1:
                    # The map's failure, not this member's: it gets another try below.
                    break
                member.error = error
            unserved.popleft()
            stream.drain(part)
    for member, _ in unserved:
        member.attempt(member.roll_back)
        if member.error is None:
            share(engine, [member], ask, take)
