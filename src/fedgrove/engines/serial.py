"""The serial engine: one client after another in this process. Other engines must equal it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..core import Answer, Job
from ..wire.message_costs import BroadcastCosts
from .work import do_task


@dataclass(eq=False)
class Serial:
    """Runs one client after another; the engine to read first and to debug with.

    The task of a client that takes longer than ``timeout`` seconds is lost.
    """

    timeout: float | None = None
    name: str = field(default="serial", init=False)

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do each job in this process when the caller takes its answer."""
        broadcasts = BroadcastCosts()
        for job in jobs:
            run, task = job
            yield job, do_task(run, task, broadcasts, self.timeout)

    def close(self) -> None:
        """Do nothing: there are no workers."""
