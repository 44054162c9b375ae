"""Groups of channels that must be removed together, as plain data, and masks of whole channels.

A channel is one output of a layer: a filter of a convolution, a unit of a linear layer. Removing it
also removes its bias, the scale and shift of the norms after it, and what later layers read of it;
a residual sum ties the channels of several layers to each other.
:func:`fedgrove.channels.find_groups.find_groups` finds these groups for a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from .. import trees
from ..errors import InputError, check, unknown
from ..renamed import find_old_names
from ..trees import Mask

Role = Literal["filter", "bias", "scale", "shift", "statistic", "input"]
"""What a tensor does with a channel.

``filter`` and ``bias`` make it, ``scale``, ``shift`` and ``statistic`` (running mean and variance)
normalise it, ``input`` is a later layer's weight that reads it.
"""
Channels = dict[str, Tensor]
"""Group name -> booleans, one per channel: True is kept. All channels of other groups are kept."""


@dataclass(frozen=True)
class Place:
    """One dimension of a tensor: its entry ``i`` belongs to channel ``channel[i]``, -1 for none."""

    tensor: str
    dim: int
    channel: tuple[int, ...]
    role: Role
    fill: float = 0.0
    """The value where a channel was removed: 0, and 1 in a running variance."""

    @cached_property
    def index(self) -> Tensor:
        """The channel of each entry of a tensor's dimension, as a tensor."""
        return torch.tensor(self.channel)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether entry ``i`` belongs to channel ``i``, as in most layers."""
        return self.channel == tuple(range(len(self.channel)))

    def is_all(self, size: int) -> bool:
        """Return whether its entries are a group's ``size`` channels, each once and in order."""
        return len(self.channel) == size and self.is_in_order

    @cached_property
    def has_others(self) -> bool:
        """Whether a dimension has entries that belong to no channel."""
        return min(self.channel, default=0) < 0


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are removed everywhere they appear, or nowhere."""

    name: str
    """The first layer that makes them."""
    size: int
    places: tuple[Place, ...]

    def __hash__(self) -> int:
        # Not of all places: their channels are thousands of numbers, and tuples of groups are keys.
        return hash((self.name, self.size))

    def places_with(self, *roles: Role) -> tuple[Place, ...]:
        """Return the places with these roles."""
        found = []
        for place in self.places:
            if place.role in roles:
                found.append(place)
        return tuple(found)


@lru_cache(maxsize=4096)
def intern_group(group: ChannelGroup) -> ChannelGroup:
    """Return the first group that was equal to this one, so that equal groups are one object.

    Tuples of groups are keys, and comparing an object with itself takes no time.
    """
    return group


# ---- from channels to masks ----------------------------------------------------------------------


def complete_channels(groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor]) -> Channels:
    """Return which channels are kept as booleans, for every group.

    Raises:
        InputError: A group does not exist, has another length, or would have no channel left.
    """
    sizes = {group.name: group.size for group in groups}
    for name, kept in channels.items():
        if name not in sizes:
            raise unknown("group of channels", name, sizes)
        given = tuple(kept.shape)
        expected = (sizes[name],)
        check(given == expected, f"the shape of channels '{name}'", given, f"{expected}")
        if not bool(kept.any()):
            raise InputError(
                f"all {sizes[name]} channels of group '{name}' would be removed; at least one must "
                "be kept: keep the best."
            )
    complete: Channels = {}
    for name, size in sizes.items():
        if name in channels:
            complete[name] = channels[name].bool()
        else:
            complete[name] = torch.ones(size, dtype=torch.bool)
    return complete


def is_whole(channels: Mapping[str, Tensor]) -> bool:
    """Return whether no channel is missing from any group."""
    return all(bool(kept.all()) for kept in channels.values())


def make_channels_key(channels: Mapping[str, Tensor]) -> tuple[tuple[str, bytes], ...]:
    """Return a key that is equal for equal channels."""
    pairs = []
    for name, kept in channels.items():
        pairs.append((name, kept.bool().cpu().numpy().tobytes()))
    return tuple(pairs)


def find_kept_entries(place: Place, kept: Tensor) -> Tensor:
    """Return which entries along a dimension are kept with their channels."""
    if place.is_all(len(kept)):
        return kept
    channel = place.index.to(kept.device)
    if not place.has_others:
        return kept[channel]
    # Entries of no channel (-1) are always kept; the clamp only keeps the look-up in range.
    return torch.where(channel < 0, True, kept[channel.clamp_min(0)])


def collect_kept_entries(
    groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor], buffers: bool
) -> dict[str, dict[int, Tensor]]:
    """Return which entries of each tensor's dimensions the kept channels leave."""
    kept: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        if group.name not in channels:
            continue
        for place in group.places:
            if place.role == "statistic" and not buffers:
                continue
            dims = kept.setdefault(place.tensor, {})
            entries = find_kept_entries(place, channels[group.name])
            if place.dim in dims:
                # Two groups meet in one dimension where a concatenation joins their channels.
                entries = dims[place.dim] & entries
            dims[place.dim] = entries
    return kept


def expand_channels(
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    channels: Mapping[str, Tensor],
    buffers: bool = False,
) -> Mask:
    """Return the mask that removes everything with the channels that are not kept.

    That is filters, biases, norm scales *and shifts* (a shift that is left would still reach the
    next layer), and the inputs of later layers.

    Args:
        groups: The groups of the network.
        shapes: The shapes of its tensors.
        channels: Group name -> which channels are kept.
        buffers: Whether to include running statistics.

    Returns:
        A mask of every tensor of ``shapes`` that the given groups reach.
    """
    complete = complete_channels(groups, channels)
    named = trees.pick(complete, channels)
    mask: Mask = {}
    for name, dims in collect_kept_entries(groups, named, buffers).items():
        if name not in shapes:
            continue
        shape = shapes[name]
        leaf: Tensor | None = None
        for dim, entries in dims.items():
            line = _broadcast_along(entries, dim, len(shape))
            leaf = line if leaf is None else trees.and_masks(leaf, line)
        assert leaf is not None, f"{name} is reached in no dimension"
        # A copy in any case: the caller may write into the mask.
        mask[name] = leaf.expand(shape).clone(memory_format=torch.contiguous_format)
    return mask


def _broadcast_along(entries: Tensor, dim: int, dims: int) -> Tensor:
    """Shape entries of one dimension so that they broadcast along all others."""
    view = [1] * dims
    view[dim] = -1
    return entries.view(view)


def drop_removed(
    mask: Mapping[str, Tensor], groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor]
) -> Mask:
    """Return a mask without everything that is removed with channels: ``kept & expanded[name]``.

    Leaves that lose nothing may be those of the mask itself.
    """
    complete = complete_channels(groups, channels)
    entries_of = collect_kept_entries(groups, trees.pick(complete, channels), buffers=False)
    less: Mask = {}
    for name, kept in mask.items():
        for dim, entries in entries_of.get(name, {}).items():
            # Dimension by dimension: the mask of the channels need not be made.
            kept = trees.and_masks(kept, _broadcast_along(entries, dim, kept.dim()))
        less[name] = kept
    return less


# ---- from masks to channels ----------------------------------------------------------------------


def read_channels(
    groups: Sequence[ChannelGroup], mask: Mapping[str, Tensor] | None
) -> Channels | None:
    """Return which channels a mask keeps: those with a parameter entry left. None if all.

    Inside the channels that are kept the mask may prune single weights; these do not count here. A
    parameter that the mask does not name is whole, so its channels are kept.
    """
    if mask is None or not may_remove_channels(mask):
        return None
    channels = {group.name: _find_alive(group, mask) for group in groups}
    if is_whole(channels):
        return None
    return channels


def may_remove_channels(mask: Mapping[str, Tensor]) -> bool:
    """Test quickly whether a mask can remove channels: a bias or norm scale must be pruned too.

    (A network without a single vector always fails the test, and trains masked.)
    """
    return any(leaf.dim() == 1 and not bool(leaf.all()) for leaf in mask.values())


def find_channels_with_filters(group: ChannelGroup, mask: Mapping[str, Tensor]) -> Tensor:
    """Return which channels have a filter weight left; all, if the mask does not name a filter."""
    return _find_alive_in(group.size, group.places_with("filter"), mask)


def _find_alive(group: ChannelGroup, mask: Mapping[str, Tensor]) -> Tensor:
    """Return which channels have an entry left in any parameter."""
    parameters = group.places_with("filter", "bias", "scale", "shift", "input")
    return _find_alive_in(group.size, parameters, mask)


def _find_alive_in(size: int, places: Sequence[Place], mask: Mapping[str, Tensor]) -> Tensor:
    """Return which channels have an entry left in these places; all, if the mask lacks one."""
    if any(place.tensor not in mask for place in places):
        return torch.ones(size, dtype=torch.bool)
    alive = torch.zeros(size, dtype=torch.bool)
    # Vectors first: they are quick, and decide most cases.
    for place in sorted(places, key=lambda place: mask[place.tensor].numel()):
        left = trees.any_along(mask[place.tensor].cpu(), place.dim)
        if place.is_all(size):
            alive |= left
        else:
            # Entries of no channel (-1) do not count.
            alive[place.index[left & (place.index >= 0)]] = True
        if bool(alive.all()):
            break
    return alive


__getattr__ = find_old_names(__name__)
