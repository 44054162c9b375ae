"""Groups of channels that fall together, as plain data, and the masks that remove whole channels.

A channel is one output of a layer: a filter of a convolution, a unit of a linear layer. With it
fall its bias, the scale and shift of the norms behind it, and what later layers read of it; a
residual sum ties the channels of several layers to each other.
:func:`fedgrove.channels.find.groups_of` finds these groups for a network.
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
from ..trees import Mask

Role = Literal["filter", "bias", "scale", "shift", "statistic", "input"]
"""What a tensor does with a channel.

``filter`` and ``bias`` make it, ``scale``, ``shift`` and ``statistic`` (running mean and variance)
normalise it, ``input`` is a later layer's weight that reads it.
"""
Channels = dict[str, Tensor]
"""Group name -> booleans, one per channel: True is kept. A group that is not named is whole."""


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
        """``channel`` as a tensor."""
        return torch.tensor(self.channel)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether entry ``i`` belongs to channel ``i``, as in most layers."""
        return self.channel == tuple(range(len(self.channel)))

    def is_all(self, size: int) -> bool:
        """Whether its entries are a group's ``size`` channels, each once and in order."""
        return len(self.channel) == size and self.is_in_order

    @cached_property
    def has_others(self) -> bool:
        """Whether there are entries that belong to no channel."""
        return any(number < 0 for number in self.channel)


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

    def within(self, *roles: Role) -> tuple[Place, ...]:
        """The places with these roles."""
        return tuple(place for place in self.places if place.role in roles)


@lru_cache(maxsize=4096)
def interned(group: ChannelGroup) -> ChannelGroup:
    """The first group that was equal to this one, so that equal groups are one object.

    Tuples of them are keys, and an object is compared with itself at once.
    """
    return group


# ---- from channels to masks ----------------------------------------------------------------------


def checked(groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor]) -> Channels:
    """The channels as booleans, for every group.

    Refuses a group that does not exist, a wrong length, and a choice that leaves a group empty.
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
                f"all {sizes[name]} channels of group '{name}' are to go; at least one must stay: "
                "keep the best."
            )
    complete: Channels = {}
    for name, size in sizes.items():
        if name in channels:
            complete[name] = channels[name].bool()
        else:
            complete[name] = torch.ones(size, dtype=torch.bool)
    return complete


def along(place: Place, kept: Tensor) -> Tensor:
    """Which entries along the place's dimension stay."""
    if place.is_all(len(kept)):
        return kept
    channel = place.index.to(kept.device)
    if not place.has_others:
        return kept[channel]
    # Entries of no channel (-1) always stay; the clamp only keeps the look-up in range.
    return torch.where(channel < 0, True, kept[channel.clamp_min(0)])


def keeps(
    groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor], buffers: bool
) -> dict[str, dict[int, Tensor]]:
    """Tensor -> dimension -> which entries stay, for every tensor that the named groups reach."""
    stays: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        if group.name not in channels:
            continue
        for place in group.places:
            if place.role == "statistic" and not buffers:
                continue
            dims = stays.setdefault(place.tensor, {})
            entries = along(place, channels[group.name])
            if place.dim in dims:
                # Two groups meet in one dimension where a concatenation joins their channels.
                entries = dims[place.dim] & entries
            dims[place.dim] = entries
    return stays


def expand(
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    channels: Mapping[str, Tensor],
    buffers: bool = False,
) -> Mask:
    """The mask of all that falls with the removed channels.

    That is filters, biases, norm scales *and shifts* (a shift that is left would still reach the
    next layer), and the inputs of later layers. The mask names every tensor of ``shapes`` that the
    given groups reach; running statistics only with ``buffers``.
    """
    complete = checked(groups, channels)
    named = {name: complete[name] for name in channels}
    mask: Mask = {}
    for name, dims in keeps(groups, named, buffers).items():
        if name not in shapes:
            continue
        shape = shapes[name]
        leaf: Tensor | None = None
        for dim, entries in dims.items():
            line = _line(entries, dim, len(shape))
            leaf = line if leaf is None else trees.and_masks(leaf, line)
        assert leaf is not None, f"{name} is reached in no dimension"
        # A copy in any case: whoever gets the mask may write into it.
        mask[name] = leaf.expand(shape).clone(memory_format=torch.contiguous_format)
    return mask


def _line(entries: Tensor, dim: int, dims: int) -> Tensor:
    """Entries along one dimension as a column, row, ... that broadcasts along all others."""
    view = [1] * dims
    view[dim] = -1
    return entries.view(view)


def without_removed(
    mask: Mapping[str, Tensor], groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor]
) -> Mask:
    """A mask less all that falls with the removed channels: ``kept & expand(...)[name]``.

    Leaves that lose nothing may be those of the mask itself.
    """
    complete = checked(groups, channels)
    stays = keeps(groups, {name: complete[name] for name in channels}, buffers=False)
    less: Mask = {}
    for name, kept in mask.items():
        for dim, entries in stays.get(name, {}).items():
            # Line by line: the mask of the channels need not be written down.
            kept = trees.and_masks(kept, _line(entries, dim, kept.dim()))
        less[name] = kept
    return less


# ---- from masks to channels ----------------------------------------------------------------------


def channels_of(
    groups: Sequence[ChannelGroup], mask: Mapping[str, Tensor] | None
) -> Channels | None:
    """Which channels a mask leaves: those with a parameter entry left. None if it leaves all.

    Inside the channels that stay the mask may prune single weights; these do not count here. A
    parameter that the mask does not name is whole, and keeps its channels alive.
    """
    if mask is None or not may_remove_channels(mask):
        return None
    channels = {group.name: _alive(group, mask) for group in groups}
    nothing_removed = all(bool(kept.all()) for kept in channels.values())
    return None if nothing_removed else channels


def may_remove_channels(mask: Mapping[str, Tensor]) -> bool:
    """A quick test that spares most masks the full one: a bias or norm scale must be pruned too.

    (A network without a single vector always fails it, and trains masked.)
    """
    return any(leaf.dim() == 1 and not bool(leaf.all()) for leaf in mask.values())


def has_filters(group: ChannelGroup, mask: Mapping[str, Tensor]) -> Tensor:
    """Which channels of a group have a filter weight left; all, if the mask lacks a filter."""
    filters = group.within("filter")
    if any(place.tensor not in mask for place in filters):
        return torch.ones(group.size, dtype=torch.bool)
    alive = torch.zeros(group.size, dtype=torch.bool)
    for place in filters:
        _note_alive(alive, place, mask[place.tensor])
    return alive


def _alive(group: ChannelGroup, mask: Mapping[str, Tensor]) -> Tensor:
    """Which channels have an entry left."""
    alive = torch.zeros(group.size, dtype=torch.bool)
    parameters = [place for place in group.places if place.role != "statistic"]
    for place in parameters:
        if place.tensor not in mask:
            return torch.ones_like(alive)
    # Vectors first: they are cheap and decide most cases.
    parameters.sort(key=lambda place: mask[place.tensor].numel())
    for place in parameters:
        _note_alive(alive, place, mask[place.tensor])
        if bool(alive.all()):
            break
    return alive


def _note_alive(alive: Tensor, place: Place, mask: Tensor) -> None:
    """Channels that have an entry left in one place are alive."""
    left = trees.any_along(mask.cpu(), place.dim)
    if place.is_all(len(alive)):
        alive |= left
    else:
        # Entries of no channel (-1) do not count.
        alive[place.index[left & (place.index >= 0)]] = True
