"""A cache of masks of whole channels, and of the channels that were found in them.

In a round the server makes a mask for a client's part of the model, the client makes an equal one,
and the server makes it again for the mean; and training and the mean find out from its bits which
channels it keeps. A mask that came over a network is another object, and is analysed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import trees
from ..trees import Mask
from .groups import ChannelGroup, Channels, expand_channels, make_channels_key

MOST_CACHED_BYTES = 1 << 25
"""The most memory that cached masks take; those not used for longest are dropped."""
MOST_MASKS = 1024
"""The most masks that are cached."""


@dataclass(eq=False)
class _CachedMask:
    """A mask that was made here, valid until it is written into."""

    mask: Mask
    nbytes: int
    versions: list[int]
    """How often each leaf had been written to when it was made."""
    findings: dict[Any, Channels | None] = field(default_factory=dict)
    """What was found in it, one entry for each set of its tensors: a whole mask, and what a report
    names of it."""

    @property
    def is_unchanged(self) -> bool:
        return self.versions == trees.count_writes(self.mask.values())


class _MaskCache(threading.local):
    """The masks that were made here, by choice of channels; those used last are kept.

    Each thread has its own: so none waits for a lock, which a forked worker could find locked.
    """

    def __init__(self) -> None:
        self.by_choice: dict[Any, _CachedMask] = {}
        # By the id of each leaf: while the mask is alive, no other tensor has that id.
        self.by_leaf: dict[int, _CachedMask] = {}
        self.nbytes = 0

    def get(self, choice: Any) -> Mask | None:
        """Return the cached mask of kept channels, unless it was written into."""
        cached = self.by_choice.get(choice)
        if cached is None:
            return None
        self._remove(choice)
        if not cached.is_unchanged:
            return None
        # Inserted last, so that the first one is the one unused for longest.
        self._insert(choice, cached)
        return cached.mask

    def add(self, choice: Any, mask: Mask) -> None:
        """Cache the mask of kept channels."""
        leaves = list(mask.values())
        # Torch does not count the writes into tensors of its inference mode.
        if any(leaf.is_inference() for leaf in leaves):
            return
        # Counted once: a mask in the cache does not change its size.
        nbytes = sum(leaf.nbytes for leaf in leaves)
        self._insert(choice, _CachedMask(mask, nbytes, trees.count_writes(leaves)))
        while self.nbytes > MOST_CACHED_BYTES or len(self.by_choice) > MOST_MASKS:
            self._remove(next(iter(self.by_choice)))

    def find_origin(self, mask: Mapping[str, Tensor]) -> _CachedMask | None:
        """Return the cached channel mask that has all tensors of this one, if there is one."""
        first = next(iter(mask.values()), None)
        cached = self.by_leaf.get(id(first))
        if cached is None or not cached.is_unchanged:
            return None
        for name, leaf in mask.items():
            if cached.mask.get(name) is not leaf:
                return None
        return cached

    def _insert(self, choice: Any, cached: _CachedMask) -> None:
        self.by_choice[choice] = cached
        self.nbytes += cached.nbytes
        for leaf in cached.mask.values():
            self.by_leaf[id(leaf)] = cached

    def _remove(self, choice: Any) -> None:
        cached = self.by_choice.pop(choice)
        self.nbytes -= cached.nbytes
        for leaf in cached.mask.values():
            del self.by_leaf[id(leaf)]


_CACHE = _MaskCache()


def get_shared_mask(
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    channels: Mapping[str, Tensor],
    buffers: bool = False,
) -> Mask:
    """Return what :func:`.groups.expand_channels` gives, made once for equal channels.

    Its tensors are shared: do not write into them. After somebody did, later callers get new ones.
    """
    are_usual = all(kept.dim() == 1 and trees.are_plain(kept) for kept in channels.values())
    if not are_usual:
        return expand_channels(groups, shapes, channels, buffers)
    # Without statistics the mask is the same with buffers and without: one key for both.
    buffers = buffers and _have_statistics(groups, shapes)
    key = (tuple(groups), tuple(shapes.items()), make_channels_key(channels), buffers)
    mask = _CACHE.get(key)
    if mask is None:
        mask = expand_channels(groups, shapes, channels, buffers)
        _CACHE.add(key, mask)
    return dict(mask)


def find_once(
    what: str,
    groups: Sequence[ChannelGroup],
    mask: Mapping[str, Tensor],
    find: Callable[[], Channels | None],
) -> Channels | None:
    """Return the channels that ``find`` finds in a mask; called once for a mask made here.

    Args:
        what: The name of the finding.
        groups: The groups that ``find`` looks at.
        mask: The mask that it looks at.
        find: Finds the channels.

    Returns:
        Channels that the caller may write into.
    """
    cached = _CACHE.find_origin(mask)
    if cached is None:
        return find()
    key = (what, tuple(groups), tuple(mask))
    if key not in cached.findings:
        cached.findings[key] = find()
    channels = cached.findings[key]
    if channels is None:
        return None
    return trees.map(Tensor.clone, channels)


def _have_statistics(groups: Sequence[ChannelGroup], shapes: Mapping[str, Any]) -> bool:
    for group in groups:
        if any(place.tensor in shapes for place in group.places_with("statistic")):
            return True
    return False
