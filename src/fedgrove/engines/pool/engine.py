"""A worker process per core, one thread each: the default on a CPU.

On a CPU the arithmetic dominates: stacking clients or adding threads gains nothing, processes do.
Parameters travel through shared memory, each tree of a broadcast once; client memory is read and
written by the workers themselves. Of the next jobs the longest starts first, reports come back in
job order, and only a window of jobs is ever in progress, so that the server's memory does not grow
with the number of clients.

A worker that dies is replaced, and its job is given to another one once more; a worker that does
not answer in time is ended. Either way the job is lost at worst, and never the run.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ...core import Answer, Job, Lost, Packet, Report, Task
from ...errors import EngineError, FedgroveError
from ...runs.run import Run
from ...trees import Tree
from ...wire.count import BroadcastCosts, count_down, count_up
from ..work import crashed, explained, late, perform, unreadable, with_memory
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
    since: float = 0.0
    """When it was given that job."""
    reply: str | None = None
    """The name of the shared block that its answer will be in."""


@dataclass(eq=False)
class Pool:
    """The engine: ``workers`` processes, by default one per core.

    A job that is not answered within ``timeout`` seconds is lost. ``start`` is how processes begin:
    fork, which shares data without a copy, or spawn where there is no fork.
    """

    workers: int = 0
    timeout: float | None = None
    start: str = ""
    name: str = field(default="pool", init=False)
    _runs: list[Run] = field(default_factory=list, init=False)
    _team: list[Worker] = field(default_factory=list, init=False)

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs on the workers; answers come in job order."""
        size = self.workers or cores()
        # Four jobs per worker keep all of them busy while the answer of a long job is awaited.
        window = _Window(iter(jobs), max(16, 4 * size))
        try:
            while window.fill():
                while window.next_answer in window.done:
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
        for _ in range(size):
            self._team.append(self._hire())

    def _hire(self) -> Worker:
        """A new worker process that knows all runs."""
        method = self.start or ("fork" if "fork" in mp.get_all_start_methods() else "spawn")
        context = mp.get_context(method)
        server_end, worker_end = context.Pipe()
        inherited: list[Connection] = []
        if method == "fork":
            # A spawned process inherits nothing, and has none of these to close.
            inherited = [worker.pipe for worker in self._team]
            inherited.append(server_end)
        process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(worker_end, inherited, self._runs, os.getpid()), daemon=True
        )
        process.start()
        # Only the worker may hold this end: then its death closes the pipe, and is noticed.
        worker_end.close()
        return Worker(process, server_end)

    def _hand_out(self, window: _Window) -> None:
        """Give each idle worker a job, as long as there are jobs."""
        for worker in list(self._team):
            if worker.job is not None:
                continue
            job = window.pick(self._runs)
            if job is None:
                return
            run, task = window.open[job]
            envelope, forest = _strip(task)
            # Noted before anything is sent: should the worker be killed, it is known from these
            # that it was busy, and which block it may have left behind.
            worker.job = job
            worker.since = time.monotonic()
            worker.reply = shared.fresh_name()
            blocks = window.share(job, forest)
            try:
                worker.pipe.send((self._runs.index(run), envelope, blocks, worker.reply))
            except OSError:
                self._replace_dead(worker, window)

    def _collect(self, window: _Window) -> None:
        """Wait for an answer, a death or the end of a worker's time, and take in what is there."""
        busy = {worker.pipe: worker for worker in self._team if worker.job is not None}
        for pipe in wait(list(busy), self._patience(busy.values())):
            worker = busy[pipe]  # type: ignore[index]
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace_dead(worker, window)
                continue
            job = worker.job
            assert job is not None
            worker.job = None
            window.finish(job, answer)
        if self.timeout is not None:
            self._end_late_workers(window, self.timeout)

    def _patience(self, busy: Iterable[Worker]) -> float | None:
        """Seconds until the first worker has had its time; None if that never comes."""
        if self.timeout is None:
            return None
        earliest = min((worker.since for worker in busy), default=time.monotonic())
        return max(0.0, earliest + self.timeout - time.monotonic())

    def _end_late_workers(self, window: _Window, timeout: float) -> None:
        """End the workers that had their time, a stopped one too; their jobs are lost."""
        for worker in list(self._team):
            if worker.job is None or time.monotonic() - worker.since < timeout:
                continue
            # What came in the meantime still counts.
            if worker.pipe.poll():
                continue
            _, task = window.open[worker.job]
            window.lose(worker.job, late(task, timeout))
            self._replace(worker)

    def _replace_dead(self, worker: Worker, window: _Window) -> None:
        """A new worker in place of one that died; its job is tried once more, then it is lost."""
        # The pipe closes a little before the process has ended and its exit code is known.
        worker.process.join(1)
        job = worker.job
        assert job is not None
        if job in window.tried_twice:
            _, task = window.open[job]
            sentence = (
                f"worker process {worker.process.pid} died (exit code {worker.process.exitcode}) "
                f"while it worked for client {task.to}, as one had before; it may have run out of "
                "memory."
            )
            window.lose(job, Lost(task.to, "died", sentence))
        else:
            window.tried_twice.add(job)
            window.running.discard(job)
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        """End a worker and hire another."""
        worker.pipe.close()
        # Not terminate(): a stopped process gets no other signal.
        worker.process.kill()
        worker.process.join()
        shared.drop(worker.reply)
        self._team[self._team.index(worker)] = self._hire()

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

    def __init__(self, jobs: Iterator[Job], size: int) -> None:
        self.jobs = jobs
        self.size = size
        # Jobs are numbered from 0 in the order in which they come.
        self.next_job = 0
        self.next_answer = 0
        self.open: dict[int, Job] = {}
        self.running: set[int] = set()
        self.tried_twice: set[int] = set()
        self.done: dict[int, tuple[Job, Answer]] = {}
        self.sent = BroadcastCosts()
        # Shared trees, by id. A tree is kept alive as long as its id is a key: the id of a tree
        # that is gone could be given to another.
        self.blocks: dict[int, Block] = {}
        self.users: dict[int, set[int]] = {}
        self.trees: dict[int, Tree] = {}

    def fill(self) -> bool:
        """Take jobs until the window is full; False when no job and no answer is left."""
        while self.next_job < self.next_answer + self.size:
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
        longest = None
        most_examples = -1
        for job, (run, task) in self.open.items():
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

    def finish(self, job: int, reply: Any) -> None:
        """Turn a worker's reply into the answer to its job."""
        if isinstance(reply, _Failed):
            raise EngineError(reply.sentence)
        outcome: Answer = reply
        if not isinstance(reply, Lost):
            envelope, block = reply
            outcome = replace(envelope.body, give=_packets(envelope, shared.get(block)))
            shared.drop(block.name)
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

    def take(self) -> tuple[Job, Answer]:
        """The next answer in job order."""
        (run, task), outcome = self.done.pop(self.next_answer)
        self.next_answer += 1
        # Counted here and not in the worker: the cost depends on the masks that clients have been
        # sent so far, which the server keeps track of; and in job order, as in every engine.
        down = count_down(task, run.method.codec, run.held, self.sent)
        return (run, task), replace(outcome, cost={"down": down, **outcome.cost})

    def free_blocks(self) -> None:
        """Free all shared memory."""
        for block in self.blocks.values():
            shared.drop(block.name)
        self.blocks = {}


@dataclass(frozen=True)
class _Failed:
    """What no other worker could do better, such as a full disk: it ends the run."""

    sentence: str


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


def _serve(pipe: Connection, inherited: list[Connection], runs: list[Run], server: int) -> None:
    """The loop of a worker: receive a task, do it, answer; ends when the pipe closes."""
    # Ctrl-C reaches every process of the terminal; it is for the server to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Inherited by the fork. If workers held them open, no worker would see the pipe close when the
    # server dies.
    for server_end in inherited:
        server_end.close()
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            run_index, envelope, blocks, reply = pipe.recv()
        except (EOFError, OSError):
            return
        answer = _answer(runs[run_index], envelope, blocks, reply)
        try:
            pipe.send(answer)
        except OSError:
            return


def _end_with(server: int) -> None:
    """End this process when the server has ended, also in the middle of a job."""
    while os.getppid() == server:
        time.sleep(1)
    os._exit(1)


def _answer(
    run: Run, envelope: Envelope, blocks: list[Block], reply: str
) -> tuple[Envelope, Block] | Lost | _Failed:
    """Do one task: its report, and the block with the report's trees."""
    try:
        forest = []
        for block in blocks:
            # The server shares each tree of a task in a block of its own.
            (tree,) = shared.get(block)
            forest.append(tree)
        task: Task = replace(envelope.body, send=_packets(envelope, forest))
        memory = run.memory.read(task.to, task.memory)
        try:
            report, remembered = perform(run, task, memory)
        except Exception as error:
            return crashed(task, error)
        report = with_memory(run, task, report, remembered)
        try:
            report = replace(
                report, cost={"up": count_up(task, report, run.method.codec, run.held)}
            )
            body, report_forest = _strip(report)
        except Exception as error:
            return unreadable(task, error)
        return body, shared.put(report_forest, reply)
    except (FedgroveError, OSError) as error:
        # Not the client's fault: memory that cannot be read, a full disk or shared memory.
        return _Failed(explained(error))
