"""What travels through the pipes of a pool: tasks and answers without their tensors."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core import Answer, Lost, Packet, Report, Task
from ...trees import Tree
from . import shared

Indices = tuple[tuple[str, int, int | None], ...]
"""(packet name, index of the tree of its values, index of the tree of its mask)."""


@dataclass(frozen=True)
class Envelope:
    """A task or report without its tensors, which travel as a list of trees in shared memory."""

    body: Any
    packets: Indices


@dataclass(frozen=True)
class Failed:
    """What no other worker could do better, such as a full disk: it ends the run."""

    sentence: str


def strip(body: Task | Report) -> tuple[Envelope, list[Tree]]:
    """A task or report without its tensors, and the trees that it held."""
    packets: Mapping[str, Packet]
    bare: Task | Report
    if isinstance(body, Task):
        packets = body.send
        bare = replace(body, send={})
    else:
        packets = body.give
        bare = replace(body, give={})
    indices, forest = trees_of(packets)
    return Envelope(bare, indices), forest


def trees_of(packets: Mapping[str, Packet]) -> tuple[Indices, list[Tree]]:
    """The trees of packets, and which of them is whose."""
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
    return tuple(indices), forest


def packets_of(indices: Indices, forest: list[Tree]) -> dict[str, Packet]:
    """The packets that :func:`trees_of` took apart."""
    packets = {}
    for name, values_index, mask_index in indices:
        mask = None if mask_index is None else forest[mask_index]
        packets[name] = Packet(forest[values_index], mask)
    return packets


def read(message: bytes) -> Answer | Failed:
    """What a worker's :func:`~fedgrove.engines.pool.worker.answer` wrote."""
    reply = pickle.loads(message)
    if isinstance(reply, Lost | Failed):
        return reply
    envelope, block = reply
    report: Report = replace(envelope.body, give=packets_of(envelope.packets, shared.get(block)))
    return report
