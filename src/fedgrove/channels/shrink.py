"""Really smaller networks: ``shrink`` cuts removed channels out, ``widen`` is the way back.

The small net gives the same outputs as the masked one; see :class:`fedgrove.channels.thin.Thin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from .. import trees
from ..errors import InputError
from ..nets.net import Net
from ..trees import Tree
from .find import channels_left, groups_of
from .groups import checked
from .thin import MOST_CUTS, Thin, cut_groups, remembered


def shrink(net: Net, params: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> tuple[Net, Tree]:
    """The net and the parameters without the channels that the mask removes.

    Equal in outputs to the masked net. Single weights that the mask prunes inside channels that
    stay become zeros. Nets of equal width are one object.

    >>> import torch
    >>> from torch import nn
    >>> from fedgrove.channels.find import channel_mask
    >>> net = Net(nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)), (1,))
    >>> mask = channel_mask(net, {"0": torch.tensor([True, False, True])})
    >>> small, tree = shrink(net, net.params(), mask)
    >>> small.layout.shapes["2.weight"], net.layout.shapes["2.weight"]
    ((1, 2), (1, 3))
    """
    thin = cut(net, channels_left(net, mask) or {})
    return thin.net, thin.narrow(trees.apply_mask(params, mask))


def widen(net: Net, params: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    """The inverse of :func:`shrink`: small parameters in the full width of ``net``."""
    return cut(net, channels_left(net, mask) or {}).widen(params)


_CUTS: WeakKeyDictionary[Net, dict[Any, Thin]] = WeakKeyDictionary()


def cut(net: Net, channels: Mapping[str, Tensor]) -> Thin:
    """The net without the channels that are not kept; at least one of each group must stay.

    Made once for the same channels: masks that are equal, or become so in a later round, share it.
    """
    groups = groups_of(net)
    complete = checked(groups, channels)
    key = tuple((name, kept.cpu().numpy().tobytes()) for name, kept in complete.items())

    def make() -> Thin:
        # Copies: what is remembered must not change with the caller's tensors.
        return cut_groups(net, groups, {name: kept.clone() for name, kept in complete.items()})

    return remembered(_CUTS, net, key, make, MOST_CUTS)


_SEEN: WeakKeyDictionary[Net, dict[Any, tuple[Mapping[str, Tensor], Thin | None]]] = (
    WeakKeyDictionary()
)


def structured(net: Net, mask: Mapping[str, Tensor] | None) -> Thin | None:
    """The small net to train in place of a masked one; None if the mask removes no whole channel.

    Found once per mask. Where a mask removes all channels of a group, the first one is kept, and
    stays masked.
    """
    if mask is None:
        return None
    # The mask is kept beside the result: while it is alive, nothing else can have its id.
    return remembered(_SEEN, net, id(mask), lambda: (mask, _structured(net, mask)))[1]


def _structured(net: Net, mask: Mapping[str, Tensor]) -> Thin | None:
    try:
        channels = channels_left(net, mask)
    except InputError:  # a net whose channels cannot be followed trains masked
        return None
    if channels is None:
        return None
    for kept in channels.values():
        kept[0] |= ~kept.any()
    return cut(net, channels)
