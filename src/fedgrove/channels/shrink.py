"""Cutting removed channels out of a network (``shrink``), and the way back (``widen``).

The small net gives the same outputs as the masked one; see
:class:`fedgrove.channels.small_net.SmallNet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from .. import trees
from ..errors import InputError
from ..nets.net import Net
from ..renamed import find_old_names
from ..trees import Tree
from .find_groups import find_groups, find_kept_channels
from .groups import complete_channels, make_channels_key
from .small_net import MOST_CUTS, SmallNet, get_or_make, make_small_net


def shrink(net: Net, params: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> tuple[Net, Tree]:
    """Remove the channels that a mask removes; the outputs are those of the masked net.

    Args:
        net: The network in full width.
        params: Its tree.
        mask: What to remove. Single weights that it prunes inside channels that stay become zeros.

    Returns:
        The small net and its tree. Nets of equal width are one object.

    >>> import torch
    >>> from torch import nn
    >>> from fedgrove.channels.find_groups import make_channel_mask
    >>> net = Net(nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)), (1,))
    >>> mask = make_channel_mask(net, {"0": torch.tensor([True, False, True])})
    >>> small, tree = shrink(net, net.params(), mask)
    >>> small.layout.shapes["2.weight"], net.layout.shapes["2.weight"]
    ((1, 2), (1, 3))
    """
    small = cut_channels(net, find_kept_channels(net, mask) or {})
    return small.net, small.narrow(trees.apply_mask(params, mask))


def widen(net: Net, params: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    """Return small parameters in the full width of ``net``, the inverse of :func:`shrink`."""
    return cut_channels(net, find_kept_channels(net, mask) or {}).widen(params)


_CUTS: WeakKeyDictionary[Net, dict[Any, SmallNet]] = WeakKeyDictionary()


def cut_channels(net: Net, channels: Mapping[str, Tensor]) -> SmallNet:
    """Return the net without the channels that are not kept; at least one per group must stay.

    Made once for equal channels: masks that are equal, or become so in a later round, share it.
    """
    groups = find_groups(net)
    complete = complete_channels(groups, channels)

    def make() -> SmallNet:
        # Copies: what is cached must not change with the caller's tensors.
        return make_small_net(net, groups, trees.map(Tensor.clone, complete))

    return get_or_make(_CUTS, net, make_channels_key(complete), make, MOST_CUTS)


_SEEN: WeakKeyDictionary[Net, dict[Any, tuple[Mapping[str, Tensor], SmallNet | None]]] = (
    WeakKeyDictionary()
)


def find_small_net(net: Net, mask: Mapping[str, Tensor] | None) -> SmallNet | None:
    """Return the small net to train in place of a masked one; None if no whole channel is removed.

    Found once per mask. Where a mask removes all channels of a group, the first one is kept, and
    stays masked.
    """
    if mask is None:
        return None
    # The mask is cached with the result: while it is alive, no other object has its id.
    return get_or_make(_SEEN, net, id(mask), lambda: (mask, _cut_masked(net, mask)))[1]


def _cut_masked(net: Net, mask: Mapping[str, Tensor]) -> SmallNet | None:
    try:
        channels = find_kept_channels(net, mask)
    except InputError:  # a net whose channels cannot be followed trains masked
        return None
    if channels is None:
        return None
    for kept in channels.values():
        kept[0] |= ~kept.any()
    return cut_channels(net, channels)


__getattr__ = find_old_names(__name__)
