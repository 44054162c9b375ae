"""What a person sees while a run trains: a live line on a terminal, a plain line now and then elsewhere."""

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
    """The round before the first one seen live: time left is judged by what happened since."""

    def add(self, line: Line) -> None:
        """Take a line in."""
        self.bytes += line["bytes_up"] + line["bytes_down"]
        self.round = line["round"]
        self.accuracy = line.get("accuracy_mean", self.accuracy)

    def words(self) -> str:
        """Accuracy and bytes so far."""
        accuracy = "" if self.accuracy is None else f"accuracy {100 * self.accuracy:.1f} %  "
        return f"{accuracy}{mib(self.bytes)}"

    def plain(self) -> str:
        """The whole state in one line."""
        spent = time.monotonic() - self.begun
        done = self.round - self.first
        left = f"  {spent / done * (self.rounds - self.round):.0f} s left" if done else ""
        return f"round {self.round}/{self.rounds}  {self.words()}  {spent:.0f} s{left}"


@contextmanager
def watching(
    rounds: int, past: Sequence[Line] = (), quiet: bool = False
) -> Iterator[Callable[[Line], None]]:
    """Give a function that is to be called with every new line; ``past`` are those of before a resume."""
    seen = Seen(rounds, time.monotonic())
    for line in past:
        seen.add(line)
    seen.first = seen.round
    if quiet:
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
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _live(bar: Progress, seen: Seen) -> Callable[[Line], None]:
    task = bar.add_task("round", total=seen.rounds, completed=seen.round, words=seen.words())

    def watch(line: Line) -> None:
        seen.add(line)
        last = seen.round >= seen.rounds
        said = "fine-tuning and scoring" if last else "round"
        bar.update(task, completed=seen.round, words=seen.words(), description=said)

    return watch


def _plain(seen: Seen) -> Callable[[Line], None]:
    said = 0.0

    def watch(line: Line) -> None:
        nonlocal said
        seen.add(line)
        last = seen.round >= seen.rounds
        if last or time.monotonic() - said >= EVERY:
            said = time.monotonic()
            print(
                seen.plain() + ("; fine-tuning and scoring" if last else ""),
                file=sys.stderr,
                flush=True,
            )

    return watch


class Merged:
    """Lines of many runs as if they were one run's.

    Its round is the sum of theirs, its accuracy their mean.
    """

    def __init__(self) -> None:
        self.last: dict[str, Line] = {}
        self.accuracy: dict[str, float] = {}

    def __call__(self, name: str, line: Line) -> Line:
        self.last[name] = line
        if "accuracy_mean" in line:
            self.accuracy[name] = line["accuracy_mean"]
        merged = {**line, "round": sum(last["round"] for last in self.last.values())}
        if self.accuracy:
            merged["accuracy_mean"] = sum(self.accuracy.values()) / len(self.accuracy)
        return merged
