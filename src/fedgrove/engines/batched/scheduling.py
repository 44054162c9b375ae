"""Work that overlaps: stages that take turns on a GPU, and threads that write clients' memories.

Work that takes turns is a generator. It yields when it has launched all it can and would have to
wait for the GPU; the caller that resumes it waits with it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from ... import trees
from ...parts import local
from .counting import PendingPacket
from .device import Copies
from .jobs import ClientJob
from .stacking import ReturningRows, WidthAdapter

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Chunk:
    """Jobs that are under way together."""

    jobs: list[ClientJob]
    sent_before: list[tuple[Tensor, int]]
    """The tensors that they were sent, with how often each had been written to."""
    steps: Iterator[None]
    """The work on their stages."""
    tasks: list[PendingPacket]
    """Packets of their tasks that other processes count."""


class TrainResults(NamedTuple):
    """The results of a Train stage, while they are copied to the CPU."""

    jobs: list[ClientJob]
    rows: list[int]
    """The row of each job; duplicates share a row."""
    returning: dict[str, ReturningRows]
    adapters: list[WidthAdapter]
    place: int
    """The number of the stage among the Train stages of its work."""

    def store(self) -> None:
        """Wait for a stack's results and put them into the jobs' carries, in full width."""
        trees_by_name = {name: tree.trees() for name, tree in self.returning.items()}
        for job, row, adapter in zip(self.jobs, self.rows, self.adapters, strict=True):
            result = {name: forest[row] for name, forest in trees_by_name.items()}
            place = local.place_of_state(job.task.verb, self.place)
            trained, states = local.take_state(adapter.widen(result), place)
            job.carry = {**job.carry, **trained}
            # A new dictionary: a copy of the job may have the old one.
            job.states = {**job.states, **states}


class MeasureResults(NamedTuple):
    """The sums of a Measure stage, while they are copied to the CPU."""

    jobs: list[ClientJob]
    name: str
    examples: list[int]
    copies: Copies

    def store(self) -> None:
        """Wait for a stack's sums and put them into the jobs' carries."""
        sums = trees.unstack(self.copies.wait(), len(self.jobs))
        for job, examples, result in zip(self.jobs, self.examples, sums, strict=True):
            # As in every engine: an empty tree if there are no examples, not zeros.
            job.carry = {**job.carry, self.name: result if examples else {}}


class ClientExit(Exception):
    """A client's work raised GeneratorExit, which has another meaning in a generator."""


def run_to_end(steps: Iterator[None]) -> None:
    """Run the generator of a chunk of jobs to its end."""
    for _ in steps:
        pass


def take_turns(works: Sequence[Iterator[None]]) -> Iterator[None]:
    """Run each chunk's generator until it waits for the GPU, and then each to its end."""
    for steps in works:
        next(steps, None)
    yield
    for steps in works:
        run_to_end(steps)


# ---- what clients remember, written in threads ---------------------------------------------------

THREADS = min(3, os.cpu_count() or 1)
WORTH_A_THREAD = 1 << 18
"""Bytes of a client's memory, from which on a thread saves more time than it costs."""

MAX_AHEAD = 4 * THREADS
"""The number of clients that are finished ahead of the caller."""


def finish_in_order(
    jobs: list[ClientJob], finish: Callable[[ClientJob], T]
) -> Iterator[tuple[ClientJob, T]]:
    """Yield each job with the result of ``finish``, in threads if that saves time.

    Writing a memory is a millisecond of checksums, copies and waiting for the disk, in a few calls
    that release Python's lock. So threads write ahead while the caller counts bytes, in job order.
    Threads do not count: that is hundreds of short calls, and waiting for the lock at each of them
    takes longer than one thread alone. Other processes can (:mod:`.counting`).

    The jobs are removed from the list, so that their trees can be freed early. An error is raised
    when it is the job's turn.
    """
    if THREADS == 1 or not any(_is_costly(job) for job in jobs):
        while jobs:
            job = jobs.pop(0)
            yield job, finish(job)
        return
    # New threads each time: they start quickly, and none exists when a process forks.
    with ThreadPoolExecutor(THREADS) as threads:
        waiting: deque[tuple[ClientJob, Future[T]]] = deque()
        try:
            while jobs or waiting:
                while jobs and len(waiting) < MAX_AHEAD:
                    job = jobs.pop(0)
                    waiting.append((job, threads.submit(finish, job)))
                job, result = waiting.popleft()
                yield job, result.result()
        finally:
            # If the caller stops, jobs that have not begun are not finished.
            for _, result in waiting:
                result.cancel()


def _is_costly(job: ClientJob) -> bool:
    """Return whether the job has enough memory to write for a thread to pay."""
    forest = getattr(job.outcome, "memory", None)
    # A client's work may return anything; writing it reports the error.
    if not isinstance(forest, Mapping):
        return False
    size = 0
    for tree in forest.values():
        leaves = tree.values() if isinstance(tree, Mapping) else ()
        size += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return size >= WORTH_A_THREAD
