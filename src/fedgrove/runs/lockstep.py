"""Runs in lockstep: several loops, one ``engine.map`` per exchange; a run alone is one of one.

Reports come in job order, so the reports of one run are contiguous in the stream: each loop is sent
an iterator over its own part. An engine may stack the clients of all runs, or spread them over
cores; no result depends on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..core import Engine, Report, Task
from ..errors import FedgroveError
from ..trees import Mask
from ..wire.ledger import Ledger
from .folder import RunFolder
from .rounds import Exchange, evaluation, rounds
from .run import Run
from .scoring import scores, summarise

Watch = Callable[[Mapping[str, Any]], None]
"""Called with each line of metrics.jsonl as it is written."""

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
    """Score all clients every so many rounds; 0: only at the end."""
    watch: Watch = ignore
    name: str = ""
    summary: dict[str, Any] | None = None
    error: FedgroveError | OSError | None = None
    exchange: Exchange = field(init=False)
    line: dict[str, Any] = field(default_factory=dict, init=False)
    """The line of metrics.jsonl that is being made."""
    _loop: Generator[Exchange, Iterable[Report], None] = field(init=False)
    _memory_before: dict[int, str] = field(default_factory=dict, init=False)
    _held_before: dict[tuple[int, str], Mask] = field(default_factory=dict, init=False)

    def restore(self) -> None:
        """Start the loop from the folder's last checkpoint, or from the beginning."""
        self._start_loop(self.folder.restore(self.run))

    def _start_loop(self, state: Any) -> None:
        self._loop = rounds(self.run, state)
        self.exchange = next(self._loop)

    def mark(self) -> None:
        """Note what clients remember and hold before a map, for :meth:`roll_back`."""
        self._memory_before = dict(self.run.memory.files)
        self._held_before = dict(self.run.held.masks)

    def roll_back(self) -> None:
        """Undo what a broken map did.

        Versions of memory that were written since are in no manifest, and so do not count.
        """
        self.run.memory.files = self._memory_before
        self.run.held.masks = self._held_before
        self._start_loop(self.exchange.state)

    def fold(self, reports: Iterable[Report]) -> None:
        """Send the loop its reports, and start the line of metrics that describes them."""
        ledger = Ledger()
        round_before = self.exchange.state.round
        self.exchange = self._loop.send(ledger.tally(reports))
        round_after = self.exchange.state.round
        self.line = {
            "round": round_after,
            # An exchange that is not a round (a clustering, a probe) does not count as one.
            "counts": round_after > round_before,
            **ledger.totals(),
            **ledger.parts(),
        }
        if self.exchange.refused:
            self.line["refused"] = list(self.exchange.refused)

    @property
    def scores_are_due(self) -> bool:
        """Whether all clients are to be scored after this exchange."""
        if not self.every or not self.line["counts"]:
            return False
        done = self.line["round"]
        return bool(done % self.every == 0 or done == self.run.rounds)

    def score(self, reports: Iterable[Report]) -> None:
        """Add the clients' scores to the line."""
        self.line |= scores(reports)

    def commit(self, seconds: float) -> None:
        """Write the line and the checkpoint."""
        self.line["seconds"] = round(seconds, 4)
        self.folder.log(self.line)
        self.folder.save(self.run, self.exchange.state)
        self.watch(self.line)

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


def _conclude(members: Sequence[Member], engine: Engine) -> None:
    """Fine-tune, score every client with its own model, and write the results."""
    started = time.perf_counter()
    figures: dict[Member, dict[str, Any]] = {}

    def ask(member: Member) -> list[Task]:
        return evaluation(member.run, member.exchange.state, "finetune")

    def take(member: Member, reports: Iterable[Report]) -> None:
        lines = member.folder.metrics()
        state = member.exchange.state
        figures[member] = summarise(member.run, lines, engine.name, state, reports)

    share(engine, members, ask, take)
    seconds = (time.perf_counter() - started) / len(members)
    for member in _without_errors(members):
        member.attempt(member.finish, figures[member], seconds)


# ---- one map for many ----------------------------------------------------------------------------


class _Stream:
    """A map's reports, one part after another; remembers whether it was the map that failed."""

    def __init__(self, pairs: Iterator[tuple[Run, Report]]) -> None:
        self._pairs = pairs
        self.broken: FedgroveError | OSError | None = None

    def part(self, count: int | None) -> Iterator[Report]:
        """The next ``count`` reports, or all that are left."""
        try:
            for _, report in islice(self._pairs, count):
                yield report
        except FAILURES as error:
            self.broken = error
            raise

    def drain(self, part: Iterator[Report]) -> None:
        """Skip the rest of a part, so that the next one begins where it should."""
        try:
            deque(part, maxlen=0)
        except FAILURES as error:
            self.broken = error


Take = Callable[[Member, Iterator[Report]], None]


def share(
    engine: Engine, members: Sequence[Member], ask: Callable[[Member], list[Task]], take: Take
) -> None:
    """One map over what all members ask; ``take`` gets each member's own reports, as they come.

    A member whose ``take`` fails is left with its error. If the map itself breaks, nobody knows
    whose job it was: the members that had not received all their reports try again, one by one, and
    only the one at fault fails.
    """
    tasks_of: dict[Member, list[Task]] = {}

    def note_tasks(member: Member) -> None:
        tasks_of[member] = ask(member)

    for member in members:
        member.mark()
        member.attempt(note_tasks, member)

    def jobs() -> Iterator[tuple[Run, Task]]:
        for member, tasks in tasks_of.items():
            for task in tasks:
                yield member.run, task

    stream = _Stream(engine.map(jobs()))
    unserved = deque(tasks_of.items())
    while unserved and not stream.broken:
        member, tasks = unserved[0]
        part = stream.part(len(tasks))
        try:
            take(member, part)
        except FAILURES as error:
            if stream.broken and len(tasks_of) > 1:
                # The map's failure, not this member's: it gets another try below.
                break
            member.error = error
        unserved.popleft()
        stream.drain(part)
    if not unserved:
        # To the very end of the map, so that the engine keeps its workers for the next one.
        stream.drain(stream.part(None))
    for member, _ in unserved:
        member.attempt(member.roll_back)
        if member.error is None:
            share(engine, [member], ask, take)
