"""One client after another, in this process: the reference every other engine must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..core import Answer, Job
from ..wire.message_costs import BroadcastCosts
from .work import answer


@dataclass(eq=False)
class Serial:
    """The engine to read first, to debug with, and to compare the others with.

    A client that takes longer than ``timeout`` seconds is lost.
    """

    timeout: float | None = None
    name: str = field(default="serial", init=False)

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do each job when its answer is asked for."""
        broadcasts = BroadcastCosts()
        for job in jobs:
            run, task = job
            yield job, answer(run, task, broadcasts, self.timeout)

    def close(self) -> None:
        """There is nothing to release."""
