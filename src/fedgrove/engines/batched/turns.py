"""Work that takes turns: while a card is busy with one piece, the CPU goes on with another.

Such a piece is a generator. It yields when it has launched all it can and would have to wait for
the card; whoever asks it to go on waits with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from ... import trees
from .counting import Awaited
from .stacking import Job, Returning, WidthAdapter
from .transfers import Copies

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """Jobs that are under way at once."""

    jobs: list[Job]
    sent_before: list[tuple[Tensor, int]]
    """The tensors that they were sent, each with how often it had been written to."""
    steps: Iterator[None]
    """Their stages."""
    tasks: list[Awaited]
    """What they were sent, as far as it is being counted."""


class Results(NamedTuple):
    """What the jobs of a Train stage end with, on its way to the CPU."""

    jobs: list[Job]
    rows: list[int]
    """The row that is each job's; jobs that end the same share one."""
    returning: dict[str, Returning]
    adapters: list[WidthAdapter]

    def take(self) -> None:
        """Into the jobs' carries, in full width."""
        trees_by_name = {name: tree.trees() for name, tree in self.returning.items()}
        for job, row, adapter in zip(self.jobs, self.rows, self.adapters, strict=True):
            result = {name: forest[row] for name, forest in trees_by_name.items()}
            job.carry = {**job.carry, **adapter.widen(result)}


class Measured(NamedTuple):
    """The sums of a Measure stage, on their way to the CPU."""

    jobs: list[Job]
    name: str
    examples: list[int]
    copies: Copies

    def take(self) -> None:
        """Into the jobs' carries."""
        sums = trees.unstack(self.copies.wait(), len(self.jobs))
        for job, examples, result in zip(self.jobs, self.examples, sums, strict=True):
            # As in every engine: without examples, an empty tree and not zeros.
            job.carry = {**job.carry, self.name: result if examples else {}}


class ClientExit(Exception):
    """A client's work ended with GeneratorExit, which says something else to a generator."""


def client_code(launch: Callable[[], T]) -> T:
    """What launching clients' work gives; an objective of a user's may end with anything."""
    try:
        return launch()
    except GeneratorExit as error:
        raise ClientExit(f"GeneratorExit: {error}") from error


def to_the_end(steps: Iterator[None]) -> None:
    """Go on, and wait where there is something to wait for."""
    for _ in steps:
        pass


def in_turns(works: Sequence[Iterator[None]]) -> Iterator[None]:
    """Each up to where it waits for a card, and then each to its end."""
    for steps in works:
        next(steps, None)
    yield
    for steps in works:
        to_the_end(steps)
