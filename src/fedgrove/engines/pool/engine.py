"""The pool engine: one worker process with one thread per core, the default on a CPU.

On a CPU, processes are faster than stacked clients or more threads. Parameters are sent through
shared memory, each tree of a broadcast once. Workers read and write client memory themselves. The
longest of the next jobs starts first, judged by earlier jobs of its kind. Reports come back in job
order, and only a window of jobs is in progress, so that the server's memory does not grow with the
number of clients.

A worker that dies is replaced, and its job is tried once more. A worker that does not answer in
time is ended. In both cases at most the job is lost, never the run.
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
from ...errors import EngineError, spell_option, unknown
from ...runs.run import Run
from ..work import lose_late
from . import shared
from .message import PackedRuns, pack_runs, strip
from .window import Paces, Window
from .worker import delay_signals, serve

START_SECONDS = 120.0
"""How long a worker may take to start: a spawned one imports torch, perhaps many at once."""
LOOK_SECONDS = 5.0
"""The pool looks for stopped workers this often."""
STOPPED_LOOKS = 3
"""A worker that is found stopped (SIGSTOP) this many times in a row is ended.

A terminal (Ctrl-Z) and a batch system stop and continue the server together with its workers: then
a worker may be found stopped once before and once after.
"""
STARTS = 3
"""The pool gives up after this many workers in a row have ended before they started."""


def cores() -> int:
    """Return how many cores the workers of the pool may use."""
    # A container or a batch system may allow fewer cores than the machine has. Not every operating
    # system reports it.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_start() -> str:
    """Return how the pool starts worker processes: fork, except on Windows and macOS."""
    has_fork = "fork" in mp.get_all_start_methods()
    return "fork" if has_fork and sys.platform != "darwin" else "spawn"


def _is_stopped(process: int | None) -> bool:
    """Whether a child process is stopped by a signal; False where this cannot be found out."""
    if process is None or not hasattr(os, "waitid"):
        return False
    # WNOWAIT leaves the process as it is, for its own join().
    how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, process, how) is not None
    except ChildProcessError:
        # It has ended.
        return False


@dataclass(eq=False)
class Worker:
    """A process, and the server's end of the pipe to it."""

    process: BaseProcess
    pipe: Connection
    since: float
    """When it was started, or got its job."""
    ready: bool = False
    """Whether it has reported that it has started."""
    job: int | None = None
    """The job it is working on."""
    reply: str | None = None
    """The name of the shared block for its answer."""
    stopped: int = 0
    """How often in a row it was found stopped."""


@dataclass(eq=False)
class Pool:
    """Runs jobs on worker processes.

    Args:
        workers: The number of processes; 0: one per core.
        timeout: Seconds after which a job without an answer is lost; None: wait.
        start: How processes are started: ``fork``, which shares data without a copy, or ``spawn``,
            which sends each worker a copy.
    """

    workers: int = 0
    timeout: float | None = None
    start: str = field(default_factory=default_start)
    name: str = field(default="pool", init=False)
    _runs: list[Run] = field(default_factory=list, init=False)
    _packed_runs: PackedRuns | None = field(default=None, init=False)
    _team: list[Worker] = field(default_factory=list, init=False)
    _failed_starts: int = field(default=0, init=False)
    _next_look: float = field(default=0.0, init=False)
    _window: Window | None = field(default=None, init=False)
    _paces: Paces = field(default_factory=Paces, init=False)

    def __post_init__(self) -> None:
        if self.start not in ("fork", "spawn"):
            raise unknown("start method", self.start, ["fork", "spawn"])

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs on the workers; answers come in job order."""
        size = self.workers or cores()
        if not self._team:
            shared.sweep()
        if self._window is not None:
            # Another map was not finished, and its workers would answer this one.
            self.close()
        # Four jobs per worker keep all workers busy while the next answer comes from a long job.
        window = Window(iter(jobs), max(16, 4 * size), self._paces)
        self._window = window
        try:
            while window.fill():
                if window.open:
                    self._update_runs(window)
                    self._start_workers(window, size)
                    self._hand_out(window)
                # Workers get jobs before the caller gets an answer, which it may work on for long.
                if window.next_answer in window.done:
                    yield window.take()
                    if self._window is not window:
                        raise EngineError("the pool was closed or got other jobs during a map.")
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
        """End the workers and free shared memory."""
        self._end_all()
        if self._window is not None:
            self._window.free_blocks()
            self._window = None

    # ---- starting and ending workers -------------------------------------------------------------

    def _update_runs(self, window: Window) -> None:
        """End the idle workers if the window has runs that they do not know.

        Workers get data and networks when they start, and know no run that comes later.
        """
        new_runs: list[Run] = []
        for run, _ in window.open.values():
            if run not in self._runs and run not in new_runs:
                new_runs.append(run)
        # No job of the new runs is handed out before all workers are idle.
        all_idle = all(worker.job is None for worker in self._team)
        if new_runs and all_idle:
            self._end_all()
            self._runs = [*self._runs, *new_runs]

    def _start_workers(self, window: Window, size: int) -> None:
        """Start workers while there are more waiting jobs than idle workers."""
        idle = sum(worker.job is None for worker in self._team)
        while len(self._team) < size and idle < window.count_waiting(self._runs):
            self._team.append(self._start())
            idle += 1

    def _start(self) -> Worker:
        """Start a worker process that knows all runs."""
        # Before the worker, so that all processes share one tracker. A worker with its own tracker
        # would, on exit, remove blocks that others still read. Without signals, because the tracker
        # must outlive a closed terminal.
        with delay_signals():
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
            # A spawned process inherits nothing. Packed once for all that start together.
            if self._packed_runs is None:
                self._packed_runs = pack_runs(self._runs)
            runs = self._packed_runs
        process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(worker_end, inherited, runs, os.getpid()), daemon=True
        )
        try:
            # The worker sets its signal handlers before it can get a signal.
            with delay_signals():
                process.start()
        except OSError as error:
            server_end.close()
            raise EngineError(
                f"a worker process cannot be started ({error.strerror or error}); end other "
                f"processes, or use {spell_option('engine', 'serial')}."
            ) from None
        finally:
            # Only the worker may have this end open: then its death closes the pipe.
            worker_end.close()
        return Worker(process, server_end, time.monotonic())

    def _drop_packed_runs(self) -> None:
        if self._packed_runs is not None:
            shared.drop(self._packed_runs.block.name)
            self._packed_runs = None

    def _remove(self, worker: Worker) -> None:
        """End one worker; another is started when there is a job for it."""
        self._team.remove(worker)
        self._end(worker)

    def _end_all(self) -> None:
        """End all workers."""
        # Kill all before waiting for the first one.
        for worker in self._team:
            worker.process.kill()
        while self._team:
            self._end(self._team.pop())
        self._drop_packed_runs()
        self._failed_starts = 0

    def _end(self, worker: Worker) -> None:
        """End a worker's process and free what it leaves behind."""
        pid = worker.process.pid
        worker.pipe.close()
        # Not terminate(): a stopped process gets no other signal.
        worker.process.kill()
        worker.process.join()
        worker.process.close()
        # The block of an answer that was never read. All others are freed already.
        shared.drop(worker.reply)
        if worker.job is not None and pid is not None:
            # It may have been writing its client's memory.
            for run in self._runs:
                run.memory.delete_unfinished(pid)

    # ---- jobs out, answers in --------------------------------------------------------------------

    def _hand_out(self, window: Window) -> None:
        """Give each idle worker a job, while there are jobs."""
        for worker in list(self._team):
            if worker.job is not None or not worker.ready:
                continue
            if not worker.process.is_alive():
                # It died without a job: nothing is lost.
                self._remove(worker)
                continue
            job = window.pick(self._runs)
            if job is None:
                return
            run, task = window.open[job]
            envelope, forest = strip(task)
            # Set before anything is sent: if the worker is killed, these show that it was busy and
            # which block it may have left behind.
            worker.job = job
            worker.since = time.monotonic()
            worker.reply = shared.fresh_name()
            blocks = window.share(job, forest)
            try:
                worker.pipe.send((self._runs.index(run), envelope, blocks, worker.reply))
            except OSError:
                self._handle_death(worker, window)

    def _collect(self, window: Window) -> None:
        """Wait for an answer, a death or a timeout, and handle all that arrived."""
        awaited: dict[Any, Worker] = {}
        for worker in self._team:
            if worker.job is not None or not worker.ready:
                awaited[worker.pipe] = worker
        if not awaited:
            # All were dead when they should have got a job; others are started next.
            return
        for pipe in wait(list(awaited), self._patience()):
            worker = awaited[pipe]
            try:
                message = worker.pipe.recv_bytes()
            except (EOFError, OSError):
                self._handle_death(worker, window)
            else:
                self._take(worker, message, window)
        self._end_late_workers(window)
        self._end_stopped_workers(window)

    def _take(self, worker: Worker, message: bytes, window: Window) -> None:
        """Handle a worker's message: it has started, it answers its job, or it failed."""
        if worker.job is not None:
            job = worker.job
            worker.job = None
            self._paces.note(*window.open[job], time.monotonic() - worker.since)
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
        """Return when a worker must have answered."""
        if not worker.ready:
            return worker.since + START_SECONDS
        if worker.job is None or self.timeout is None:
            return math.inf
        return worker.since + self.timeout

    def _patience(self) -> float | None:
        """Return the seconds until the first deadline, or until workers are looked after again."""
        earliest = min(self._deadline(worker) for worker in self._team)
        return min(LOOK_SECONDS, max(0.0, earliest - time.monotonic()))

    def _end_stopped_workers(self, window: Window) -> None:
        """End workers that stay stopped: without a timeout their jobs would last for ever."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for worker in list(self._team):
            is_stopped = worker.job is not None and _is_stopped(worker.process.pid)
            worker.stopped = worker.stopped + 1 if is_stopped else 0
            if worker.stopped == STOPPED_LOOKS:
                worker.process.kill()
                self._handle_death(worker, window)

    def _end_late_workers(self, window: Window) -> None:
        """End the workers past their deadline, stopped ones too; their jobs are lost."""
        for worker in list(self._team):
            if time.monotonic() < self._deadline(worker):
                continue
            # An answer that arrived in the meantime still counts.
            if worker.pipe.poll():
                continue
            if worker.job is None:
                # It did not start in time.
                self._handle_death(worker, window)
                continue
            self._remove(worker)
            _, task = window.open[worker.job]
            assert self.timeout is not None
            window.close(worker.job, lose_late(task, self.timeout))

    def _handle_death(self, worker: Worker, window: Window) -> None:
        """Handle the death of a worker: its job is tried once more, then it is lost."""
        # The pipe closes a little before the process has ended and its exit code is known.
        worker.process.join(1)
        died = f"process {worker.process.pid} died (exit code {worker.process.exitcode})"
        if worker.stopped:
            died = f"process {worker.process.pid} was stopped by a signal and ended"
        # Before the job is closed, which frees what the worker may still be reading.
        self._remove(worker)
        if worker.job is None:
            self._count_failed_start(died)
        elif worker.job not in window.died_once:
            window.died_once.add(worker.job)
            window.running.discard(worker.job)
        else:
            _, task = window.open[worker.job]
            sentence = (
                f"worker {died} while it worked for client {task.to}, like another worker before; "
                "it may have run out of memory."
            )
            window.close(worker.job, Lost(task.to, "died", sentence))

    def _count_failed_start(self, died: str) -> None:
        """Give up if workers end again and again before they have started.

        Raises:
            EngineError: :data:`STARTS` workers in a row did not start.
        """
        self._failed_starts += 1
        if self._failed_starts < STARTS:
            return
        advice = f"use {spell_option('engine', 'serial')}."
        if self.start == "spawn":
            advice = (
                'a script that trains must do so below `if __name__ == "__main__":`, since every '
                f"worker imports it; otherwise {advice}"
            )
        raise EngineError(f"worker {died} before it had started, as others had; {advice}")
