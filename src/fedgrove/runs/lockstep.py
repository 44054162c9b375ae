"""Training runs in lockstep: several loops, one ``engine.map`` per exchange. A single run is one.

Answers come in job order, so those of one run are contiguous in the stream: each loop is sent an
iterator over its own answers, matched by run and task. An engine may stack the clients of all runs,
or spread them over cores; no result depends on it.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..core import Answer, Engine, EngineWithNotes, Job, Report, Task
from ..errors import EngineError, FedgroveError
from ..report.tables import SHARED
from ..seeds import single_thread
from ..wire.ledger import Ledger
from ..wire.message_costs import BroadcastCosts, count_task
from . import checks, privacy
from .clock import Stopwatch, clock_of
from .folder import RunFolder
from .guard import server_metrics_of
from .rounds import (
    Admission,
    Answers,
    Exchange,
    TooFewReports,
    lose_unanswered,
    plan_scoring,
    rounds,
)
from .run import Run
from .scoring import keep_scored, name_tasks, summarise_scores
from .summary import Delivery, measure_purity, summarise

Watch = Callable[[Mapping[str, Any]], None]
"""Called with each line of metrics.jsonl after it is written."""

MOST_ATTEMPTS = 3
"""How often an exchange is tried, if too few clients report, before the run ends."""

FAILURES = (FedgroveError, OSError)
"""Errors that end one run and leave the others alone; any other is a bug and ends all."""


def ignore(line: Mapping[str, Any]) -> None:
    """Do nothing with a line of a run: the default of ``watch``."""


@dataclass(eq=False)
class Member:
    """A run in progress: its folder, its loop, and how it ended, by ``summary`` or by ``error``."""

    run: Run
    folder: RunFolder
    every: int = 1
    """Score clients every ``every`` rounds; 0: only at the end."""
    watch: Watch = ignore
    name: str = ""
    shared_by: int = 1
    """The number of runs that are trained together, among which the seconds are divided."""
    summary: dict[str, Any] | None = None
    error: FedgroveError | OSError | None = None
    exchange: Exchange = field(init=False)
    line: dict[str, Any] = field(default_factory=dict, init=False)
    """The next line of metrics.jsonl."""
    _loop: Generator[Exchange, Answers, None] = field(init=False)
    _first_attempt: int = field(default=0, init=False)
    _known_before: dict[str, Any] = field(default_factory=dict, init=False)
    _now: float = field(default=0.0, init=False)
    """The second of the virtual clock."""
    _delivery: Delivery = field(init=False)
    """What clients are delivered after the last round."""
    _draft: dict[str, Any] = field(default_factory=dict, init=False)
    """The summary without its seconds."""

    def restore(self) -> None:
        """Start the loop from the folder's last checkpoint, or from the beginning."""
        state, attempt = self.folder.restore(self.run)
        self._first_attempt = attempt
        lines = self.folder.metrics()
        self._now = clock_of(lines)
        # One line for each exchange so far.
        self._start_loop(state, attempt, len(lines))

    def _start_loop(self, state: Any, attempt: int, number: int) -> None:
        self._loop = rounds(self.run, state, attempt, number, lambda: self._now)
        self.exchange = next(self._loop)

    def mark(self) -> None:
        """Remember the masks that clients have before a map, for :meth:`roll_back`."""
        self._known_before = self.run.known_state.state()

    def roll_back(self) -> None:
        """Undo what a broken map did; no client's memory was accepted yet."""
        self.run.known_state.restore(self._known_before)
        self._start_loop(self.exchange.state, self.exchange.attempt, self.exchange.number)

    # ---- an exchange -----------------------------------------------------------------------------

    def fold(self, tasks: Sequence[Task], answers: Answers) -> None:
        """Send the loop its answers, and start the line of metrics.jsonl about them."""
        ledger = Ledger(name_of=name_tasks(self.run))
        watch = Stopwatch(self.run, self._now)
        round_before = self.exchange.state.round
        timed = self._keep_time(watch, watch.time_answers(answers))
        self.exchange = self._loop.send(ledger.tally(timed))
        watch.check_deadline(tasks)
        round_after = self.exchange.state.round
        self.line = {
            "round": round_after,
            # An exchange that is not a round (a clustering, a probe) does not count as one.
            "counts": round_after > round_before,
            **ledger.totals(),
            **ledger.parts(),
        }
        if ledger.by_name:
            by_task = sorted(ledger.by_name.items())
            self.line["bytes_tasks"] = {name: own.totals() for name, own in by_task}
        self.line |= self.exchange.tally.to_line()
        self.line |= watch.to_line()
        self.line |= privacy.list_messages(self.run, tasks)
        self.line |= server_metrics_of(self.run.method, self.exchange.state)
        self.line |= measure_purity(self.run, self.exchange.state, round_before)
        if self.exchange.why_abandoned:
            why = f"{self.exchange.why_abandoned} {watch.explain_all_late()}".strip()
            self.exchange = replace(self.exchange, why_abandoned=why)
            self.line["abandoned"] = why
        else:
            # The next exchange has all its attempts before it, also in a resumed run.
            self._first_attempt = 0

    def _keep_time(self, watch: Stopwatch, answers: Answers) -> Answers:
        """Yield the answers, and set the clock when all have come.

        The loop plans the next exchange before it returns from this one.
        """
        yield from answers
        self._now = watch.end

    @property
    def scores_are_due(self) -> bool:
        """Whether clients are to be scored after this exchange."""
        if not self.every or not self.line["counts"] or not self.run.scored:
            return False
        done = self.line["round"]
        return bool(done % self.every == 0 or done == self.run.rounds)

    def score(self, tasks: Sequence[Task], answers: Answers) -> None:
        """Add the clients' scores to the round's line of metrics.jsonl."""
        ledger = Ledger()
        admission = Admission(self.run, tasks)
        reports: list[Report] = []
        try:
            reports = list(admission.admit(ledger.tally(answers)))
            self.line |= summarise_scores(self.run, self.exchange.state.round, reports)
        except TooFewReports:
            # No client could be scored: the line has no accuracy, and the run goes on.
            pass
        scored = len(keep_scored(reports))
        if scored < len(tasks):
            unscored = {**admission.tally.lost, **admission.tally.refused}
            untested = [report.of for report in reports if "test0" not in report.metrics]
            if untested:
                unscored["no test examples"] = untested
            self.line["scored"] = scored
            self.line["unscored"] = unscored
        self.line |= ledger.totals("bytes_evaluate")

    def commit(self, seconds: float) -> None:
        """Write the round's line and the checkpoint."""
        self.line["seconds"] = round(seconds, 4)
        self.folder.log(self.line)
        self.folder.save(self.run, self.exchange.state, self.exchange.attempt)
        self.watch(self.line)

    def check_patience(self) -> None:
        """End the run if its exchange was abandoned too often; a resumed run may try again."""
        tried = self.exchange.attempt - self._first_attempt
        if tried >= MOST_ATTEMPTS:
            raise EngineError(
                f"the exchange of round {self.exchange.state.round + 1} was abandoned {tried} "
                f"times: {self.exchange.why_abandoned}"
            )

    # ---- the end ---------------------------------------------------------------------------------

    def plan_finetuning(self) -> list[Task]:
        """Return the tasks that fine-tune and score each client's model after the last round."""
        state = self.exchange.state
        # Once for the tasks, the groups in the summary and the files of models.
        self._delivery = Delivery(self.run.deliver_to(state, self.run.served))
        return plan_scoring(self.run, state, "finetune", self._delivery.packets)

    def summarise(self, tasks: Sequence[Task], answers: Answers, engine: Engine) -> None:
        """Make the summary from the reports on fine-tuning."""
        ledger = Ledger()
        admission = Admission(self.run, tasks)
        # With --score-on 0 there are no tasks, and so no answers are needed.
        reports = list(admission.admit(ledger.tally(answers))) if tasks else []
        # Fine-tuned models are what clients remember from here on.
        admission.commit()
        lines = self.folder.metrics()
        state = self.exchange.state
        without_memory = [task.to for task in tasks if task.memory is None]
        summary = summarise(
            self.run, lines, engine.name, state, reports, self._delivery, ledger, without_memory
        )
        summary["notes"] += checks.make_notes(self.run, state, summary["density"])
        summary |= privacy.summarise(self.run, lines)
        summary["notes"] += privacy.make_notes(summary)
        if isinstance(engine, EngineWithNotes):
            summary["notes"] += engine.notes(self.run)
        self._draft = summary

    def finish(self, seconds: float) -> None:
        """Write models and summary of a finished run."""
        self.folder.save_models(self.run, self._delivery)
        spent = sum(line["seconds"] for line in self.folder.metrics()) + seconds
        summary = {**self._draft, "seconds": round(spent, 3)}
        if self.shared_by > 1:
            summary[SHARED] = self.shared_by
        self.folder.finish(summary)
        self.summary = summary

    def attempt(self, step: Callable[..., None], *arguments: Any) -> None:
        """Take a step of one run; if it fails, this run is over."""
        try:
            step(*arguments)
        except FAILURES as error:
            self.error = error


# ---- many members --------------------------------------------------------------------------------


def train_together(members: Sequence[Member], engine: Engine) -> Iterator[Member]:
    """Train all members, with one map per exchange of all; yield each as it ends.

    A member that fails is left behind with its ``error``. The seconds of a map are divided evenly
    among its members.
    """
    with collect_rarely():
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
    """Train one run; return its summary, or raise its error."""
    for _ in train_together([member], engine):
        if member.error is not None:
            raise member.error
    assert member.summary is not None
    return member.summary


def _without_errors(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if member.error is None]


def _advance(members: Sequence[Member], engine: Engine) -> None:
    """Make one exchange, score clients if that is due, and write checkpoints."""
    started = time.perf_counter()
    map_together(engine, members, lambda each: each.exchange.tasks, Member.fold)
    due = [member for member in _without_errors(members) if member.scores_are_due]
    if due:
        map_together(
            engine, due, lambda each: plan_scoring(each.run, each.exchange.state), Member.score
        )
    seconds = (time.perf_counter() - started) / len(members)
    for member in _without_errors(members):
        member.attempt(member.commit, seconds)
        member.attempt(member.check_patience)


def _conclude(members: Sequence[Member], engine: Engine) -> None:
    """Fine-tune, score every client with its own model, and write the results."""
    started = time.perf_counter()
    map_together(engine, members, Member.plan_finetuning, partial(Member.summarise, engine=engine))
    seconds = (time.perf_counter() - started) / len(members)
    for member in _without_errors(members):
        member.attempt(member.finish, seconds)


# ---- one map for many members --------------------------------------------------------------------


Plan = Callable[[Member], list[Task]]
TakeAnswers = Callable[[Member, Sequence[Task], Answers], None]


def map_together(
    engine: Engine, members: Sequence[Member], plan: Plan, receive: TakeAnswers
) -> None:
    """Make one map over the tasks of all runs in lockstep.

    A member whose ``receive`` fails is left with its error. If the map itself breaks, it is unknown
    whose job it was: the members that had not received all their answers try again, one by one, and
    only the one at fault fails.

    Args:
        engine: The engine.
        members: The members.
        plan: Returns a member's tasks.
        receive: Gets a member, its tasks and their answers, as they come.
    """
    tasks_of: dict[Member, list[Task]] = {}

    def note_tasks(member: Member) -> None:
        tasks_of[member] = plan(member)

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
    with limit_threads(largest):
        while unserved and not stream.broken:
            member, tasks = unserved[0]
            later = [other.run for other, _ in unserved if other is not member]
            own = stream.answers_of(member.run, tasks, later)
            try:
                receive(member, tasks, own)
            except FAILURES as error:
                if stream.broken and len(tasks_of) > 1:
                    # The map's failure, not this member's: it tries again below.
                    break
                member.error = error
            unserved.popleft()
            stream.skip(own)
    for member, _ in unserved:
        member.attempt(member.roll_back)
        if member.error is None:
            map_together(engine, [member], plan, receive)


class _Stream:
    """A map's answers, one run after another; remembers whether it was the map that failed."""

    def __init__(self, answers: Iterator[tuple[Job, Answer]]) -> None:
        self._answers = answers
        self._next: tuple[Job, Answer] | None = None
        self.broken: FedgroveError | OSError | None = None

    def answers_of(self, run: Run, tasks: Sequence[Task], later: Sequence[Run]) -> Answers:
        """Yield the answers to one run's tasks: at least one for each, in their order.

        A task that the engine skipped is lost. A second answer to a task, or an answer to none of
        them, is passed on, and the gate refuses it. An answer of a run that comes ``later`` ends
        the answers of this one.
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
                    yield _lose_skipped(run, waiting.popleft())
                waiting.popleft()
            yield task, answer
        for task in waiting:
            yield _lose_skipped(run, task)

    def _look_ahead(self) -> None:
        if self._next is not None:
            return
        try:
            self._next = next(self._answers, None)
        except FAILURES as error:
            self.broken = error
            raise

    def skip(self, answers: Answers) -> None:
        """Skip the rest of a run's answers, so that those of the next run come next."""
        try:
            deque(answers, maxlen=0)
        except FAILURES as error:
            self.broken = error


def _lose_skipped(run: Run, task: Task) -> tuple[Task, Answer]:
    """Return the loss of a task that the engine gave no answer for; it was sent all the same."""
    cost = {"down": count_task(task, run.method.codec, run.known_state, BroadcastCosts())}
    return task, replace(lose_unanswered(task), cost=cost)


# ---- torch's threads and Python's garbage collector ----------------------------------------------

SMALL_NET = 1 << 20
"""The server's work on a network with fewer parameters is fastest with one thread."""
NEW_OBJECTS = 20_000
"""How many new objects make Python's garbage collector look for cycles. A round makes about ten
thousand, and drops them at its end."""


def limit_threads(parameters: int) -> AbstractContextManager[None]:
    """Use one torch thread while the run folds the trees of a small network.

    Leaves of ten thousand numbers are done before a second thread has woken up, and threads that
    wait for the next leaf keep cores from those that encode and train.
    """
    return single_thread() if parameters < SMALL_NET else nullcontext()


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Collect garbage less often during runs than Python's default, every 700 objects.

    That would be ten times in a round of ten clients and find next to nothing: a tenth of the
    server's time. Every hundredth or so collection goes through all objects, which takes longer
    than a round.
    """
    first, *others = gc.get_threshold()
    # 0 turns the collector off, and a higher threshold may be the user's choice.
    is_changed = 0 < first < NEW_OBJECTS
    if is_changed:
        gc.set_threshold(NEW_OBJECTS, *others)
    try:
        yield
    finally:
        # Otherwise another run has set it, and may have ended and put it back.
        if is_changed:
            gc.set_threshold(first, *others)
