"""An engine that makes clients fail or lie, for ``--faults`` (:mod:`..runs.faults`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import trees
from ..core import Answer, Engine, EngineWithNotes, Job, Lost, Packet, Report, Task
from ..runs.run import Run
from ..trees import Tree
from ..wire.message_costs import BroadcastCosts, count_task

WITHOUT_WORK = ("crash", "silent")
"""Faults of clients that do no work; the inner engine does not get their jobs."""


@dataclass(eq=False)
class Faulty:
    """Wraps an engine: loses tasks and alters reports according to the faults of their run."""

    inner: Engine

    @property
    def name(self) -> str:
        """The name of the inner engine, which works for the faulty one."""
        return self.inner.name

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs on the inner engine; lose or alter the answers of some."""
        broadcasts = BroadcastCosts()
        # Jobs without an answer yet, with their faults: the inner engine takes jobs ahead of the
        # answers it gives.
        due: deque[tuple[Job, str | None]] = deque()

        def take_working_jobs() -> Iterator[Job]:
            for job in jobs:
                run, task = job
                fault = run.faults.hit(run.seed, task)
                due.append((job, fault))
                if fault not in WITHOUT_WORK:
                    yield job

        def answer_jobs_without_work() -> Iterator[tuple[Job, Answer]]:
            """Answer the jobs at the head of the queue that the inner engine did not get."""
            while due and due[0][1] in WITHOUT_WORK:
                job, fault = due.popleft()
                if fault == "crash":
                    yield self._crash(job, broadcasts)

        for job, answer in self.inner.map(take_working_jobs()):
            yield from answer_jobs_without_work()
            _, task = job
            is_next = bool(due) and due[0][0][1] is task
            if is_next:
                _, fault = due.popleft()
                yield from self._answer(job, answer, fault)
            else:
                # The inner engine answers out of order or twice; the gate deals with that.
                yield job, answer
        yield from answer_jobs_without_work()

    def _crash(self, job: Job, broadcasts: BroadcastCosts) -> tuple[Job, Answer]:
        run, task = job
        # The task was sent, so its bytes count.
        cost = {"down": count_task(task, run.method.codec, run.known_state, broadcasts)}
        return job, Lost(task.to, "crashed", f"client {task.to} failed (--faults crash).", cost)

    def _answer(self, job: Job, answer: Answer, fault: str | None) -> Iterator[tuple[Job, Answer]]:
        """Yield an answer as the simulated fault leaves it: lost, altered, or sent twice."""
        run, task = job
        if fault is None or isinstance(answer, Lost):
            yield job, answer
        elif fault == "late":
            sentence = f"client {task.to} answered too late (--faults late)."
            yield job, Lost(task.to, "late", sentence, answer.cost)
        elif fault == "duplicate":
            yield job, answer
            yield job, answer
        else:
            yield job, spoil_report(answer, run, task, fault)

    def notes(self, run: Run) -> list[str]:
        """Return the notes of the inner engine."""
        if isinstance(self.inner, EngineWithNotes):
            return self.inner.notes(run)
        return []

    def close(self) -> None:
        """Close the inner engine."""
        self.inner.close()


def with_faults(engine: Engine, runs: Iterable[Run]) -> Engine:
    """Return the engine, wrapped in :class:`Faulty` if one of the runs has faults."""
    if any(run.faults.shares for run in runs):
        return Faulty(engine)
    return engine


def spoil_report(report: Report, run: Run, task: Task, fault: str) -> Any:
    """Return the report as a client with this simulated fault sends it."""
    if fault == "garbage":
        # With its cost, because engines count the bytes of every answer.
        return Garbage(report.cost)
    if fault == "impostor":
        others = (k for k in run.infos if k != report.of)
        return replace(report, of=next(others, report.of + 1))
    if fault == "examples":
        return replace(report, examples=1000 * report.examples)
    if fault == "memory":
        return replace(report, memory=f"{task.round}.{task.verb}.0123456789abcdef")
    if fault == "metrics":
        return replace(report, metrics={**report.metrics, "loss": float("nan")})
    # The other faults are in the packets; a report without packets stays unchanged.
    give = {}
    for name, packet in report.give.items():
        sent = task.send.get(name)
        new_name = f"{name}-renamed" if fault == "rename" else name
        give[new_name] = _spoil_packet(packet, sent, fault)
    return replace(report, give=give)


@dataclass(frozen=True)
class Garbage:
    """An answer that is not a report, as a broken client may send it."""

    cost: Any


def _spoil_packet(packet: Packet, sent: Packet | None, fault: str) -> Packet:
    values = packet.values
    if fault in ("scale", "flip"):
        return replace(
            packet, values=_scale_change(values, sent, 1000.0 if fault == "scale" else -1.0)
        )
    if fault == "none":
        return replace(packet, values=None)  # type: ignore[arg-type]
    if fault == "mask":
        if packet.mask is not None:
            return Packet(values)
        return Packet(values, {k: torch.ones_like(v).bool() for k, v in values.items()})
    if not values:
        return packet
    first = next(iter(values))
    if fault == "tensor":
        return Packet({k: v for k, v in values.items() if k != first}, packet.mask)
    leaf = values[first]
    if fault == "shape":
        return Packet({**values, first: leaf.unsqueeze(0)}, packet.mask)
    if fault == "dtype":
        return Packet({**values, first: leaf.to(torch.complex64)}, packet.mask)
    numbers = {"nan": float("nan"), "inf": float("inf"), "huge": 1e30}
    if fault in numbers:
        return Packet(_set_number(values, packet, numbers[fault]), packet.mask)
    return packet


def _scale_change(values: Tree, sent: Packet | None, factor: float) -> Tree:
    """Return the tree with its difference from what was sent multiplied by ``factor``."""
    before = {} if sent is None else sent.values
    scaled = {}
    for name, leaf in values.items():
        if not leaf.is_floating_point():
            scaled[name] = leaf
        elif name in before:
            change = leaf - before[name]
            scaled[name] = before[name] + factor * change
        else:
            scaled[name] = factor * leaf
    return scaled


def _set_number(values: Tree, packet: Packet, number: float) -> Tree:
    """Return the tree with ``number`` as the first value of each floating-point tensor."""
    changed_tree = {}
    for name, leaf in values.items():
        if not leaf.is_floating_point() or not leaf.numel():
            changed_tree[name] = leaf
            continue
        changed = leaf.clone()
        # 1e30 does not fit into 16-bit floats; it becomes their largest number.
        largest = torch.finfo(leaf.dtype).max
        changed.view(-1)[0] = min(number, largest) if number == 1e30 else number
        mask = None if packet.mask is None else packet.mask.get(name)
        if mask is not None:
            changed = trees.apply_mask({name: changed}, {name: mask})[name]
        changed_tree[name] = changed
    return changed_tree
