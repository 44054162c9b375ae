"""One client after another, in this process: the reference every other engine must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..core import Report, Task
from ..runs.rounds import Run
from .work import Sent, count_down, count_up, perform


class Serial:
    """The engine to read first, to debug with, and to compare the others with."""

    name = "serial"

    def map(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Run, Report]]:
        """Do each job when its report is asked for."""
        sent = Sent()
        for run, task in jobs:
            held = run.memory.files.get(task.to)
            report, kept = perform(run, task, run.memory.read(held))
            if kept:
                run.memory.accept(
                    task.to, run.memory.write(task.to, task.round, task.verb, kept, held)
                )
            cost = {"down": count_down(run, task, sent), "up": count_up(run, task, report)}
            yield run, replace(report, cost=cost)

    def close(self) -> None:
        """Nothing to let go of."""
