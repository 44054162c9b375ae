"""An engine around an engine: clients fail or lie as ``--faults`` says (:mod:`..runs.faults`)."""

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

NEVER_ASKED = ("crash", "silent")
"""Faults of clients that do nothing; the inner engine is spared their jobs."""


@dataclass(eq=False)
class Faulty:
    """The inner engine, but tasks are lost and reports altered where a run's faults hit them."""

    inner: Engine

    @property
    def name(self) -> str:
        """The inner engine's."""
        return self.inner.name

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs; the answers of some are lost or spoilt on their way."""
        broadcasts = BroadcastCosts()
        # Jobs whose answers are due, with their faults: the inner engine takes more of them ahead
        # of the answers it gives.
        due: deque[tuple[Job, str | None]] = deque()

        def passed_on() -> Iterator[Job]:
            for job in jobs:
                run, task = job
                fault = run.faults.hit(run.seed, task)
                due.append((job, fault))
                if fault not in NEVER_ASKED:
                    yield job

        def those_never_asked() -> Iterator[tuple[Job, Answer]]:
            """What stands first in the queue and was not passed on."""
            while due and due[0][1] in NEVER_ASKED:
                job, fault = due.popleft()
                if fault == "crash":
                    yield self._crash(job, broadcasts)

        for job, answer in self.inner.map(passed_on()):
            yield from those_never_asked()
            _, task = job
            is_next = bool(due) and due[0][0][1] is task
            if is_next:
                _, fault = due.popleft()
                yield from self._answer(job, answer, fault)
            else:
                # The inner engine answers out of order, or again: that is not for us to mend.
                yield job, answer
        yield from those_never_asked()

    def _crash(self, job: Job, broadcasts: BroadcastCosts) -> tuple[Job, Answer]:
        run, task = job
        # The task was sent all the same.
        cost = {"down": count_task(task, run.method.codec, run.known_state, broadcasts)}
        return job, Lost(task.to, "crashed", f"client {task.to} failed (--faults crash).", cost)

    def _answer(self, job: Job, answer: Answer, fault: str | None) -> Iterator[tuple[Job, Answer]]:
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
            yield job, spoilt(answer, run, task, fault)

    def notes(self, run: Run) -> list[str]:
        """The inner engine's."""
        return self.inner.notes(run) if isinstance(self.inner, EngineWithNotes) else []

    def close(self) -> None:
        """Close the inner engine."""
        self.inner.close()


def with_faults(engine: Engine, runs: Iterable[Run]) -> Engine:
    """The engine, with faults where one of the runs has some."""
    if any(run.faults.shares for run in runs):
        return Faulty(engine)
    return engine


def spoilt(report: Report, run: Run, task: Task, fault: str) -> Any:
    """The report as a client with this fault would have sent it."""
    if fault == "garbage":
        # With its cost, as an engine would have counted it.
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
    # The other faults are in the packets: a report without any has nothing to spoil.
    give = {}
    for name, packet in report.give.items():
        sent = task.send.get(name)
        new_name = f"{name}-renamed" if fault == "rename" else name
        give[new_name] = _spoilt_packet(packet, sent, fault)
    return replace(report, give=give)


@dataclass(frozen=True)
class Garbage:
    """What a broken client might send: only its cost is known."""

    cost: Any


def _spoilt_packet(packet: Packet, sent: Packet | None, fault: str) -> Packet:
    values = packet.values
    if fault in ("scale", "flip"):
        return replace(packet, values=_lied(values, sent, 1000.0 if fault == "scale" else -1.0))
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
        return Packet(_with_number(values, packet, numbers[fault]), packet.mask)
    return packet


def _lied(values: Tree, sent: Packet | None, factor: float) -> Tree:
    """The tree with its change, from what was sent, multiplied."""
    before = {} if sent is None else sent.values
    lied = {}
    for name, leaf in values.items():
        if not leaf.is_floating_point():
            lied[name] = leaf
        elif name in before:
            change = leaf - before[name]
            lied[name] = before[name] + factor * change
        else:
            lied[name] = factor * leaf
    return lied


def _with_number(values: Tree, packet: Packet, number: float) -> Tree:
    """The tree with ``number`` in one place of each floating-point tensor, inside its mask."""
    spoilt = {}
    for name, leaf in values.items():
        if not leaf.is_floating_point() or not leaf.numel():
            spoilt[name] = leaf
            continue
        changed = leaf.clone()
        # 1e30 is more than 16-bit floats hold: it becomes their largest number.
        largest = torch.finfo(leaf.dtype).max
        changed.view(-1)[0] = min(number, largest) if number == 1e30 else number
        mask = None if packet.mask is None else packet.mask.get(name)
        if mask is not None:
            changed = trees.apply_mask({name: changed}, {name: mask})[name]
        spoilt[name] = changed
    return spoilt
