"""The jobs of a pool that are in progress, and how long jobs take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

from ...core import Answer, Job, Task
from ...errors import EngineError
from ...runs.run import Run
from ...trees import Tree
from ...wire.message_costs import BroadcastCosts, count_task
from ..work import lose_unreadable
from . import shared
from .message import Failed, read_answer, strip
from .shared import Block


def _count_examples(run: Run, task: Task) -> int:
    """Return the number of training examples of a job's client."""
    try:
        return run.federation.info(task.to, task.round).examples
    except Exception:
        # The data of this client cannot be made; its worker reports why.
        return 0


class Paces:
    """Seconds per example that jobs took, by run and verb: training takes longer than scoring.

    A kind of job that was not measured yet counts as the longest, so that it starts first.
    """

    def __init__(self) -> None:
        # Weak keys: the numbers of a run go with the run.
        self._seconds: WeakKeyDictionary[Run, dict[str, float]] = WeakKeyDictionary()

    def note(self, run: Run, task: Task, seconds: float) -> None:
        """Note how many seconds a worker took for a job."""
        measured = seconds / max(_count_examples(run, task), 1)
        paces = self._seconds.setdefault(run, {})
        # A moving average, because a worker may have had to wait for a core.
        paces[task.verb] = (measured + paces.get(task.verb, measured)) / 2

    def predict(self, run: Run, task: Task) -> tuple[float, int]:
        """Predict a worker's seconds for a job (infinite if not measured yet), and its examples."""
        examples = _count_examples(run, task)
        pace = self._seconds.get(run, {}).get(task.verb, math.inf)
        # A client without examples still takes some time.
        return pace * max(examples, 1), examples


class Window:
    """The jobs in progress: open ones, finished ones, and their blocks of shared memory."""

    def __init__(self, jobs: Iterator[Job], size: int, paces: Paces | None = None) -> None:
        self.jobs = jobs
        self.size = size
        self.paces = paces or Paces()
        # Jobs are numbered from 0 in the order in which they arrive.
        self.next_job = 0
        self.next_answer = 0
        self.open: dict[int, Job] = {}
        self.running: set[int] = set()
        # Jobs whose worker died: they are tried a second and last time.
        self.died_once: set[int] = set()
        self.done: dict[int, tuple[Job, Answer]] = {}
        self.sent = BroadcastCosts()
        # Shared trees, by id. A tree is kept alive while its id is a key, because Python may reuse
        # the id of a deleted tree.
        self.blocks: dict[int, Block] = {}
        self.users: dict[int, set[int]] = {}
        self.trees: dict[int, Tree] = {}
        # The names of all blocks, added before a block is made and removed after it is freed,
        # because Ctrl-C may come in between.
        self.names: set[str] = set()

    def fill(self) -> bool:
        """Take jobs for the pool until the window is full; return False if none is left."""
        while self.next_job < self.next_answer + self.size:
            job = next(self.jobs, None)
            if job is None:
                break
            self.open[self.next_job] = job
            self.next_job += 1
        return bool(self.open or self.done)

    def count_waiting(self, runs: list[Run]) -> int:
        """Count the open jobs of ``runs`` that no worker of the pool runs yet."""
        return sum(run in runs for job, (run, _) in self.open.items() if job not in self.running)

    def pick(self, runs: list[Run]) -> int | None:
        """Pick the longest open job of ``runs`` for a worker, and mark it as running.

        Longest first: a long job that starts last would leave the other workers idle at the end.
        """
        longest = None
        most = (-1.0, -1)
        for job, (run, task) in self.open.items():
            if job in self.running or run not in runs:
                continue
            expected = self.paces.predict(run, task)
            if expected > most:
                longest = job
                most = expected
        if longest is not None:
            self.running.add(longest)
        return longest

    def share(self, job: int, forest: list[Tree]) -> list[Block]:
        """Put each tree of a job into a shared block, unless another job has put it there."""
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

    def finish(self, job: int, message: bytes) -> None:
        """Turn a worker's message into the answer to its job."""
        _, task = self.open[job]
        outcome: Answer | Failed
        try:
            outcome = read_answer(message)
        except Exception as error:
            outcome = lose_unreadable(task, error)
        if isinstance(outcome, Failed):
            raise EngineError(outcome.sentence)
        self.close(job, outcome)

    def close(self, job: int, outcome: Answer) -> None:
        """Move a job of the pool from the open ones to those that have an answer."""
        self.done[job] = (self.open.pop(job), outcome)
        self.running.discard(job)
        self._release(job)

    def _release(self, job: int) -> None:
        """Free the blocks that no open job needs any more."""
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
        """Return the pool's next answer in job order."""
        (run, task), outcome = self.done.pop(self.next_answer)
        self.next_answer += 1
        # Counted here, not in the worker: the cost depends on the masks that clients were sent so
        # far, which the server knows. In job order, as in every engine.
        down = count_task(task, run.method.codec, run.known_state, self.sent)
        return (run, task), replace(outcome, cost={"down": down, **outcome.cost})

    def _drop(self, name: str | None) -> None:
        shared.drop(name)
        if name is not None:
            self.names.discard(name)

    def free_blocks(self) -> None:
        """Free all shared memory of the pool."""
        for name in list(self.names):
            self._drop(name)
        self.blocks = {}
