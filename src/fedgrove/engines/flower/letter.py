"""A task or a report on its way: bytes in parts, and a note beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...wire.codec import Chain, Codec, CostByPart

Note = Mapping[str, str | int]
"""What travels beside a message and is no part of it: the name of the run, why a task was lost."""


@dataclass(frozen=True)
class Letter:
    """A message of :mod:`fedgrove.wire.message`, in parts.

    Head and packets, joined, are the message. They travel apart, so that a packet which many
    clients are sent is stored once.
    """

    head: bytes = b""
    packets: Mapping[str, bytes] = field(default_factory=dict)
    codec: str = ""
    note: Note = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        """The whole message."""
        return b"".join([self.head, *self.packets.values()])

    @property
    def length(self) -> int:
        """The bytes that the ledger counts."""
        return len(self.head) + sum(len(blob) for blob in self.packets.values())


def codec_name(codec: Codec) -> str:
    """What both sides call a codec: its class with its settings, a chain by its parts.

    >>> from fedgrove.wire.codec import Bitmap, Entropy
    >>> codec_name(Bitmap() >> Entropy())
    'Bitmap() >> Entropy(slack=0.015)'
    """
    if isinstance(codec, Chain):
        return f"{codec_name(codec.first)} >> {codec_name(codec.then)}"
    return repr(codec)


def cost_note(cost: CostByPart) -> str:
    """What a report's bytes were spent on, for its note."""
    return json.dumps(dict(cost))


def cost_of(letter: Letter) -> CostByPart:
    """What a report's bytes were spent on, as its client says if that adds up to what came.

    A client may lie about the parts, but not about the sum.
    """
    head = len(letter.head)
    otherwise = {"header": head, "values": letter.length - head}
    try:
        claimed = json.loads(str(letter.note["cost"]))
        are_counts = all(type(n) is int and n >= 0 for n in claimed.values())
        if not are_counts or sum(claimed.values()) != letter.length:
            return otherwise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return otherwise
    return {str(part): n for part, n in claimed.items()}
