"""Masks of whole channels, made once for a choice of channels, and what was found out about them.

In a round the same mask is made for a client's part of the model, by the client for its own, and by
the server for the mean; and from its bits it is found out again, for training and for the mean,
which channels it leaves. A mask that came over a network is another one, and is looked at anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import trees
from ..trees import Mask
from .groups import ChannelGroup, Channels, expand

MOST_BYTES = 1 << 25
"""The masks that are remembered take no more memory; those not used for longest go."""
MOST_MASKS = 1024
"""Nor are there more of them."""
MOST_FINDINGS = 16
"""What is remembered of one mask: of each set of its tensors that somebody asks about."""


@dataclass(eq=False)
class _Known:
    """A mask that was made here, as long as nobody writes into it."""

    mask: Mask
    nbytes: int
    versions: list[int]
    """How often each leaf had been written to when it was made."""
    findings: dict[Any, Channels | None] = field(default_factory=dict)

    @property
    def is_unchanged(self) -> bool:
        return self.versions == [leaf._version for leaf in self.mask.values()]


class _Masks(threading.local):
    """The masks that were made here, by choice of channels; those used last are kept.

    Each thread has its own: so none waits for a lock, which a forked worker could find locked.
    """

    def __init__(self) -> None:
        self.by_choice: dict[Any, _Known] = {}
        # By the id of each leaf: while the mask is held, the id is no one else's.
        self.by_leaf: dict[int, _Known] = {}
        self.nbytes = 0

    def get(self, choice: Any) -> Mask | None:
        """The mask of a choice, if there is one that nobody has written into."""
        known = self.by_choice.get(choice)
        if known is None:
            return None
        self._forget(choice)
        if not known.is_unchanged:
            return None
        # Inserted last, so that the first one is the one unused for longest.
        self._insert(choice, known)
        return known.mask

    def add(self, choice: Any, mask: Mask) -> None:
        """Remember a mask."""
        # Torch does not count what is written into tensors of its inference mode.
        if any(leaf.is_inference() for leaf in mask.values()):
            return
        nbytes = sum(leaf.nbytes for leaf in mask.values())
        versions = [leaf._version for leaf in mask.values()]
        self._insert(choice, _Known(mask, nbytes, versions))
        while self.nbytes > MOST_BYTES or len(self.by_choice) > MOST_MASKS:
            self._forget(next(iter(self.by_choice)))

    def origin(self, mask: Mapping[str, Tensor]) -> _Known | None:
        """The remembered mask that all tensors of this one belong to, if there is one."""
        first = next(iter(mask.values()), None)
        known = self.by_leaf.get(id(first))
        if known is None or not known.is_unchanged:
            return None
        is_part = all(known.mask.get(name) is leaf for name, leaf in mask.items())
        return known if is_part else None

    def _insert(self, choice: Any, known: _Known) -> None:
        self.by_choice[choice] = known
        self.nbytes += known.nbytes
        for leaf in known.mask.values():
            self.by_leaf[id(leaf)] = known

    def _forget(self, choice: Any) -> None:
        known = self.by_choice.pop(choice)
        self.nbytes -= known.nbytes
        for leaf in known.mask.values():
            del self.by_leaf[id(leaf)]


_MASKS = _Masks()


def shared_mask(
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    channels: Mapping[str, Tensor],
    buffers: bool = False,
) -> Mask:
    """What :func:`.groups.expand` gives, of tensors that all who ask for these channels share.

    Not to be written into. Where somebody did all the same, those who ask later get another one.
    """
    are_usual = all(kept.dim() == 1 and trees.are_plain(kept) for kept in channels.values())
    if not are_usual:
        return expand(groups, shapes, channels, buffers)
    # Without statistics the mask is the same with buffers and without: one key for both.
    buffers = buffers and _have_statistics(groups, shapes)
    chosen = tuple((name, kept.bool().numpy().tobytes()) for name, kept in channels.items())
    key = (tuple(groups), tuple(shapes.items()), chosen, buffers)
    mask = _MASKS.get(key)
    if mask is None:
        mask = expand(groups, shapes, channels, buffers)
        _MASKS.add(key, mask)
    return dict(mask)


def found(
    what: str,
    groups: Sequence[ChannelGroup],
    mask: Mapping[str, Tensor],
    find: Callable[[], Channels | None],
) -> Channels | None:
    """The channels that ``find`` finds in a mask; of one that was made here it is called once.

    ``what`` says what it looks for. The caller may write into the result.
    """
    known = _MASKS.origin(mask)
    if known is None:
        return find()
    key = (what, tuple(groups), tuple(mask))
    if key not in known.findings:
        if len(known.findings) == MOST_FINDINGS:
            known.findings.clear()
        known.findings[key] = find()
    channels = known.findings[key]
    if channels is None:
        return None
    return {name: kept.clone() for name, kept in channels.items()}


def _have_statistics(groups: Sequence[ChannelGroup], shapes: Mapping[str, Any]) -> bool:
    for group in groups:
        for place in group.places:
            if place.role == "statistic" and place.tensor in shapes:
                return True
    return False
