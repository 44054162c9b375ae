"""A worker process per core, one thread each: the default on a CPU.

On a CPU the arithmetic dominates: stacking clients or adding threads gains nothing, processes do.
Parameters travel through shared memory, each tree of a broadcast once; client memory is read and
written by the workers themselves. Of the next jobs the longest starts first, reports come back in
job order, and only a window of jobs is ever in progress, so that the server's memory does not grow
with the number of clients.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ...core import Packet, Report, Task
from ...errors import EngineError, FedgroveError
from ...runs.run import Run
from ...trees import Tree
from ...wire.count import BroadcastCosts, count_down, count_up
from ..work import perform
from . import shared
from .shared import Block


def cores() -> int:
    """How many cores this process may use."""
    # A container or a batch system may allow fewer cores than the machine has; not every system
    # can say so.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Envelope:
    """A task or report without its tensors, which travel as a list of trees in shared memory."""

    body: Any
    packets: tuple[tuple[str, int, int | None], ...]
    """(packet name, index of the tree of its values, index of the tree of its mask)."""


@dataclass(eq=False)
class Worker:
    """A process, and the server's end of the pipe to it."""

    process: BaseProcess
    pipe: Connection
    job: int | None = None
    """The job it is working on."""
    reply: str | None = None
    """The name of the shared block that its answer will be in."""


@dataclass(eq=False)
class Pool:
    """The engine: ``workers`` processes, by default one per core."""

    workers: int = 0
    name: str = field(default="pool", init=False)
    _runs: list[Run] = field(default_factory=list, init=False)
    _team: list[Worker] = field(default_factory=list, init=False)

    def map(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Run, Report]]:
        """Do the jobs on the workers; reports come in job order."""
        size = self.workers or cores()
        # Four jobs per worker keep all of them busy while the report of a long job is awaited.
        window = _Window(iter(jobs), max(16, 4 * size))
        try:
            while window.fill():
                while window.next_report in window.done:
                    yield window.take()
                    window.fill()
                if not window.open:
                    continue
                self._start_workers(window, size)
                self._hand_out(window)
                self._collect(window)
        except BaseException:
            # Also for Ctrl-C, and for a caller that stops early (GeneratorExit): workers in the
            # middle of a job would otherwise answer the next call.
            self.close()
            raise
        finally:
            window.free_blocks()

    def _start_workers(self, window: _Window, size: int) -> None:
        """Fork workers that know all runs of the window.

        They inherit data and network without a copy, but only of runs that exist when they start.
        """
        new_runs: list[Run] = []
        for run, _ in window.open.values():
            if run not in self._runs and run not in new_runs:
                new_runs.append(run)
        if self._team and not new_runs:
            return
        for worker in self._team:
            if worker.job is not None:
                # Replaced once all are idle; until then no job of the new runs is handed out.
                return
        self.close()
        self._runs = [*self._runs, *new_runs]
        # Before the fork, so that all processes share one tracker. A worker with a tracker of its
        # own would, on exit, remove blocks that others still read.
        resource_tracker.ensure_running()
        method = "fork" if "fork" in mp.get_all_start_methods() else "spawn"
        context = mp.get_context(method)
        for _ in range(size):
            server_end, worker_end = context.Pipe()
            server_ends = [worker.pipe for worker in self._team]
            server_ends.append(server_end)
            process = context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(worker_end, server_ends, self._runs), daemon=True
            )
            process.start()
            # Only the worker may hold this end: then its death closes the pipe, and is noticed.
            worker_end.close()
            self._team.append(Worker(process, server_end))

    def _hand_out(self, window: _Window) -> None:
        """Give each idle worker a job, as long as there are jobs."""
        for worker in self._team:
            if worker.job is not None:
                continue
            job = window.pick(self._runs)
            if job is None:
                return
            run, task = window.open[job]
            envelope, forest = _strip(task)
            # Noted before anything is sent: should the worker be killed, close() knows from these
            # that it was busy, and which block it may have left behind.
            worker.job = job
            worker.reply = shared.fresh_name()
            version = run.memory.files.get(task.to)
            try:
                blocks = window.share(job, forest)
                worker.pipe.send((self._runs.index(run), envelope, blocks, version, worker.reply))
            except OSError:
                raise _died(worker, window) from None

    def _collect(self, window: _Window) -> None:
        """Wait until at least one worker has answered, and take in all answers that are ready."""
        busy = {worker.pipe: worker for worker in self._team if worker.job is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                raise _died(worker, window) from None
            job = worker.job
            assert job is not None
            worker.job = None
            window.finish(job, answer)

    def close(self) -> None:
        """End the workers."""
        for worker in self._team:
            # An idle worker ends by itself when its pipe closes.
            worker.pipe.close()
            if worker.job is not None:
                worker.process.terminate()
        for worker in self._team:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            # The block of an answer that was never read; any other is gone already.
            shared.drop(worker.reply)
        self._team = []


class _Window:
    """The jobs in progress: open ones, finished ones, and what they have in shared memory."""

    def __init__(self, jobs: Iterator[tuple[Run, Task]], size: int) -> None:
        self.jobs = jobs
        self.size = size
        # Jobs are numbered from 0 in the order in which they come.
        self.next_job = 0
        self.next_report = 0
        self.open: dict[int, tuple[Run, Task]] = {}
        self.running: set[int] = set()
        self.done: dict[int, tuple[Run, Report]] = {}
        self.sent = BroadcastCosts()
        # Shared trees, by id. A tree is kept alive as long as its id is a key: the id of a tree
        # that is gone could be given to another.
        self.blocks: dict[int, Block] = {}
        self.users: dict[int, set[int]] = {}
        self.trees: dict[int, Tree] = {}

    def fill(self) -> bool:
        """Take jobs until the window is full; False when no job and no report is left."""
        while self.next_job < self.next_report + self.size:
            job = next(self.jobs, None)
            if job is None:
                break
            self.open[self.next_job] = job
            self.next_job += 1
        return bool(self.open or self.done)

    def pick(self, runs: list[Run]) -> int | None:
        """The longest open job of ``runs`` that is not running yet; it counts as running now.

        Longest first: a long job that starts last would leave the other workers idle at the end.
        """
        # Only the first open job of each client may run: the next one may need what this one makes
        # the client remember.
        first_of_client: dict[tuple[int, int], int] = {}
        for job, (run, task) in self.open.items():
            first_of_client.setdefault((id(run), task.to), job)
        longest = None
        most_examples = -1
        for job in first_of_client.values():
            run, task = self.open[job]
            if job in self.running or run not in runs:
                continue
            examples = run.infos[task.to].examples
            if examples > most_examples:
                longest = job
                most_examples = examples
        if longest is not None:
            self.running.add(longest)
        return longest

    def share(self, job: int, forest: list[Tree]) -> list[Block]:
        """Put a job's trees into shared memory, each in a block of its own, once for all jobs."""
        blocks = []
        for tree in forest:
            key = id(tree)
            if key not in self.blocks:
                self.blocks[key] = shared.put([tree])
                self.trees[key] = tree
            self.users.setdefault(key, set()).add(job)
            blocks.append(self.blocks[key])
        return blocks

    def finish(self, job: int, answer: Any) -> None:
        """Turn a worker's answer into the report of its job."""
        run, task = self.open.pop(job)
        self.running.discard(job)
        if isinstance(answer, _Failed):
            raise answer.error(task)
        envelope, block, version = answer
        report: Report = replace(envelope.body, give=_packets(envelope, shared.get(block)))
        shared.drop(block.name)
        run.memory.accept(task.to, version)
        # Counted here and not in the worker: the cost depends on the masks that the client has been
        # sent so far, which the server keeps track of.
        cost = {"down": count_down(task, run.method.codec, run.held, self.sent), **report.cost}
        self.done[job] = (run, replace(report, cost=cost))
        self._release(job)

    def _release(self, job: int) -> None:
        """Free the blocks that only finished jobs used, unless an open job will send the tree."""
        wanted: set[int] = set()
        for _, task in self.open.values():
            _, forest = _strip(task)
            wanted.update(id(tree) for tree in forest)
        for key, jobs in list(self.users.items()):
            if job not in jobs:
                continue
            jobs.discard(job)
            if not jobs and key not in wanted:
                shared.drop(self.blocks.pop(key).name)
                del self.users[key]
                del self.trees[key]

    def take(self) -> tuple[Run, Report]:
        """The next report in job order."""
        report = self.done.pop(self.next_report)
        self.next_report += 1
        return report

    def free_blocks(self) -> None:
        """Free all shared memory."""
        for block in self.blocks.values():
            shared.drop(block.name)
        self.blocks = {}


@dataclass(frozen=True)
class _Failed:
    """An exception in a worker, as text: the exception itself may not survive pickling."""

    sentence: str
    trace: str
    expected: bool
    """Whether fedgrove raised it on purpose; then its sentence says enough."""

    def error(self, task: Task) -> FedgroveError:
        detail = "" if self.expected else "\n" + self.trace
        return EngineError(f"client {task.to} could not {task.verb}: {self.sentence}{detail}")


def _died(worker: Worker, window: _Window) -> EngineError:
    # The pipe closes a little before the process has ended and its exit code is known.
    worker.process.join(1)
    job = worker.job
    assert job is not None
    _, task = window.open[job]
    return EngineError(
        f"worker process {worker.process.pid} died (exit code {worker.process.exitcode}) "
        f"while it worked for client {task.to}; it may have run out of memory."
    )


# ---- messages ------------------------------------------------------------------------------------


def _strip(body: Task | Report) -> tuple[Envelope, list[Tree]]:
    """A task or report without its tensors, and the trees that it held."""
    packets: Mapping[str, Packet]
    bare: Task | Report
    if isinstance(body, Task):
        packets = body.send
        bare = replace(body, send={})
    else:
        packets = body.give
        bare = replace(body, give={})
    forest: list[Tree] = []
    indices: list[tuple[str, int, int | None]] = []
    for name, packet in packets.items():
        values_index = len(forest)
        forest.append(packet.values)
        mask_index = None
        if packet.mask is not None:
            mask_index = len(forest)
            forest.append(packet.mask)
        indices.append((name, values_index, mask_index))
    return Envelope(bare, tuple(indices)), forest


def _packets(envelope: Envelope, forest: list[Tree]) -> dict[str, Packet]:
    """The packets that :func:`_strip` took out of a message."""
    packets = {}
    for name, values_index, mask_index in envelope.packets:
        mask = None if mask_index is None else forest[mask_index]
        packets[name] = Packet(forest[values_index], mask)
    return packets


# ---- in the worker -------------------------------------------------------------------------------


def _serve(pipe: Connection, server_ends: list[Connection], runs: list[Run]) -> None:
    """The loop of a worker: receive a task, do it, answer; ends when the pipe closes."""
    # Ctrl-C reaches every process of the terminal; it is for the server to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Inherited by the fork. If workers held them open, no worker would see the pipe close when the
    # server dies.
    for server_end in server_ends:
        server_end.close()
    torch.set_num_threads(1)
    while True:
        try:
            run_index, envelope, blocks, version, reply = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            answer = _answer(runs[run_index], envelope, blocks, version, reply)
        except Exception as error:
            answer = _Failed(
                f"{type(error).__name__}: {error}",
                traceback.format_exc(),
                isinstance(error, FedgroveError),
            )
        try:
            pipe.send(answer)
        except OSError:
            return


def _answer(
    run: Run, envelope: Envelope, blocks: list[Block], version: str | None, reply: str
) -> tuple[Envelope, Block, str | None]:
    """Do one task: its report, the block with the report's trees, the client's new memory file."""
    forest = []
    for block in blocks:
        # The server shares each tree of a task in a block of its own.
        (tree,) = shared.get(block)
        forest.append(tree)
    task: Task = replace(envelope.body, send=_packets(envelope, forest))
    report, kept = perform(run, task, run.memory.read(version))
    new_version = None
    if kept:
        new_version = run.memory.write(task.to, task.round, task.verb, kept, version)
    report = replace(report, cost={"up": count_up(task, report, run.method.codec, run.held)})
    answer, report_forest = _strip(report)
    return answer, shared.put(report_forest, reply), new_version
