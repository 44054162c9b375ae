"""What a person sees while a run trains.

A live line on a terminal; elsewhere, as in a log file, a plain line every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .tables import mib

EVERY = 5.0
"""Seconds between plain lines."""

Line = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass
class Seen:
    """What the lines of metrics.jsonl so far add up to."""

    rounds: int
    """How many there are in all."""
    begun: float
    bytes: int = 0
    round: int = 0
    accuracy: float | None = None
    first: int = 0
    """The round before the first one seen live.

    The time left is estimated from the rounds since then: those of before a resume took none now.
    """

    def add(self, line: Line) -> None:
        """Take a line in."""
        self.bytes += line["bytes_up"] + line["bytes_down"]
        self.round = line["round"]
        # Rounds that score no client leave the accuracy out; the last one known stays.
        self.accuracy = line.get("accuracy_mean", self.accuracy)

    def words(self) -> str:
        """Accuracy and bytes so far."""
        if self.accuracy is None:
            return mib(self.bytes)
        return f"accuracy {100 * self.accuracy:.1f} %  {mib(self.bytes)}"

    def plain(self) -> str:
        """The whole state in one line."""
        spent = time.monotonic() - self.begun
        line = f"round {self.round}/{self.rounds}  {self.words()}  {spent:.0f} s"
        done = self.round - self.first
        if done:
            left = spent / done * (self.rounds - self.round)
            line += f"  {left:.0f} s left"
        return line


@contextmanager
def watching(
    rounds: int, past: Sequence[Line] = (), quiet: bool = False
) -> Iterator[Callable[[Line], None]]:
    """Give a function to call with each new line; ``past`` are the lines of before a resume."""
    seen = Seen(rounds, time.monotonic())
    for line in past:
        seen.add(line)
    seen.first = seen.round
    if quiet:
        # Callers need not know: there is a function to call all the same.
        yield seen.add
    elif sys.stderr.isatty():
        with _bar() as bar:
            yield _live(bar, seen)
    else:
        yield _plain(seen)


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # On stderr, so that stdout holds the results alone; transient, so that nothing stays behind.
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _live(bar: Progress, seen: Seen) -> Callable[[Line], None]:
    task = bar.add_task("round", total=seen.rounds, completed=seen.round, words=seen.words())

    def watch(line: Line) -> None:
        seen.add(line)
        # After the last round the bar is full while the clients are still tuned and scored.
        is_last = seen.round >= seen.rounds
        description = "fine-tuning and scoring" if is_last else "round"
        bar.update(task, completed=seen.round, words=seen.words(), description=description)

    return watch


def _plain(seen: Seen) -> Callable[[Line], None]:
    # Long ago, so that the first line comes at once.
    printed_at = 0.0

    def watch(line: Line) -> None:
        nonlocal printed_at
        seen.add(line)
        is_last = seen.round >= seen.rounds
        is_due = time.monotonic() - printed_at >= EVERY
        if is_last or is_due:
            printed_at = time.monotonic()
            ending = "; fine-tuning and scoring" if is_last else ""
            # Flushed, because a log file may be watched while the run goes on.
            print(seen.plain() + ending, file=sys.stderr, flush=True)

    return watch


class Merged:
    """Lines of many runs as if they were one run's.

    Its round is the sum of theirs, its accuracy their mean.
    """

    def __init__(self) -> None:
        self.last: dict[str, Line] = {}
        self.accuracy: dict[str, float] = {}

    def __call__(self, name: str, line: Line) -> Line:
        """A line of the run called ``name``, as a line of the one run."""
        self.last[name] = line
        if "accuracy_mean" in line:
            self.accuracy[name] = line["accuracy_mean"]
        merged = {**line, "round": sum(last["round"] for last in self.last.values())}
        if self.accuracy:
            merged["accuracy_mean"] = sum(self.accuracy.values()) / len(self.accuracy)
        return merged
