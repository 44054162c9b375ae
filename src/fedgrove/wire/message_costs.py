"""What the messages of a task cost: their real lengths, without joining their bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from ..core import SCORING_VERBS, Packet, Report, Task
from ..trees import Mask
from . import message
from .codec import (
    Chainable,
    Codec,
    CostByPart,
    Encoded,
    KnownMask,
    MeasuredTensor,
    can_refer_to_masks,
    hash_mask,
)
from .known_state import KnownState

T = TypeVar("T")

NO_COSTS: Mapping[str, CostByPart] = {}
"""The costs of packets that were not counted yet."""

EncodedMessage = tuple[bytes, dict[str, bytes], CostByPart]
"""A message as bytes: its head, each packet, and their length by part."""


# ---- broadcasts ----------------------------------------------------------------------------------


class _LastPackets(Generic[T]):
    """What was made of the last packets sent, so that a broadcast is encoded once, not per client.

    A packet is recognised by the identity of its trees and by the mask that its receiver knows.
    Packets are kept alive as long as their identity is a key; only ``most`` of them, so that memory
    does not grow with the number of clients.
    """

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self._made: dict[tuple[int, int, bytes | None], tuple[Packet, T]] = {}

    def _get_or_make(self, packet: Packet, known: KnownMask | None, make: Callable[[], T]) -> T:
        digest = None if known is None else known.digest
        key = (id(packet.values), id(packet.mask), digest)
        if key not in self._made:
            made = make()
            if len(self._made) == self.most:
                oldest = next(iter(self._made))
                del self._made[oldest]
            self._made[key] = (packet, made)
        return self._made[key][1]

    def note(self, packet: Packet, known: KnownMask | None, made: T) -> None:
        """Take over the encoded packet that was made elsewhere, unless it was made here."""
        self._get_or_make(packet, known, lambda: made)


class _MeasuredPackets(_LastPackets[list[MeasuredTensor]]):
    """The sizes of the values of the last packets sent."""

    def measure(self, codec: Chainable, packet: Packet) -> list[MeasuredTensor]:
        """Measure the values of a packet, which take the same for every receiver."""
        return self._get_or_make(packet, None, lambda: codec.measure(packet))


class BroadcastCosts(_LastPackets[CostByPart]):
    """The cost of the last packets sent: all that a simulation needs."""

    def __init__(self, most: int = 64) -> None:
        super().__init__(most)
        self._measured = _MeasuredPackets(most)

    def cost(self, codec: Codec, packet: Packet, known: KnownMask | None) -> CostByPart:
        """Return the cost of a packet to a receiver that knows the mask ``known``."""

        def count() -> CostByPart:
            if packet.mask is None or not isinstance(codec, Chainable) or not codec.can_measure:
                return codec.cost(packet, known)
            # Receivers know different masks, and are sent the same values.
            return codec.cost_of_measured(self._measured.measure(codec, packet), packet, known)

        return self._get_or_make(packet, known, count)


class BroadcastBytes(_LastPackets[Encoded]):
    """The bytes of the last packets sent, for an engine that sends them."""

    def encode(self, codec: Codec, packet: Packet, known: KnownMask | None) -> Encoded:
        """Return the bytes of a packet to a receiver that knows the mask ``known``."""
        return self._get_or_make(packet, known, lambda: codec.encode(packet, known))


# ---- which masks a receiver knows ----------------------------------------------------------------


def find_masks_known_to_client(
    task: Task, codec: Codec, known_state: KnownState
) -> dict[str, KnownMask | None]:
    """Return, by packet of a task, the mask from earlier tasks that it may refer to."""
    known: dict[str, KnownMask | None] = {}
    for name, packet in task.send.items():
        known[name] = None
        if packet.mask is not None and can_refer_to_masks(codec):
            known[name] = known_state.known(task.to, name, packet.mask)
    return known


def find_masks_known_to_server(
    task: Task, names: Iterable[str], codec: Codec, digest: Callable[[Mask], bytes]
) -> dict[str, KnownMask | None]:
    """Return, by packet of a report, the mask from its task that it may refer to."""
    known: dict[str, KnownMask | None] = {}
    for name in names:
        packet = task.send.get(name)
        known[name] = None
        if packet is not None and packet.mask is not None and can_refer_to_masks(codec):
            known[name] = KnownMask(packet.mask, digest(packet.mask))
    return known


def list_masks_to_remember(task: Task, codec: Codec) -> list[str]:
    """List the packets of a task whose masks both sides remember."""
    # Scoring leaves no trace: how often clients are evaluated must not change what training costs.
    if task.verb in SCORING_VERBS or not can_refer_to_masks(codec):
        return []
    return [name for name, packet in task.send.items() if packet.mask is not None]


def _note_masks(task: Task, codec: Codec, known_state: KnownState) -> None:
    """Note that the client of a task knows its masks from now on."""
    for name in list_masks_to_remember(task, codec):
        known_state.note(task.to, name, task.send[name].mask)


# ---- counting and writing ------------------------------------------------------------------------


def count_task(
    task: Task, codec: Codec, known_state: KnownState, sent: BroadcastCosts
) -> CostByPart:
    """Return the length of a task, by part; afterwards its client knows its masks."""
    known = find_masks_known_to_client(task, codec, known_state)
    costs: dict[str, CostByPart] = {}
    for name, packet in task.send.items():
        costs[name] = sent.cost(codec, packet, known[name])
    cost = message.measure(message.task_head(task), costs)
    _note_masks(task, codec, known_state)
    return cost


def count_task_ahead(
    task: Task,
    codec: Codec,
    known_state: KnownState,
    sent: BroadcastCosts,
    leave_out: Collection[str] = (),
) -> None:
    """Count what :func:`count_task` will ask for, if the client then knows the same masks.

    Packets to ``leave_out`` are counted elsewhere.
    """
    # What fails here fails in count_task too, and is reported there.
    with suppress(Exception):
        known = find_masks_known_to_client(task, codec, known_state)
        for name, packet in task.send.items():
            if name not in leave_out:
                sent.cost(codec, packet, known[name])


def count_report(
    task: Task,
    report: Report,
    codec: Codec,
    known_state: KnownState,
    counted: Mapping[str, CostByPart] = NO_COSTS,
) -> CostByPart:
    """Return the length of a report, by part; ``counted`` are packets whose cost is known."""
    # A packet without a mask cannot refer to one.
    masked = []
    for name, packet in report.give.items():
        if packet.mask is not None and name not in counted:
            masked.append(name)
    known = find_masks_known_to_server(task, masked, codec, known_state.digest)
    costs: dict[str, CostByPart] = {}
    for name, packet in report.give.items():
        if name in counted:
            costs[name] = counted[name]
        else:
            costs[name] = codec.cost(packet, known.get(name))
    return message.measure(message.report_head(report), costs)


def encode_task(
    task: Task, codec: Codec, known_state: KnownState, sent: BroadcastBytes
) -> EncodedMessage:
    """Write a task as bytes; afterwards its client knows its masks.

    A packet that goes to several clients is one object in all their messages.
    """
    known = find_masks_known_to_client(task, codec, known_state)
    encoded: dict[str, Encoded] = {}
    for name, packet in task.send.items():
        encoded[name] = sent.encode(codec, packet, known[name])
    written = message.join_encoded(message.task_head(task), encoded)
    _note_masks(task, codec, known_state)
    return written


def encode_report(task: Task, report: Report, codec: Codec) -> EncodedMessage:
    """Write the report on a task as bytes, as its client does."""
    masked = [name for name, packet in report.give.items() if packet.mask is not None]
    known = find_masks_known_to_server(task, masked, codec, hash_mask)
    encoded: dict[str, Encoded] = {}
    for name, packet in report.give.items():
        encoded[name] = codec.encode(packet, known.get(name))
    return message.join_encoded(message.report_head(report), encoded)
