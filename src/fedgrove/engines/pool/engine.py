"""A worker process per core, one thread each: the default on a CPU.

On a CPU the arithmetic dominates: stacking clients or adding threads buys nothing, processes do. Parameters travel
through shared memory, each tree of a broadcast once; client memory is read and written by the workers themselves.
The longest of the next jobs goes first, reports come back in job order, and no more than a window of jobs is ever
under way, so that the server's memory does not grow with the number of clients.
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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Letter:
    """A task or report without its tensors: they lie in shared memory, at the places given."""

    body: Any
    packets: tuple[tuple[str, int, int | None], ...]
    """(packet, number of the tree of its values, number of the tree of its mask)."""


@dataclass(eq=False)
class Worker:
    """A process and this end of the pipe to it."""

    process: BaseProcess
    pipe: Connection
    job: int | None = None
    reply: str | None = None
    """The block its answer will lie in."""


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
        flow = _Flow(iter(jobs), window=max(16, 4 * size))
        try:
            while flow.fill():
                while flow.next in flow.done:
                    yield flow.take()
                    flow.fill()
                if not flow.open:
                    continue
                self._hire(flow, size)
                self._hand_out(flow)
                self._collect(flow)
        except BaseException:
            self.close()
            raise
        finally:
            flow.clear()

    def _hire(self, flow: _Flow, size: int) -> None:
        """Fork workers that know every run of the window; they inherit data and network without a copy."""
        new = [run for run, _ in flow.open.values() if not any(run is r for r in self._runs)]
        if self._team and not new:
            return
        if any(w.job is not None for w in self._team):
            return  # a run these workers do not know: first let them finish
        self.close()
        self._runs = list(dict.fromkeys([*self._runs, *new]))
        resource_tracker.ensure_running()  # before the fork, so that all processes share one
        context = mp.get_context("fork" if "fork" in mp.get_all_start_methods() else "spawn")
        for _ in range(size):
            here, there = context.Pipe()
            others = [w.pipe for w in self._team] + [here]
            process = context.Process(target=_serve, args=(there, others, self._runs), daemon=True)  # type: ignore[attr-defined]
            process.start()
            there.close()
            self._team.append(Worker(process, here))

    def _hand_out(self, flow: _Flow) -> None:
        for worker in self._team:
            if worker.job is None and (job := flow.pick(self._runs)) is not None:
                run, task = flow.open[job]
                place = next(i for i, r in enumerate(self._runs) if r is run)
                letter, forest = _strip(task, task.send)
                worker.job, worker.reply = job, shared.fresh_name()
                version = run.memory.files.get(task.to)
                try:
                    worker.pipe.send(
                        (place, letter, flow.share(job, forest), version, worker.reply)
                    )
                except OSError:
                    raise _died(worker, flow) from None

    def _collect(self, flow: _Flow) -> None:
        busy = {w.pipe: w for w in self._team if w.job is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                raise _died(worker, flow) from None
            job, worker.job = worker.job, None
            assert job is not None
            flow.finish(job, answer)

    def close(self) -> None:
        """End the workers."""
        for worker in self._team:
            worker.pipe.close()
            if worker.job is not None:
                worker.process.terminate()
        for worker in self._team:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            shared.drop(worker.reply)  # an answer that nobody read
        self._team = []


class _Flow:
    """The jobs under way: what is open, what is done, what lies in shared memory."""

    def __init__(self, jobs: Iterator[tuple[Run, Task]], window: int) -> None:
        self.jobs, self.window = jobs, window
        self.open: dict[int, tuple[Run, Task]] = {}
        self.done: dict[int, tuple[Run, Report]] = {}
        self.busy: set[int] = set()
        self.next = self.count = 0
        self.sent = BroadcastCosts()
        self.blocks: dict[int, Block] = {}
        self.users: dict[int, set[int]] = {}
        self.kept: dict[int, Tree] = {}  # alive as long as their identity is a key

    def fill(self) -> bool:
        """Look ahead as far as the window allows; False when nothing is left."""
        while self.count < self.next + self.window and (job := next(self.jobs, None)) is not None:
            self.open[self.count] = job
            self.count += 1
        return bool(self.open or self.done)

    def pick(self, runs: list[Run]) -> int | None:
        """The longest job nobody does yet."""
        first: dict[tuple[int, int], int] = {}
        for j, (run, task) in self.open.items():  # a client's tasks are done one after another
            first.setdefault((id(run), task.to), j)
        free = [
            j
            for j in first.values()
            if j not in self.busy and any(self.open[j][0] is r for r in runs)
        ]
        if not free:
            return None
        job = max(free, key=lambda j: (self.open[j][0].infos[self.open[j][1].to].examples, -j))
        self.busy.add(job)
        return job

    def share(self, job: int, forest: list[Tree]) -> list[Block]:
        """Put a task's trees into shared memory, unless they are there."""
        for tree in forest:
            if id(tree) not in self.blocks:
                self.blocks[id(tree)], self.kept[id(tree)] = shared.put([tree]), tree
            self.users.setdefault(id(tree), set()).add(job)
        return [self.blocks[id(tree)] for tree in forest]

    def finish(self, job: int, answer: Any) -> None:
        """Take a worker's answer in."""
        run, task = self.open.pop(job)
        self.busy.discard(job)
        if isinstance(answer, _Failed):
            raise answer.error(task)
        letter, block, version = answer
        report: Report = replace(letter.body, give=_packets(letter, shared.get(block)))
        shared.drop(block.name)
        run.memory.accept(task.to, version)
        cost = {"down": count_down(task, run.method.codec, run.held, self.sent), **report.cost}
        self.done[job] = (run, replace(report, cost=cost))
        self._release(job)

    def _release(self, job: int) -> None:
        """Free what only finished jobs used, unless a job of the window still wants it."""
        wanted = {id(tree) for _, task in self.open.values() for tree in _strip(task, task.send)[1]}
        for key in [k for k, jobs in self.users.items() if job in jobs]:
            self.users[key].discard(job)
            if not self.users[key] and key not in wanted:
                shared.drop(self.blocks.pop(key).name)
                del self.users[key], self.kept[key]

    def take(self) -> tuple[Run, Report]:
        """The next report in job order."""
        result = self.done.pop(self.next)
        self.next += 1
        return result

    def clear(self) -> None:
        """Give all shared memory back."""
        for block in self.blocks.values():
            shared.drop(block.name)
        self.blocks = {}


@dataclass(frozen=True)
class _Failed:
    """What went wrong in a worker, as text."""

    sentence: str
    trace: str
    expected: bool

    def error(self, task: Task) -> FedgroveError:
        detail = "" if self.expected else "\n" + self.trace
        return EngineError(f"client {task.to} could not {task.verb}: {self.sentence}{detail}")


def _died(worker: Worker, flow: _Flow) -> EngineError:
    worker.process.join(1)
    client = next((task.to for job, (_, task) in flow.open.items() if job == worker.job), "?")
    return EngineError(
        f"worker process {worker.process.pid} died (exit code {worker.process.exitcode}) while it worked for "
        f"client {client}; it may have run out of memory."
    )


def _strip(body: Any, packets: Mapping[str, Packet]) -> tuple[Letter, list[Tree]]:
    """A message without its tensors, and the trees it leaves behind."""
    forest: list[Tree] = []
    places = []
    for name, packet in packets.items():
        forest.append(packet.values)
        if packet.mask is not None:
            forest.append(packet.mask)
        last = len(forest) - 1
        places.append((name, last, None) if packet.mask is None else (name, last - 1, last))
    return Letter(
        replace(body, **{"send" if isinstance(body, Task) else "give": {}}), tuple(places)
    ), forest


def _packets(letter: Letter, forest: list[Tree]) -> dict[str, Packet]:
    """The packets of a message again."""
    return {n: Packet(forest[v], None if m is None else forest[m]) for n, v, m in letter.packets}


def _serve(pipe: Connection, others: list[Connection], runs: list[Run]) -> None:
    """A worker's life: take a letter, do the work, answer; end when the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    for other in others:
        other.close()  # inherited by the fork; held open, they would hide the server's death from a worker
    torch.set_num_threads(1)
    while True:
        try:
            place, letter, blocks, version, reply = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Any = _answer(runs[place], letter, blocks, version, reply)
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
    run: Run, letter: Letter, blocks: list[Block], version: str | None, reply: str
) -> tuple[Letter, Block, str | None]:
    task: Task = replace(
        letter.body, send=_packets(letter, [shared.get(block)[0] for block in blocks])
    )
    report, kept = perform(run, task, run.memory.read(version))
    written = run.memory.write(task.to, task.round, task.verb, kept, version) if kept else None
    stripped, forest = _strip(
        replace(report, cost={"up": count_up(task, report, run.method.codec, run.held)}),
        report.give,
    )
    return stripped, shared.put(forest, reply), written
