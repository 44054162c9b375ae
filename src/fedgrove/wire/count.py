"""What the messages of a task cost: their real lengths, without joining their bytes."""

from __future__ import annotations

from ..core import SCORING_VERBS, Packet, Report, Task
from . import message
from .codec import Codec, Known
from .held import Held
from .message import Cost


class BroadcastCosts:
    """The cost of the last packets sent, so that a broadcast is encoded once, not per client.

    A packet is recognised by the identity of its trees and by what its receiver holds. Packets are
    kept alive as long as their identity is a key; only ``most`` of them, so that memory does not
    grow with the number of clients.
    """

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self._costs: dict[tuple[int, int, bytes | None], tuple[Packet, Cost]] = {}

    def cost(self, codec: Codec, packet: Packet, known: Known | None) -> Cost:
        """The cost of a packet to a receiver that holds ``known``."""
        digest = None if known is None else known.digest
        key = (id(packet.values), id(packet.mask), digest)
        if key not in self._costs:
            if len(self._costs) == self.most:
                oldest = next(iter(self._costs))
                del self._costs[oldest]
            self._costs[key] = (packet, codec.cost(packet, known))
        return self._costs[key][1]


def count_down(task: Task, codec: Codec, held: Held, sent: BroadcastCosts) -> Cost:
    """The length of a task, by part; afterwards the client holds its masks."""

    def packet_cost(name: str, packet: Packet) -> Cost:
        known = None
        if packet.mask is not None:
            known = held.known(task.to, name)
        return sent.cost(codec, packet, known)

    cost = message.measure(message.task_head(task), task.send, packet_cost)
    # Scoring leaves no trace: how often clients are evaluated must not change what training costs.
    if task.verb not in SCORING_VERBS:
        for name, packet in task.send.items():
            held.note(task.to, name, packet.mask)
    return cost


def count_up(task: Task, report: Report, codec: Codec, held: Held) -> Cost:
    """The length of a report, by part.

    The server knows the mask of the packet of the same name that it sent.
    """

    def packet_cost(name: str, packet: Packet) -> Cost:
        sent_mask = None
        if name in task.send:
            sent_mask = task.send[name].mask
        known = None
        if packet.mask is not None and sent_mask is not None:
            known = held.digest(sent_mask)
        return codec.cost(packet, known)

    return message.measure(message.report_head(report), report.give, packet_cost)
