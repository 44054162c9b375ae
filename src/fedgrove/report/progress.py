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

from .start import is_live
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
    score: str = ""
    first: int = 0
    """The round before the first one seen live.

    The time left is estimated from the rounds since then: those of before a resume took none now.
    """

    def add(self, line: Line) -> None:
        """Take a line in."""
        self.bytes += line["bytes_up"] + line["bytes_down"]
        self.round = line["round"]
        # Rounds that score no client leave the score out; the last one known stays.
        self.score = score_of(line) or self.score

    def words(self) -> str:
        """Score and bytes so far."""
        if not self.score:
            return mib(self.bytes)
        return f"{self.score}  {mib(self.bytes)}"

    def plain(self) -> str:
        """The whole state in one line."""
        spent = time.monotonic() - self.begun
        line = f"round {self.round}/{self.rounds}  {self.words()}  {spent:.0f} s"
        done = self.round - self.first
        if done:
            left = spent / done * (self.rounds - self.round)
            line += f"  {left:.0f} s left"
        return line


def score_of(line: Line) -> str:
    """The mean score of a line in words; empty if nobody was scored.

    >>> score_of({"accuracy_mean": 0.9}), score_of({"metric": "mae", "share": False, "mae_mean": 3})
    ('accuracy 90.0 %', 'mae 3')
    """
    if "tasks" in line:
        words = []
        for name, task in line["tasks"].items():
            words.append(f"{name} {_in_words(task['metric'], task['share'], task['mean'])}")
        return ", ".join(words)
    metric = line.get("metric", "accuracy")
    mean = line.get(f"{metric}_mean")
    if mean is None:
        return ""
    return _in_words(metric, line.get("share", True), mean)


def _in_words(metric: str, share: bool, mean: float) -> str:
    return f"{metric} {100 * mean:.1f} %" if share else f"{metric} {mean:.4g}"


@contextmanager
def watching(
    rounds: int, past: Sequence[Line] = (), quiet: bool = False, title: str = ""
) -> Iterator[Callable[[Line], None]]:
    """Give a function to call with each new line; ``past`` are the lines of before a resume.

    A log begins with the ``title``: its first round may take long.
    """
    seen = Seen(rounds, time.monotonic())
    for line in past:
        seen.add(line)
    seen.first = seen.round
    if quiet:
        # Callers need not know: there is a function to call all the same.
        yield seen.add
    elif is_live(sys.stderr):
        with _bar() as bar:
            yield _live(bar, seen)
    else:
        if title:
            print(title, file=sys.stderr, flush=True)
        yield _plain(seen)


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        # As wide as the rest leaves: a bar of a fixed width would cut the figures beside it.
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # On stderr, so that stdout holds the results alone; transient, so that nothing stays behind.
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)


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

    Its round is the sum of theirs, its score the mean of those with the same metric as the line's.
    """

    def __init__(self) -> None:
        self.last: dict[str, Line] = {}
        self.means: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, line: Line) -> Line:
        """A line of the run called ``name``, as a line of the one run."""
        self.last[name] = line
        key = f"{line.get('metric', 'accuracy')}_mean"
        means = self.means.setdefault(key, {})
        if key in line:
            means[name] = line[key]
        merged = {**line, "round": sum(last["round"] for last in self.last.values())}
        if means:
            merged[key] = sum(means.values()) / len(means)
        return merged
