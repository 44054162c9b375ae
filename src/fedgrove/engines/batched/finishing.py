"""What is left to do for each client when its work is done, for several clients at once.

What it remembers is written to its file, and the bytes of its report are counted: both are a few
milliseconds of compression, checksums and copies, most of which leave Python's lock to others. The
results come in the order of the jobs, and what depends on that order is not done here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ...wire.codec import Chainable, Dense
from .stacking import Job

THREADS = min(8, os.cpu_count() or 1)
WORTH_A_THREAD = 1 << 14
"""Numbers in a network, from which on handing a client to a thread takes less than its work."""

AHEAD = 4 * THREADS
"""So many clients are finished before they are asked for."""

T = TypeVar("T")


def begin_meanwhile(jobs: Sequence[Job], prepare: Callable[[Job], object]) -> None:
    """Have ``prepare`` called for each job in threads, where that saves time; no one waits for it.

    It only does ahead what is asked for later: what it raises is raised there.
    """
    costly = [job for job in jobs if _is_costly(job)]
    if THREADS == 1 or not costly:
        return
    threads = ThreadPoolExecutor(THREADS)
    for job in costly:
        threads.submit(prepare, job)
    # They end when they are done.
    threads.shutdown(wait=False)


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
    """Whether there is something to compress or to write, and enough of it."""
    codec = job.run.method.codec
    # A codec of the user's own may not be made for threads.
    if not isinstance(codec, Chainable) or job.run.net.layout.size < WORTH_A_THREAD:
        return False
    # The size of a dense packet follows from its shapes.
    compresses = type(codec) is not Dense
    return compresses or bool(getattr(job.outcome, "memory", None))
