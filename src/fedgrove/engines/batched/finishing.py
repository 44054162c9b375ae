"""What clients remember, written for several of them while the bytes of others are counted.

A file is a millisecond of checksums, copies and waiting for the disk, in a few calls that leave
Python's lock to others. So threads write ahead, and whoever asks for the answers counts, in the
order of the jobs. Threads do not count: that is hundreds of short calls, and threads that take
turns for the lock at each of them take longer than one thread alone. Other processes can
(:mod:`.counting`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from .stacking import Job

THREADS = min(3, os.cpu_count() or 1)
WORTH_A_THREAD = 1 << 18
"""Bytes that a client remembers, from which on handing it to a thread takes less than its work."""

AHEAD = 4 * THREADS
"""So many clients are finished before they are asked for."""

T = TypeVar("T")


def in_order(jobs: list[Job], finish: Callable[[Job], T]) -> Iterator[tuple[Job, T]]:
    """Each job with what ``finish`` makes of it, in threads where that saves time.

    Takes the jobs out of the list, so that their trees can be freed while later ones are waited
    for. An error is raised when it is the job's turn.
    """
    if THREADS == 1 or not any(_is_costly(job) for job in jobs):
        while jobs:
            job = jobs.pop(0)
            yield job, finish(job)
        return
    # Made anew: a thread takes little to start, and none is left behind where a process forks.
    with ThreadPoolExecutor(THREADS) as threads:
        waiting: deque[tuple[Job, Future[T]]] = deque()
        try:
            while jobs or waiting:
                while jobs and len(waiting) < AHEAD:
                    job = jobs.pop(0)
                    waiting.append((job, threads.submit(finish, job)))
                job, result = waiting.popleft()
                yield job, result.result()
        finally:
            # Where the caller wants no more, those that have not begun are left undone.
            for _, result in waiting:
                result.cancel()


def _is_costly(job: Job) -> bool:
    """Whether there is something to write, and enough of it."""
    forest = getattr(job.outcome, "memory", None)
    # What a client's work gives may be no trees at all; writing it says so.
    if not isinstance(forest, Mapping):
        return False
    size = 0
    for tree in forest.values():
        leaves = tree.values() if isinstance(tree, Mapping) else ()
        size += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return size >= WORTH_A_THREAD
