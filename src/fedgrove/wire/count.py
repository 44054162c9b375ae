"""What the messages of a task cost: their real lengths, without joining their bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Generic, TypeVar

from ..core import SCORING_VERBS, Packet, Report, Task
from ..trees import Mask
from . import message
from .codec import Chainable, Codec, Encoded, Known, Measured, digest_of, refers_to_masks
from .known_state import Held
from .message import Cost

T = TypeVar("T")

NOTHING: Mapping[str, Cost] = {}
"""What is known of packets that nobody has counted yet."""


_Key = tuple[int, int, bytes | None]


def _key(packet: Packet, known: Known | None) -> _Key:
    """What a packet to a receiver is recognised by."""
    digest = None if known is None else known.digest
    return id(packet.values), id(packet.mask), digest


class _LastPackets(Generic[T]):
    """What was made of the last packets sent, so that a broadcast is encoded once, not per client.

    A packet is recognised by the identity of its trees and by what its receiver holds. Packets are
    kept alive as long as their identity is a key; only ``most`` of them, so that memory does not
    grow with the number of clients.
    """

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self._made: dict[_Key, tuple[Packet, Future[T]]] = {}
        # An engine may ask in several threads: the first makes it, and the others wait.
        self._lock = Lock()

    def _of(
        self, packet: Packet, known: Known | None, make: Callable[[Packet, Known | None], T]
    ) -> T:
        key = _key(packet, known)
        with self._lock:
            is_new = key not in self._made
            if is_new:
                self._add(key, packet)
            made = self._made[key][1]
        if is_new:
            try:
                made.set_result(make(packet, known))
            except BaseException as error:
                made.set_exception(error)
                with self._lock:
                    self._made.pop(key, None)
        return made.result()

    def note(self, packet: Packet, known: Known | None, made: T) -> None:
        """What was made of a packet elsewhere, unless it was made here."""
        key = _key(packet, known)
        with self._lock:
            if key not in self._made:
                self._add(key, packet).set_result(made)

    def _add(self, key: _Key, packet: Packet) -> Future[T]:
        """A place for what is made of a packet, if need be in that of the oldest."""
        if len(self._made) == self.most:
            oldest = next(iter(self._made))
            del self._made[oldest]
        place: Future[T] = Future()
        self._made[key] = (packet, place)
        return place


class _Sizes(_LastPackets[list[Measured]]):
    """What the values of the last packets sent take."""

    def of(self, codec: Chainable, packet: Packet) -> list[Measured]:
        """What the values of a packet take, to any receiver."""
        return self._of(packet, None, lambda packet, known: codec.measured(packet))


class BroadcastCosts(_LastPackets[Cost]):
    """The cost of the last packets sent: all that a simulation needs."""

    def __init__(self, most: int = 64) -> None:
        super().__init__(most)
        self._sizes = _Sizes(most)

    def cost(self, codec: Codec, packet: Packet, known: Known | None) -> Cost:
        """The cost of a packet to a receiver that holds ``known``."""
        if packet.mask is None or not isinstance(codec, Chainable) or not codec.writes_as_measured:
            return self._of(packet, known, codec.cost)
        # Receivers hold different masks, and are sent the same values.
        written = codec

        def cost_of(packet: Packet, known: Known | None) -> Cost:
            return written.cost_with(self._sizes.of(written, packet), packet, known)

        return self._of(packet, known, cost_of)


class BroadcastBytes(_LastPackets[Encoded]):
    """The bytes of the last packets sent, for an engine that sends them."""

    def encoded(self, codec: Codec, packet: Packet, known: Known | None) -> Encoded:
        """A packet as a receiver that holds ``known`` reads it."""
        return self._of(packet, known, codec.encode)


def known_of_task(task: Task, codec: Codec, held: Held) -> dict[str, Known | None]:
    """What the packets of a task may refer to: masks that its client holds from earlier ones."""
    known: dict[str, Known | None] = {}
    for name, packet in task.send.items():
        known[name] = None
        if packet.mask is not None and refers_to_masks(codec):
            known[name] = held.known(task.to, name, packet.mask)
    return known


def known_of_report(
    task: Task, names: Iterable[str], codec: Codec, digest: Callable[[Mask], bytes]
) -> dict[str, Known | None]:
    """What packets of these names in a report may refer to: the masks that the task sent them."""
    known: dict[str, Known | None] = {}
    for name in names:
        packet = task.send.get(name)
        known[name] = None
        if packet is not None and packet.mask is not None and refers_to_masks(codec):
            known[name] = Known(packet.mask, digest(packet.mask))
    return known


def count_down(task: Task, codec: Codec, held: Held, sent: BroadcastCosts) -> Cost:
    """The length of a task, by part; afterwards the client holds its masks."""
    known = known_of_task(task, codec, held)

    def packet_cost(name: str, packet: Packet) -> Cost:
        return sent.cost(codec, packet, known[name])

    cost = message.measure(message.task_head(task), task.send, packet_cost)
    _note(task, codec, held)
    return cost


def look_up_down(
    task: Task, codec: Codec, held: Held, sent: BroadcastCosts, leave_out: Collection[str] = ()
) -> None:
    """Work out ahead what :func:`count_down` will ask for, if the client then holds what it does.

    Packets to ``leave_out`` are counted elsewhere. What goes wrong here goes wrong there too, and
    is said there.
    """
    with suppress(Exception):
        known = known_of_task(task, codec, held)
        for name, packet in task.send.items():
            if name not in leave_out:
                sent.cost(codec, packet, known[name])


def write_down(
    task: Task, codec: Codec, held: Held, sent: BroadcastBytes
) -> tuple[bytes, dict[str, bytes], Cost]:
    """A task as bytes: its head, each packet, and their length by part.

    Afterwards the client holds its masks. The same packet is the same object for all its receivers.
    """
    known = known_of_task(task, codec, held)
    packets: dict[str, bytes] = {}
    costs: dict[str, Cost] = {}
    for name, packet in task.send.items():
        encoded = sent.encoded(codec, packet, known[name])
        packets[name] = encoded.data
        costs[name] = encoded.cost
    head = message.task_head(task)
    cost = message.measure(head, task.send, lambda name, packet: costs[name])
    _note(task, codec, held)
    return message.write_head(head, packets), packets, cost


def write_up(task: Task, report: Report, codec: Codec) -> tuple[bytes, dict[str, bytes], Cost]:
    """The report on a task as its client writes it: head, packets, and their length by part."""
    masked = [name for name, packet in report.give.items() if packet.mask is not None]
    known = known_of_report(task, masked, codec, digest_of)
    packets: dict[str, bytes] = {}
    costs: dict[str, Cost] = {}
    for name, packet in report.give.items():
        encoded = codec.encode(packet, known.get(name))
        packets[name] = encoded.data
        costs[name] = encoded.cost
    head = message.report_head(report)
    cost = message.measure(head, report.give, lambda name, packet: costs[name])
    return message.write_head(head, packets), packets, cost


def _note(task: Task, codec: Codec, held: Held) -> None:
    """The client of a task holds its masks from now on."""
    for name in noted(task, codec):
        held.note(task.to, name, task.send[name].mask)


def noted(task: Task, codec: Codec) -> list[str]:
    """The packets whose masks both sides remember."""
    # Scoring leaves no trace: how often clients are evaluated must not change what training costs.
    if task.verb in SCORING_VERBS or not refers_to_masks(codec):
        return []
    return [name for name, packet in task.send.items() if packet.mask is not None]


def count_up(
    task: Task, report: Report, codec: Codec, held: Held, counted: Mapping[str, Cost] = NOTHING
) -> Cost:
    """The length of a report, by part; ``counted``: what some of its packets take, if known."""
    # A packet without a mask of its own has nothing to refer with.
    masked = []
    for name, packet in report.give.items():
        if packet.mask is not None and name not in counted:
            masked.append(name)
    known = known_of_report(task, masked, codec, held.digest)

    def packet_cost(name: str, packet: Packet) -> Cost:
        if name in counted:
            return counted[name]
        return codec.cost(packet, known.get(name))

    return message.measure(message.report_head(report), report.give, packet_cost)
