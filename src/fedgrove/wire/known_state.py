"""Which masks each client knows from earlier tasks: a mask that did not change is not sent again.

For each client the server remembers digests, eight bytes per packet. It needs a mask's contents
only to send what changed in it: these are in the *bank*, once for all clients that know the mask,
and the bank takes the room of one model at most. A mask that fell out of the bank is sent in full
when it changes; while it does not change, its digest is enough.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import Packet
from ..renamed import find_old_names
from ..trees import Mask
from .codec import Entropy, KnownMask, SubModel, hash_mask

MASK_CODEC = SubModel() >> Entropy()
"""How masks are stored: by channel where a mask drops whole channels, by element elsewhere."""
MOST_RECENT = 64
"""How many digests are cached for masks that come again as the same tensors."""
MOST_DECODED = 8
"""How many masks of the bank are kept as tensors too: a group's clients often know one old mask."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a mask's tensors."""


@dataclass(frozen=True, eq=False)
class StoredMask:
    """A mask in few bytes: its shapes, and its bits as a codec writes them."""

    shapes: Shapes
    data: Tensor
    """Bytes, as a tensor of uint8, so that a checkpoint can contain them."""

    @classmethod
    def of(cls, mask: Mask) -> StoredMask:
        """Store a mask in a few encoded bytes."""
        shapes = tuple((name, tuple(kept.shape)) for name, kept in mask.items())
        # As values under itself: all that are kept are true, which takes a byte per tensor.
        written = MASK_CODEC.encode(Packet(mask, mask)).data
        return cls(_intern_shapes(shapes), torch.frombuffer(bytearray(written), dtype=torch.uint8))

    def mask(self) -> Mask:
        """Decode the stored mask again."""
        # With the shapes: a few bytes may stand for millions of bits, which a reader without them
        # refuses.
        like = {name: (torch.bool, shape) for name, shape in self.shapes}
        packet = MASK_CODEC.decode(self.data.numpy().tobytes(), like=like)
        return packet.mask or {}

    @property
    def bytes(self) -> int:
        """The bytes that the stored mask takes."""
        return self.data.numel()

    @property
    def bytes_of_values(self) -> int:
        """The bytes that the values under the mask would take as float32, kept or not."""
        return 4 * sum(math.prod(shape) for _, shape in self.shapes)


# The shapes of a mask take more room than its channels, so all masks of a model share one object.
@lru_cache(maxsize=64)
def _intern_shapes(shapes: Shapes) -> Shapes:
    return shapes


class KnownState:
    """Which mask each client knows, by packet name; and the contents of masks, within limits.

    It depends on the order of :meth:`note` and :meth:`forget` alone, so every engine counts the
    same bytes, and a resumed run counts what an uninterrupted one counts.
    """

    def __init__(self) -> None:
        self.digests: dict[int, dict[str, bytes]] = {}
        # Those that were noted last are at the end.
        self.bank: dict[bytes, StoredMask] = {}
        self.room = 0
        self._used = 0
        self._users: Counter[bytes] = Counter()
        self._recent: dict[Any, tuple[tuple[weakref.ref[Tensor], ...], bytes]] = {}
        self._decoded: dict[bytes, KnownMask] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not the caches, one of which goes by ids, void in another process."""
        return {**vars(self), "_recent": {}, "_decoded": {}}

    def known(self, client: int, packet: str, mask: Mask) -> KnownMask | None:
        """Return the mask that a client knows and a packet may refer to; None: send it whole."""
        digest = self.digests.get(client, {}).get(packet)
        if digest is None:
            return None
        if digest == self.digest(mask):
            return KnownMask(mask, digest)
        return self._decode(digest)

    def note(self, client: int, packet: str, mask: Mask | None) -> None:
        """Note that the client has received a message with a packet with this mask."""
        if mask is None:
            return
        digest = self.digest(mask)
        by_packet = self.digests.setdefault(client, {})
        before = by_packet.get(packet)
        by_packet[packet] = digest
        self._users[digest] += 1
        if before is not None:
            self._release(before)

        stored = self.bank.pop(digest, None)
        if stored is None:
            stored = StoredMask.of(mask)
            self._used += stored.bytes
        self.bank[digest] = stored
        self.room = max(self.room, stored.bytes_of_values)
        # The newest stays, whatever it takes: the names of a tiny model are longer than its values.
        while self._used > self.room and len(self.bank) > 1:
            oldest = next(iter(self.bank))
            self._used -= self.bank.pop(oldest).bytes

    def forget(self, client: int) -> None:
        """Forget the masks that a client knows, because its message or its answer was lost."""
        for digest in self.digests.pop(client, {}).values():
            self._release(digest)

    def _release(self, digest: bytes) -> None:
        """Note that one packet less refers to a mask; one that no client knows is deleted."""
        self._users[digest] -= 1
        if self._users[digest]:
            return
        del self._users[digest]
        stored = self.bank.pop(digest, None)
        if stored is not None:
            self._used -= stored.bytes

    def digest(self, mask: Mask) -> bytes:
        """Return the digest of a mask, computed once for the one that a whole group is sent."""
        # Torch does not count what is written into tensors of its inference mode.
        if any(kept.is_inference() for kept in mask.values()):
            return hash_mask(mask)
        key = tuple((name, id(kept), kept._version) for name, kept in mask.items())
        if key in self._recent:
            refs, digest = self._recent[key]
            # An id is a tensor's only while it lives: these must be the very tensors of then.
            if all(ref() is kept for ref, kept in zip(refs, mask.values(), strict=True)):
                return digest
        digest = hash_mask(mask)
        self._recent[key] = (tuple(weakref.ref(kept) for kept in mask.values()), digest)
        _keep_last(self._recent, MOST_RECENT)
        return digest

    def _decode(self, digest: bytes) -> KnownMask | None:
        """Return a mask of the bank; None if it is not there any more."""
        stored = self.bank.get(digest)
        if stored is None:
            return None
        if digest not in self._decoded:
            self._decoded[digest] = KnownMask(stored.mask(), digest)
            _keep_last(self._decoded, MOST_DECODED)
        return self._decoded[digest]

    # ---- in a checkpoint -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return which masks clients know as numbers, strings, tensors and containers."""
        clients_of: dict[str, dict[str, list[int]]] = {}
        # Sorted, so that equal states are equal texts, whatever came first.
        for client, by_packet in sorted(self.digests.items()):
            for packet, digest in sorted(by_packet.items()):
                clients_of.setdefault(packet, {}).setdefault(digest.hex(), []).append(client)
        # Most masks have the same shapes, which are written once.
        shapes: dict[Shapes, int] = {}
        bank = []
        for digest, stored in self.bank.items():
            number = shapes.setdefault(stored.shapes, len(shapes))
            bank.append([digest.hex(), number, stored.data])
        return {"clients": clients_of, "shapes": list(shapes), "bank": bank, "room": self.room}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore which masks clients know from what :meth:`state` returned."""
        self.digests = {}
        self._users = Counter()
        for packet, by_digest in state["clients"].items():
            for digest, clients in by_digest.items():
                self._users[bytes.fromhex(digest)] += len(clients)
                for client in clients:
                    self.digests.setdefault(client, {})[packet] = bytes.fromhex(digest)
        self.bank = {}
        for digest, number, data in state["bank"]:
            shapes = _intern_shapes(state["shapes"][number])
            self.bank[bytes.fromhex(digest)] = StoredMask(shapes, data)
        self._used = sum(stored.bytes for stored in self.bank.values())
        self.room = state["room"]


def _keep_last(cache: dict[Any, Any], most: int) -> None:
    """Delete the oldest entry of a cache that has too many."""
    if len(cache) > most:
        oldest = next(iter(cache))
        del cache[oldest]


__getattr__ = find_old_names(__name__)
