"""What receivers hold of what was sent: a mask that did not change need not be sent again.

Of each client the server remembers digests, eight bytes for each packet. What a mask looks like, it
needs to know only to send what changed in it: that is in the *bank*, once for all clients that hold
the mask, and the bank takes the room of one model at most. A mask that fell out of the bank is sent
whole when it changes; while it does not change, its digest says all.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..core import Packet
from ..trees import Mask
from .codec import Entropy, Known, SubModel, digest_of

CODEC = SubModel() >> Entropy()
"""How contents are written: by channel where a mask drops whole channels, by element elsewhere."""
RECENT = 64
"""So many digests are remembered for masks that come again as the same tensors."""
OPEN = 8
"""So many contents are kept as tensors too: a group's clients often hold the same old mask."""

_RECENT_LOCK = Lock()
"""Around changes of what is remembered of recent masks."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a mask's tensors."""


@dataclass(frozen=True, eq=False)
class Contents:
    """A mask in little room: its shapes, and its bits as a codec writes them."""

    shapes: Shapes
    data: Tensor
    """Bytes, as a tensor of uint8, so that a checkpoint can hold them."""

    @classmethod
    def of(cls, mask: Mask) -> Contents:
        """The contents of a mask."""
        shapes = tuple((name, tuple(kept.shape)) for name, kept in mask.items())
        # As values of its own mask: all that are kept are true, which takes a byte per tensor.
        written = CODEC.encode(Packet(mask, mask)).data
        return cls(_first_such(shapes), torch.frombuffer(bytearray(written), dtype=torch.uint8))

    def mask(self) -> Mask:
        """The mask again."""
        # With the shapes: a few bytes may stand for millions of bits, which a reader without them
        # refuses.
        packet = CODEC.decode(self.data.numpy().tobytes(), like=dict(self.shapes))
        return packet.mask or {}

    @property
    def bytes(self) -> int:
        """What they take."""
        return self.data.numel()

    @property
    def bytes_of_values(self) -> int:
        """What the values under the mask would take as float32, kept or not."""
        return 4 * sum(math.prod(shape) for _, shape in self.shapes)


# The shapes of a mask take more room than its channels: all masks of a model share one object.
@lru_cache(maxsize=64)
def _first_such(shapes: Shapes) -> Shapes:
    return shapes


class Held:
    """Which mask each client holds, by packet name; and what the masks look like, within limits.

    All depends on the order of :meth:`note` and :meth:`forget` alone, so every engine counts the
    same bytes, and a run that is resumed counts what one without interruption counts.
    """

    def __init__(self) -> None:
        self.digests: dict[int, dict[str, bytes]] = {}
        # Those that were noted last are at the end.
        self.bank: dict[bytes, Contents] = {}
        self.room = 0
        self._used = 0
        self._holders: Counter[bytes] = Counter()
        self._recent: dict[Any, tuple[tuple[weakref.ref[Tensor], ...], bytes]] = {}
        self._open: dict[bytes, Known] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled. Ids mean nothing in another process, so what goes by them stays here."""
        return {**vars(self), "_recent": {}, "_open": {}}

    def known(self, client: int, packet: str, mask: Mask) -> Known | None:
        """What a packet with this mask may refer to; None if it has to be sent whole."""
        digest = self.digests.get(client, {}).get(packet)
        if digest is None:
            return None
        if digest == self.digest(mask):
            return Known(mask, digest)
        return self._opened(digest)

    def note(self, client: int, packet: str, mask: Mask | None) -> None:
        """The client has received a packet with this mask."""
        if mask is None:
            return
        digest = self.digest(mask)
        by_packet = self.digests.setdefault(client, {})
        before = by_packet.get(packet)
        by_packet[packet] = digest
        self._holders[digest] += 1
        if before is not None:
            self._let_go(before)

        contents = self.bank.pop(digest, None)
        if contents is None:
            contents = Contents.of(mask)
            self._used += contents.bytes
        self.bank[digest] = contents
        self.room = max(self.room, contents.bytes_of_values)
        # The newest stays, whatever it takes: the names of a tiny model are longer than its values.
        while self._used > self.room and len(self.bank) > 1:
            oldest = next(iter(self.bank))
            self._used -= self.bank.pop(oldest).bytes

    def forget(self, client: int) -> None:
        """Nobody knows what the client holds: its task or its answer was lost."""
        for digest in self.digests.pop(client, {}).values():
            self._let_go(digest)

    def _let_go(self, digest: bytes) -> None:
        """One packet less refers to a mask; what nobody holds is of no use."""
        self._holders[digest] -= 1
        if self._holders[digest]:
            return
        del self._holders[digest]
        contents = self.bank.pop(digest, None)
        if contents is not None:
            self._used -= contents.bytes

    def digest(self, mask: Mask) -> bytes:
        """The digest of a mask, computed once for the one that a whole group is sent."""
        # Torch does not count what is written into tensors of its inference mode.
        if any(kept.is_inference() for kept in mask.values()):
            return digest_of(mask)
        key = tuple((name, id(kept), kept._version) for name, kept in mask.items())
        recent = self._recent.get(key)
        if recent is not None:
            refs, digest = recent
            # An id is a tensor's only while it lives: these must be the very tensors of then.
            if all(ref() is kept for ref, kept in zip(refs, mask.values(), strict=True)):
                return digest
        digest = digest_of(mask)
        refs = tuple(weakref.ref(kept) for kept in mask.values())
        # An engine may count the bytes of several reports at once.
        with _RECENT_LOCK:
            self._recent[key] = (refs, digest)
            _keep_last(self._recent, RECENT)
        return digest

    def _opened(self, digest: bytes) -> Known | None:
        """A mask of the bank; None if it is not there any more."""
        contents = self.bank.get(digest)
        if contents is None:
            return None
        if digest not in self._open:
            self._open[digest] = Known(contents.mask(), digest)
            _keep_last(self._open, OPEN)
        return self._open[digest]

    # ---- in a checkpoint -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it as numbers, strings, tensors and containers."""
        clients_of: dict[str, dict[str, list[int]]] = {}
        # Sorted, so that the same state is the same text, whatever came first.
        for client, by_packet in sorted(self.digests.items()):
            for packet, digest in sorted(by_packet.items()):
                clients_of.setdefault(packet, {}).setdefault(digest.hex(), []).append(client)
        # Most masks have the same shapes, which are written once.
        shapes: dict[Shapes, int] = {}
        bank = []
        for digest, contents in self.bank.items():
            number = shapes.setdefault(contents.shapes, len(shapes))
            bank.append([digest.hex(), number, contents.data])
        return {"clients": clients_of, "shapes": list(shapes), "bank": bank, "room": self.room}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state` gave."""
        self.digests = {}
        self._holders = Counter()
        for packet, by_digest in state["clients"].items():
            for digest, clients in by_digest.items():
                self._holders[bytes.fromhex(digest)] += len(clients)
                for client in clients:
                    self.digests.setdefault(client, {})[packet] = bytes.fromhex(digest)
        self.bank = {}
        for digest, number, data in state["bank"]:
            shapes = _first_such(state["shapes"][number])
            self.bank[bytes.fromhex(digest)] = Contents(shapes, data)
        self._used = sum(contents.bytes for contents in self.bank.values())
        self.room = state["room"]


def _keep_last(remembered: dict[Any, Any], most: int) -> None:
    """Leave out the entry that was made first if there are too many."""
    if len(remembered) > most:
        oldest = next(iter(remembered))
        del remembered[oldest]
