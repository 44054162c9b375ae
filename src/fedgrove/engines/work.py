"""One client's work, stage by stage: the same function in this process, in a worker, or on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch

from .. import seeds, trees
from ..channels.shrink import structured
from ..core import (
    Batch,
    Carry,
    Client,
    Edit,
    Give,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Task,
    Train,
)
from ..nets import Net
from ..parts import local
from ..runs.rounds import SCORING, Run
from ..trees import Tree
from ..wire import message
from ..wire.codec import Codec, Dense, Known
from ..wire.message import Cost


def initial_carry(task: Task, memory: Mapping[str, Tree], dtype: torch.dtype) -> Carry:
    """The carry a task starts with (see :mod:`fedgrove.core`)."""
    carry: Carry = {**memory}
    for name, packet in task.send.items():
        carry[name] = packet.values
        if packet.mask is not None:
            carry[name + ".mask"] = packet.mask
    numbers = {"round": task.round, **task.settings}
    carry["settings"] = {k: torch.tensor(v, dtype=dtype) for k, v in numbers.items()}
    return {**carry, "aux": {}}


def perform(run: Run, task: Task, memory: Mapping[str, Tree]) -> tuple[Report, Mapping[str, Tree]]:
    """Do a task: the report, and what the client remembers from now on (empty when nothing changed)."""
    client = run.client(task, dict(memory))
    carry = initial_carry(task, memory, next(iter(run.params.values())).dtype)
    outcome = Outcome()
    with one_thread(), own_randomness():
        for number, stage in numbered(run.work(task.verb)):
            if isinstance(stage, Train):
                # Dropout draws from torch's generator, seeded anew per stage: the same bits in any process.
                torch.default_generator.manual_seed(seeds.derive(client.seed, "noise", number))
                carry = trained(run.net, stage, carry, local.epochs(run.net, stage, client, number))
            elif isinstance(stage, Measure):
                carry = {**carry, stage.name: _measured(run, stage, carry, client, number)}
            elif isinstance(stage, Edit):
                carry = stage.f(carry, client)
            elif isinstance(stage, Give):
                outcome = stage.f(carry, client)
    kept = {**memory, **outcome.memory} if outcome.memory else {}
    return Report(task.to, outcome.give, client.info.examples, outcome.metrics), kept


def trained(net: Net, stage: Train, carry: Carry, batches: Iterable[Batch]) -> Carry:
    """A Train stage; under a mask that removes whole channels it runs on the smaller net, and is widened at the end.

    The same result as training masked, but for the order of sums; dropout draws fewer bits, and agrees in distribution.
    """
    thin = structured(net, carry.get(stage.mask))
    if thin is None:
        return local.train(net, stage, carry, batches)
    done = local.train(thin.net, stage, thin.narrowed(carry), batches)
    return {**carry, stage.end: thin.widen(done[stage.end]), "aux": thin.widen(done["aux"])}


def numbered(stages: Sequence[Stage]) -> Iterator[tuple[int, Stage]]:
    """Stages with their place among those of their kind, which seeds depend on.

    So an Edit more or less does not change what a Train draws: a method with its features off is FedAvg to the bit.
    """
    seen: Counter[type[Stage]] = Counter()
    for stage in stages:
        yield seen[type(stage)], stage
        seen[type(stage)] += 1


def _measured(run: Run, stage: Measure, carry: Carry, client: Client, number: int) -> Tree:
    total: Tree | None = None
    with torch.no_grad():
        for batch in client.batches(stage.over, number):
            value = stage.f(run.net, carry[stage.of], batch, carry)
            total = value if total is None else trees.map(torch.add, total, value)
    return total if total is not None else {}


def cost_of(codec: Codec, packet: Packet, known: Known | None) -> Cost:
    """The length of an encoded packet, by part; a size that follows from the shapes alone is found once."""
    if type(codec) is not Dense:
        return codec.encode(packet, known).cost
    mask = packet.mask or {}
    shapes = tuple((k, tuple(v.shape), v.dtype, k in mask) for k, v in packet.values.items())
    return _dense_cost(shapes, packet.mask is not None)


@lru_cache(maxsize=64)
def _dense_cost(
    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...], masked: bool
) -> Cost:
    values = {k: torch.zeros(shape, dtype=dtype) for k, shape, dtype, _ in shapes}
    mask = {k: torch.zeros(shape, dtype=torch.bool) for k, shape, _, has in shapes if has}
    return Dense().encode(Packet(values, mask if masked else None)).cost


class Sent:
    """What the last packets cost, by the identity of their trees and the receiver's mask: a broadcast is encoded once.

    Packets are held as long as their identity is a key; only so many, so that memory does not grow with the clients.
    """

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self._costs: dict[tuple[int, int, bytes | None], tuple[Packet, Cost]] = {}

    def cost(self, run: Run, packet: Packet, known: Known | None) -> Cost:
        """The cost of a packet to a receiver that holds ``known``."""
        key = (id(packet.values), id(packet.mask), known.digest if known else None)
        if key not in self._costs:
            if len(self._costs) == self.most:
                del self._costs[next(iter(self._costs))]
            self._costs[key] = (packet, cost_of(run.method.codec, packet, known))
        return self._costs[key][1]


def count_up(run: Run, task: Task, report: Report) -> Cost:
    """The length of a report, by part. The server knows the mask of the packet of the same name that it sent."""

    def cost(name: str, packet: Packet) -> Cost:
        sent = task.send[name].mask if name in task.send else None
        known = run.held.digest(sent) if packet.mask is not None and sent is not None else None
        return cost_of(run.method.codec, packet, known)

    return message.measure(message.report_head(report), report.give, cost)


def count_down(run: Run, task: Task, sent: Sent) -> Cost:
    """The length of a task, by part; afterwards the client holds its masks.

    Scoring a model leaves no trace: how often clients are evaluated must not change what training costs.
    """

    def once(name: str, packet: Packet) -> Cost:
        return sent.cost(
            run, packet, run.held.known(task.to, name) if packet.mask is not None else None
        )

    cost = message.measure(message.task_head(task), task.send, once)
    if task.verb not in SCORING:
        for name, packet in task.send.items():
            run.held.note(task.to, name, packet.mask)
    return cost


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: sums then come out the same on every machine and in every engine."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Torch's global generator is left as it was found."""
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
