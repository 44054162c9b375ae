"""What receivers hold of what was sent: a mask that did not change need not be sent again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..trees import Mask
from .codec import Known


class Held:
    """The mask of the last packet each client received, by client and packet name."""

    def __init__(self, masks: Mapping[tuple[int, str], Mask] | None = None) -> None:
        self.masks: dict[tuple[int, str], Mask] = dict(masks or {})
        # By the mask's id, beside the mask itself: while it is alive, nothing else has that id.
        self._known: dict[int, tuple[Mask, Known]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the masks. Ids mean nothing in another process."""
        return {"masks": self.masks, "_known": {}}

    def known(self, client: int, packet: str) -> Known | None:
        """What the client holds, with its digest; None if it has never received a mask."""
        mask = self.masks.get((client, packet))
        return None if mask is None else self.digest(mask)

    def note(self, client: int, packet: str, mask: Mask | None) -> None:
        """The client has received a packet with this mask."""
        if mask is not None:
            self.masks[client, packet] = mask

    def forget(self, client: int) -> None:
        """Nobody knows what the client holds: its task or its answer was lost."""
        for key in [key for key in self.masks if key[0] == client]:
            del self.masks[key]

    def digest(self, mask: Mask) -> Known:
        """A mask with its digest, computed once for the mask that a whole group holds."""
        if id(mask) not in self._known:
            # Forget the masks that no client holds any more.
            alive = {id(m) for m in self.masks.values()}
            self._known = {key: value for key, value in self._known.items() if key in alive}
            self._known[id(mask)] = (mask, Known.of(mask))
        return self._known[id(mask)][1]
