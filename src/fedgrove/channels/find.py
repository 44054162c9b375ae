"""The groups of channels of a network that can really be removed, found by trying.

torch-pruning proposes groups; each is cut out of the network once, and stays only if the small
network gives the same outputs as the masked one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import trees
from ..errors import UnfitError
from ..nets.layout import tensors_of
from ..nets.net import Net
from ..trees import Mask
from .groups import (
    ChannelGroup,
    Channels,
    channels_of,
    checked,
    expand,
    interned,
    may_remove_channels,
)
from .mask_cache import found
from .thin import cut_groups
from .trace import trace

TOLERANCE = 1e-4
"""Largest difference between masked and small net, relative to the largest output, in float32."""

_GROUPS: WeakKeyDictionary[Net, tuple[ChannelGroup, ...]] = WeakKeyDictionary()


def groups_of(net: Net) -> tuple[ChannelGroup, ...]:
    """The channels of a net that fall together, in order of execution; found once per net.

    The net's output is in no group. A group whose channels depend on each other (they are averaged,
    shuffled or counted in the forward pass) is left out.
    """
    if net not in _GROUPS:
        _GROUPS[net] = tuple(interned(group) for group in _find(net))
    return _GROUPS[net]


def removable_groups(net: Net) -> tuple[ChannelGroup, ...]:
    """The groups of a net that has some; one without is refused, as it would stay whole."""
    groups = groups_of(net)
    if not groups:
        raise UnfitError(
            "it has no channels that can be removed. Such a channel is made by a convolution or a "
            "linear layer and read by another, and nothing in between ties it to others (a "
            "recurrent layer, attention, LayerNorm, a shared or frozen weight, a branch on data). "
            "Take a net that has some, or a method that prunes single weights: ca-afp, fedsnip, "
            "fixedprune."
        )
    return groups


def channel_mask(net: Net, channels: Mapping[str, Tensor]) -> Mask:
    """The mask of all that falls with removed channels (:func:`.groups.expand`).

    >>> from torch import nn
    >>> net = Net(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)), (1,))
    >>> mask = channel_mask(net, {"0": torch.tensor([True, False])})
    >>> {name: kept.int().tolist() for name, kept in mask.items()}
    {'0.weight': [[1], [0]], '0.bias': [1, 0], '2.weight': [[1, 0]]}
    """
    return expand(groups_of(net), net.layout.shapes, channels)


def channels_left(net: Net, mask: Mapping[str, Tensor] | None) -> Channels | None:
    """Which channels a mask leaves, per group; None if it removes no whole channel."""
    # Tested first, so that a net is not traced for masks that prune single weights only.
    if mask is None or not may_remove_channels(mask):
        return None
    groups = groups_of(net)
    return found("left", groups, mask, lambda: channels_of(groups, mask))


def _find(net: Net) -> tuple[ChannelGroup, ...]:
    # A copy: tracing switches gradients and modes. The trial net is another one, so that what
    # is remembered of it goes with it.
    traced = copy.deepcopy(net.module)
    names = {id(t): name for name, t in tensors_of(traced).items()}
    order = [layer.name for layer in net.layout.layers]
    trial = Net(copy.deepcopy(net.module), net.shape)
    candidates: list[ChannelGroup] = []
    for group in trace(traced, net.shape, names, order):
        # The outputs of the last linear layer are the classes.
        makes_outputs = any(place.tensor in net.layout.head for place in group.within("filter"))
        if not makes_outputs:
            candidates.append(group)
    if agrees(trial, candidates):
        return tuple(candidates)
    # Some group fails: keep those that pass alone, if they pass together.
    independent = [group for group in candidates if agrees(trial, [group])]
    return tuple(independent) if agrees(trial, independent) else ()


def agrees(net: Net, groups: Sequence[ChannelGroup]) -> bool:
    """Whether the small net equals the masked one with every other channel removed."""
    generator = torch.Generator().manual_seed(0)
    initial = net.params()
    like = next(iter(initial.values()))
    tree = {}
    for name, leaf in initial.items():
        noise = torch.rand(leaf.shape, generator=generator).to(leaf)
        # Scales of 1 and shifts of 0 would hide a mistake, so vectors are moved.
        tree[name] = leaf + 0.5 * noise if leaf.dim() == 1 else leaf
    x = torch.randn(2, *net.shape, generator=generator).to(like)
    channels = {}
    for i, group in enumerate(groups):
        # The even ones of one group and the odd ones of the next: groups that share a tensor would
        # agree by coincidence if all lost the same ones.
        kept = (torch.arange(group.size) + i) % 2 == 0
        kept[0] |= ~kept.any()
        channels[group.name] = kept
    masked = trees.apply_mask(tree, expand(groups, net.layout.shapes, channels))
    try:
        thin = cut_groups(net, groups, checked(groups, channels))
        # A forward pass that branches on data may go one way for x, and the other for -x.
        for inputs in (x, -x):
            with torch.no_grad():
                full = net.run(masked, inputs, False)
                small = thin.net.run(thin.narrow(masked), inputs, False)
            scale = full.abs().max().clamp_min(1e-30)
            if not bool(((full - small).abs() <= TOLERANCE * scale).all()):
                return False
        return True
    except Exception:  # a shape that no longer fits, in code that is not ours
        return False
