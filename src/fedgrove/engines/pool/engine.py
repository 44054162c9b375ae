"""A worker process per core, one thread each: the default on a CPU.

On a CPU the arithmetic dominates: stacking clients or adding threads gains nothing, processes do.
Parameters travel through shared memory, each tree of a broadcast once; client memory is read and
written by the workers themselves. Of the next jobs the longest starts first, by the time that such
jobs took before; reports come back in job order, and only a window of jobs is ever in progress, so
that the server's memory does not grow with the number of clients.

A worker that dies is replaced, and its job is given to another one once more; a worker that does
not answer in time is ended. Either way the job is lost at worst, and never the run.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import pickle
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ...core import Answer, Job, Lost
from ...errors import EngineError, unknown
from ...runs.run import Run
from ..work import late
from . import shared
from .message import strip
from .packing import PackedRuns, pack
from .window import Paces, Window
from .worker import serve, signals_held

START_SECONDS = 120.0
"""How long a worker may take to start: a spawned one imports torch, perhaps many at once."""
STARTS = 3
"""The pool gives up once so many workers, one after another, have ended before they started."""


def cores() -> int:
    """How many cores this process may use."""
    # A container or a batch system may allow fewer cores than the machine has; not every system
    # can say so.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_start() -> str:
    """How processes begin here: fork, unless the system has none or, as macOS, warns of it."""
    has_fork = "fork" in mp.get_all_start_methods()
    return "fork" if has_fork and sys.platform != "darwin" else "spawn"


@dataclass(eq=False)
class Worker:
    """A process, and the server's end of the pipe to it."""

    process: BaseProcess
    pipe: Connection
    since: float
    """When it was started, or given its job."""
    ready: bool = False
    """Whether it has said that it has started."""
    job: int | None = None
    """The job it is working on."""
    reply: str | None = None
    """The name of the shared block that its answer will be in."""


@dataclass(eq=False)
class Pool:
    """The engine: ``workers`` processes, by default one per core.

    A job that is not answered within ``timeout`` seconds is lost. ``start`` is how processes begin:
    ``fork``, which shares data without a copy, or ``spawn``, which sends each worker a copy.
    """

    workers: int = 0
    timeout: float | None = None
    start: str = field(default_factory=default_start)
    name: str = field(default="pool", init=False)
    _runs: list[Run] = field(default_factory=list, init=False)
    _packed_runs: PackedRuns | None = field(default=None, init=False)
    _team: list[Worker] = field(default_factory=list, init=False)
    _failed_starts: int = field(default=0, init=False)
    _window: Window | None = field(default=None, init=False)
    _paces: Paces = field(default_factory=Paces, init=False)

    def __post_init__(self) -> None:
        if self.start not in ("fork", "spawn"):
            raise unknown("start method", self.start, ["fork", "spawn"])

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs on the workers; answers come in job order."""
        size = self.workers or cores()
        if self._window is not None:
            # Another map was left in the middle: its workers would answer to this one.
            self.close()
        # Four jobs per worker keep all of them busy while the answer of a long job is awaited.
        window = Window(iter(jobs), max(16, 4 * size), self._paces)
        self._window = window
        try:
            while window.fill():
                if window.open:
                    self._know_runs(window)
                    self._hire_for(window, size)
                    self._hand_out(window)
                # Workers have their jobs before the caller has an answer, which may take it long.
                if window.next_answer in window.done:
                    yield window.take()
                    if self._window is not window:
                        raise EngineError("the pool was closed, or given other jobs, during a map.")
                else:
                    self._collect(window)
        except BaseException:
            # Also for Ctrl-C, and for a caller that stops early (GeneratorExit): workers in the
            # middle of a job would otherwise answer the next call.
            if self._window is window:
                self.close()
            raise
        finally:
            window.free_blocks()
            if self._window is window:
                self._window = None

    def close(self) -> None:
        """End the workers, and free what lies in shared memory."""
        self._dismiss()
        if self._window is not None:
            self._window.free_blocks()
            self._window = None

    # ---- workers come and go ---------------------------------------------------------------------

    def _know_runs(self, window: Window) -> None:
        """End workers that do not know all runs of the window, once they are idle.

        Workers get data and network when they start, and know no run that comes later.
        """
        new_runs: list[Run] = []
        for run, _ in window.open.values():
            if run not in self._runs and run not in new_runs:
                new_runs.append(run)
        # Until all are idle no job of the new runs is handed out.
        all_idle = all(worker.job is None for worker in self._team)
        if new_runs and all_idle:
            self._dismiss()
            self._runs = [*self._runs, *new_runs]

    def _hire_for(self, window: Window, size: int) -> None:
        """Start workers as long as there are more jobs than workers without one."""
        idle = sum(worker.job is None for worker in self._team)
        while len(self._team) < size and idle < window.waiting(self._runs):
            self._team.append(self._hire())
            idle += 1

    def _hire(self) -> Worker:
        """A new worker process that knows all runs."""
        # Before the worker, so that all processes share one tracker. A worker with a tracker of its
        # own would, on exit, remove blocks that others still read. Without signals, because the
        # tracker must outlive a terminal that hangs up.
        with signals_held():
            resource_tracker.ensure_running()
        context = mp.get_context(self.start)
        server_end, worker_end = context.Pipe()
        inherited: list[Connection] = []
        runs: list[Run] | PackedRuns
        if self.start == "fork":
            runs = self._runs
            inherited = [worker.pipe for worker in self._team]
            inherited.append(server_end)
        else:
            # A spawned process inherits nothing.
            runs = self._pack_runs()
        process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(worker_end, inherited, runs, os.getpid()), daemon=True
        )
        try:
            # The worker decides for itself what it does on a signal, before it gets one.
            with signals_held():
                process.start()
        except OSError as error:
            server_end.close()
            raise EngineError(
                f"a worker process cannot be started ({error.strerror or error}); end other "
                "processes, or take --engine serial."
            ) from None
        finally:
            # Only the worker may hold this end: then its death closes the pipe, and is noticed.
            worker_end.close()
        return Worker(process, server_end, time.monotonic())

    def _pack_runs(self) -> PackedRuns:
        """All runs, for workers that inherit nothing; made once for those that start together."""
        if self._packed_runs is None:
            self._packed_runs = pack(self._runs)
        return self._packed_runs

    def _drop_packed_runs(self) -> None:
        if self._packed_runs is not None:
            shared.drop(self._packed_runs.block.name)
            self._packed_runs = None

    def _fire(self, worker: Worker) -> None:
        """End one worker; another is hired when there is a job for it."""
        self._team.remove(worker)
        self._end(worker)

    def _dismiss(self) -> None:
        """End all workers."""
        # All at once, before the first one is waited for.
        for worker in self._team:
            worker.process.kill()
        while self._team:
            self._end(self._team.pop())
        self._drop_packed_runs()
        self._failed_starts = 0

    def _end(self, worker: Worker) -> None:
        """End a worker's process, and remove or release all that is left of it."""
        pid = worker.process.pid
        worker.pipe.close()
        # Not terminate(): a stopped process gets no other signal.
        worker.process.kill()
        worker.process.join()
        worker.process.close()
        # The block of an answer that was never read; any other is gone already.
        shared.drop(worker.reply)
        if worker.job is not None and pid is not None:
            # It may have been writing what its client remembers.
            for run in self._runs:
                run.memory.delete_unfinished(pid)

    # ---- jobs out, answers in --------------------------------------------------------------------

    def _hand_out(self, window: Window) -> None:
        """Give each idle worker a job, as long as there are jobs."""
        for worker in list(self._team):
            if worker.job is not None or not worker.ready:
                continue
            if not worker.process.is_alive():
                # It died without a job: nothing is lost.
                self._fire(worker)
                continue
            job = window.pick(self._runs)
            if job is None:
                return
            run, task = window.open[job]
            envelope, forest = strip(task)
            # Noted before anything is sent: should the worker be killed, it is known from these
            # that it was busy, and which block it may have left behind.
            worker.job = job
            worker.since = time.monotonic()
            worker.reply = shared.fresh_name()
            blocks = window.share(job, forest)
            try:
                worker.pipe.send((self._runs.index(run), envelope, blocks, worker.reply))
            except OSError:
                self._bury(worker, window)

    def _collect(self, window: Window) -> None:
        """Wait for an answer, a death or the end of a worker's time, and take in what is there."""
        awaited: dict[Any, Worker] = {}
        for worker in self._team:
            if worker.job is not None or not worker.ready:
                awaited[worker.pipe] = worker
        if not awaited:
            # All were found dead when they were to be given a job; others are hired next.
            return
        for pipe in wait(list(awaited), self._patience()):
            worker = awaited[pipe]
            try:
                message = worker.pipe.recv_bytes()
            except (EOFError, OSError):
                self._bury(worker, window)
            else:
                self._take(worker, message, window)
        self._end_late_workers(window)

    def _take(self, worker: Worker, message: bytes, window: Window) -> None:
        """A worker's message: that it has started, the answer to its job, or why neither can be."""
        if worker.job is not None:
            job = worker.job
            worker.job = None
            window.note(job, time.monotonic() - worker.since)
            window.finish(job, message)
            shared.drop(worker.reply)
            return
        failed = pickle.loads(message)
        if failed is not None:
            raise EngineError(failed.sentence)
        worker.ready = True
        self._failed_starts = 0
        if all(other.ready for other in self._team):
            self._drop_packed_runs()

    def _deadline(self, worker: Worker) -> float:
        """When a worker must have answered at the latest."""
        if not worker.ready:
            return worker.since + START_SECONDS
        if worker.job is None or self.timeout is None:
            return math.inf
        return worker.since + self.timeout

    def _patience(self) -> float | None:
        """Seconds until the first worker has had its time; None if that never comes."""
        earliest = min(self._deadline(worker) for worker in self._team)
        if earliest == math.inf:
            return None
        # The operating system takes no wait of many days; after an hour we look again.
        return min(3600.0, max(0.0, earliest - time.monotonic()))

    def _end_late_workers(self, window: Window) -> None:
        """End the workers that had their time, a stopped one too; their jobs are lost."""
        for worker in list(self._team):
            if time.monotonic() < self._deadline(worker):
                continue
            # What came in the meantime still counts.
            if worker.pipe.poll():
                continue
            if worker.job is None:
                # It could not start.
                self._bury(worker, window)
                continue
            self._fire(worker)
            _, task = window.open[worker.job]
            assert self.timeout is not None
            window.lose(worker.job, late(task, self.timeout))

    def _bury(self, worker: Worker, window: Window) -> None:
        """A worker has died: its job is tried once more, then it is lost."""
        # The pipe closes a little before the process has ended and its exit code is known.
        worker.process.join(1)
        died = f"process {worker.process.pid} died (exit code {worker.process.exitcode})"
        # Before the job is closed, which frees what the worker may still be reading.
        self._fire(worker)
        if worker.job is None:
            self._count_failed_start(died)
        elif worker.job not in window.died_once:
            window.died_once.add(worker.job)
            window.running.discard(worker.job)
        else:
            _, task = window.open[worker.job]
            sentence = (
                f"worker {died} while it worked for client {task.to}, as one had before; it may "
                "have run out of memory."
            )
            window.lose(worker.job, Lost(task.to, "died", sentence))

    def _count_failed_start(self, died: str) -> None:
        """Give up where workers end again and again before they have started."""
        self._failed_starts += 1
        if self._failed_starts < STARTS:
            return
        advice = "take --engine serial."
        if self.start == "spawn":
            advice = (
                'a script that trains must do so below `if __name__ == "__main__":`, since every '
                f"worker imports it; otherwise {advice}"
            )
        raise EngineError(f"worker {died} before it had started, as others had; {advice}")
