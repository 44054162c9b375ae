"""One client after another, in this process: the reference every other engine must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..core import Report, Task
from ..runs.run import Run
from ..wire.count import BroadcastCosts, count_down, count_up
from .work import perform


class Serial:
    """The engine to read first, to debug with, and to compare the others with."""

    name = "serial"

    def map(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Run, Report]]:
        """Do each job when its report is asked for."""
        broadcasts = BroadcastCosts()
        for run, task in jobs:
            version = run.memory.files.get(task.to)
            report, remembered = perform(run, task, run.memory.read(version))
            if remembered:
                written = run.memory.write(task.to, task.round, task.verb, remembered, version)
                run.memory.accept(task.to, written)
            codec = run.method.codec
            cost = {
                "down": count_down(task, codec, run.held, broadcasts),
                "up": count_up(task, report, codec, run.held),
            }
            yield run, replace(report, cost=cost)

    def close(self) -> None:
        """There is nothing to release."""
