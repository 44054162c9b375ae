"""The jobs of a map that are in progress."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

from ...core import Answer, Job, Lost, Task
from ...errors import EngineError
from ...runs.run import Run
from ...trees import Tree
from ...wire.message_costs import BroadcastCosts, count_task
from ..work import unreadable
from . import shared
from .message import Failed, read, strip
from .shared import Block


def _examples(run: Run, task: Task) -> int:
    """How many examples a job is about."""
    try:
        return run.federation.info(task.to, task.round).examples
    except Exception:
        # A client that cannot be made is lost, and its worker says why.
        return 0


class Paces:
    """Seconds per example that jobs took, by run and verb: training takes longer than scoring.

    A job whose kind was not measured yet counts as if it took longest: it starts at once, and is.
    """

    def __init__(self) -> None:
        # Runs that are gone take their numbers along.
        self._seconds: WeakKeyDictionary[Run, dict[str, float]] = WeakKeyDictionary()

    def note(self, run: Run, task: Task, seconds: float) -> None:
        """A job took so long."""
        measured = seconds / max(_examples(run, task), 1)
        paces = self._seconds.setdefault(run, {})
        # A worker may have been kept waiting: half of what was known stays.
        paces[task.verb] = (measured + paces.get(task.verb, measured)) / 2

    def expected(self, run: Run, task: Task) -> tuple[float, int]:
        """How long a job will take: in seconds, if such jobs were measured; then its examples."""
        examples = _examples(run, task)
        pace = self._seconds.get(run, {}).get(task.verb, math.inf)
        # A client without examples is not measured by them.
        return pace * max(examples, 1), examples


class Window:
    """The jobs in progress: open ones, finished ones, and what they have in shared memory."""

    def __init__(self, jobs: Iterator[Job], size: int, paces: Paces | None = None) -> None:
        self.jobs = jobs
        self.size = size
        self.paces = paces or Paces()
        # Jobs are numbered from 0 in the order in which they come.
        self.next_job = 0
        self.next_answer = 0
        self.open: dict[int, Job] = {}
        self.running: set[int] = set()
        # Jobs whose worker died: they are being tried again, for the last time.
        self.died_once: set[int] = set()
        self.done: dict[int, tuple[Job, Answer]] = {}
        self.sent = BroadcastCosts()
        # Shared trees, by id. A tree is kept alive as long as its id is a key: the id of a tree
        # that is gone could be given to another.
        self.blocks: dict[int, Block] = {}
        self.users: dict[int, set[int]] = {}
        self.trees: dict[int, Tree] = {}
        # The names of all blocks, noted before a block is made and crossed out after it is gone:
        # Ctrl-C may come in between.
        self.names: set[str] = set()

    def fill(self) -> bool:
        """Take jobs until the window is full; False when no job and no answer is left."""
        while self.next_job < self.next_answer + self.size:
            job = next(self.jobs, None)
            if job is None:
                break
            self.open[self.next_job] = job
            self.next_job += 1
        return bool(self.open or self.done)

    def waiting(self, runs: list[Run]) -> int:
        """How many open jobs of ``runs`` are not running yet."""
        return sum(run in runs for job, (run, _) in self.open.items() if job not in self.running)

    def pick(self, runs: list[Run]) -> int | None:
        """The longest open job of ``runs`` that is not running yet; it counts as running now.

        Longest first: a long job that starts last would leave the other workers idle at the end.
        """
        longest = None
        most = (-1.0, -1)
        for job, (run, task) in self.open.items():
            if job in self.running or run not in runs:
                continue
            expected = self.paces.expected(run, task)
            if expected > most:
                longest = job
                most = expected
        if longest is not None:
            self.running.add(longest)
        return longest

    def share(self, job: int, forest: list[Tree]) -> list[Block]:
        """Put a job's trees into shared memory, each in a block of its own, once for all jobs."""
        blocks = []
        for tree in forest:
            key = id(tree)
            if key not in self.blocks:
                name = shared.fresh_name()
                self.names.add(name)
                self.blocks[key] = shared.put([tree], name)
                self.trees[key] = tree
            self.users.setdefault(key, set()).add(job)
            blocks.append(self.blocks[key])
        return blocks

    def note(self, job: int, seconds: float) -> None:
        """A job was answered after so many seconds."""
        run, task = self.open[job]
        self.paces.note(run, task, seconds)

    def finish(self, job: int, message: bytes) -> None:
        """Turn a worker's message into the answer to its job."""
        _, task = self.open[job]
        outcome: Answer | Failed
        try:
            outcome = read(message)
        except Exception as error:
            outcome = unreadable(task, error)
        if isinstance(outcome, Failed):
            raise EngineError(outcome.sentence)
        self._close(job, outcome)

    def lose(self, job: int, lost: Lost) -> None:
        """A job that will have no reply."""
        self._close(job, lost)

    def _close(self, job: int, outcome: Answer) -> None:
        run, task = self.open.pop(job)
        self.running.discard(job)
        self.done[job] = ((run, task), outcome)
        self._release(job)

    def _release(self, job: int) -> None:
        """Free the blocks that only finished jobs used, unless an open job will send the tree."""
        wanted: set[int] = set()
        for _, task in self.open.values():
            _, forest = strip(task)
            wanted.update(id(tree) for tree in forest)
        for key, jobs in list(self.users.items()):
            if job not in jobs:
                continue
            jobs.discard(job)
            if not jobs and key not in wanted:
                self._drop(self.blocks.pop(key).name)
                del self.users[key]
                del self.trees[key]

    def take(self) -> tuple[Job, Answer]:
        """The next answer in job order."""
        (run, task), outcome = self.done.pop(self.next_answer)
        self.next_answer += 1
        # Counted here and not in the worker: the cost depends on the masks that clients have been
        # sent so far, which the server keeps track of; and in job order, as in every engine.
        down = count_task(task, run.method.codec, run.known_state, self.sent)
        return (run, task), replace(outcome, cost={"down": down, **outcome.cost})

    def _drop(self, name: str | None) -> None:
        shared.drop(name)
        if name is not None:
            self.names.discard(name)

    def free_blocks(self) -> None:
        """Free all shared memory."""
        for name in list(self.names):
            self._drop(name)
        self.blocks = {}
