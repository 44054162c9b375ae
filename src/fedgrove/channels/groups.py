"""Which channels fall together: groups of coupled channels, and the masks that take whole channels away.

A channel is one output of a layer: a filter of a convolution, a unit of a linear layer. With it fall its bias, the
scale and shift of the norms behind it, and what later layers do with it; a residual sum ties the channels of several
layers to each other. torch-pruning's dependency graph finds these ties, once per network; here they become plain data.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..errors import InputError, check, unknown
from ..trees import Mask

Role = Literal["filter", "bias", "scale", "shift", "statistic", "input"]
"""What a tensor does with a channel: make it, shift it, normalise it (scale, shift, running statistics), read it."""
Channels = dict[str, Tensor]
"""ChannelGroup name -> booleans, one per channel: True is kept. A group that is not named is whole."""


@dataclass(frozen=True)
class Place:
    """One dimension of one tensor: its entry ``i`` falls with channel ``channel[i]``; with none where that is -1."""

    tensor: str
    dim: int
    channel: tuple[int, ...]
    role: Role
    fill: float = 0.0
    """What stands where a channel was removed: 0, and 1 in a running variance."""

    @cached_property
    def index(self) -> Tensor:
        """``channel`` as a tensor."""
        return torch.tensor(self.channel)


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are removed in all the places they appear in, or in none."""

    name: str
    """The first layer that makes them."""
    size: int
    places: tuple[Place, ...]

    def within(self, *roles: Role) -> tuple[Place, ...]:
        """The places with these roles."""
        return tuple(p for p in self.places if p.role in roles)


# ---- channels and masks ---------------------------------------------------------------------------------------------


def checked(groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor]) -> Channels:
    """The channels as booleans, for every group; a sentence where they do not fit or leave a group empty."""
    sizes = {g.name: g.size for g in groups}
    for name, kept in channels.items():
        if name not in sizes:
            raise unknown("group of channels", name, sizes)
        check(
            tuple(kept.shape) == (sizes[name],),
            f"the shape of channels '{name}'",
            tuple(kept.shape),
            f"{(sizes[name],)}",
        )
        if not bool(kept.any()):
            raise InputError(
                f"all {sizes[name]} channels of group '{name}' are to go; at least one must stay: keep the best."
            )
    return {name: _kept(channels, name, size) for name, size in sizes.items()}


def _kept(channels: Mapping[str, Tensor], name: str, size: int) -> Tensor:
    return channels[name].bool() if name in channels else torch.ones(size, dtype=torch.bool)


def along(place: Place, kept: Tensor) -> Tensor:
    """Which entries along the place's dimension stay."""
    channel = place.index.to(kept.device)
    return torch.where(channel < 0, True, kept[channel.clamp_min(0)])


def keeps(
    groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor], buffers: bool
) -> dict[str, dict[int, Tensor]]:
    """Tensor -> dimension -> which entries stay, for every tensor that the named groups reach."""
    found: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        if group.name not in channels:
            continue
        for place in group.places:
            if place.role == "statistic" and not buffers:
                continue
            dims = found.setdefault(place.tensor, {})
            stay = along(place, channels[group.name])
            dims[place.dim] = dims[place.dim] & stay if place.dim in dims else stay
    return found


def expand(
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    channels: Mapping[str, Tensor],
    buffers: bool = False,
) -> Mask:
    """The mask of all that falls with the removed channels: filters, biases, norm scale and shift, later inputs.

    It names every tensor of ``shapes`` that the given groups reach; running statistics only with ``buffers``.
    """
    whole = checked(groups, channels)
    mask: Mask = {}
    for name, dims in keeps(groups, {k: whole[k] for k in channels}, buffers).items():
        if name not in shapes:
            continue
        rank = len(shapes[name])
        each = [
            stay.view([-1 if d == dim else 1 for d in range(rank)]) for dim, stay in dims.items()
        ]
        mask[name] = reduce(torch.logical_and, each).expand(shapes[name]).contiguous()
    return mask


def channels_of(
    groups: Sequence[ChannelGroup], mask: Mapping[str, Tensor] | None
) -> Channels | None:
    """The whole channels that a mask removes: those of which no parameter entry is left. None if there is none.

    Inside the channels that stay the mask may prune single weights; these say nothing here. A parameter that the mask
    does not name is whole, and keeps its channels alive.
    """
    if mask is None or not may_remove_channels(mask):
        return None
    found = {g.name: _alive(g, mask) for g in groups}
    return None if all(bool(kept.all()) for kept in found.values()) else found


def may_remove_channels(mask: Mapping[str, Tensor]) -> bool:
    """Whether a mask can remove whole channels, at a glance: a bias or a norm scale must fall too.

    (A network without a single vector is not looked at, and trains masked.)
    """
    return any(m.dim() == 1 and not bool(m.all()) for m in mask.values())


def _alive(group: ChannelGroup, mask: Mapping[str, Tensor]) -> Tensor:
    """Which channels have something left; vectors are looked at first, since they decide most cases."""
    alive = torch.zeros(group.size, dtype=torch.bool)
    places = [p for p in group.places if p.role != "statistic"]
    for place in sorted(places, key=lambda p: mask[p.tensor].numel() if p.tensor in mask else 0):
        if place.tensor not in mask:
            return torch.ones_like(alive)
        kept, channel = mask[place.tensor].bool().cpu(), place.index
        dead = ((channel >= 0) & ~alive[channel.clamp_min(0)]).nonzero().flatten()
        left = kept.index_select(place.dim, dead)
        if bool(left.any()):
            others = [d for d in range(left.dim()) if d != place.dim]
            alive[channel[dead[left.any(dim=others) if others else left]]] = True
        if bool(alive.all()):
            break
    return alive


# ---- torch-pruning behind our words ---------------------------------------------------------------------------------


def trace(
    module: nn.Module, shape: tuple[int, ...], names: Mapping[int, str], order: Sequence[str]
) -> tuple[ChannelGroup, ...]:
    """The groups of a network, in the order in which their first layers run; the network's output is in none.

    ``names``: id of a tensor of ``module`` -> its name; ``order``: the layers as they run. Groups that pass through a
    layer whose channels cannot be told apart (LayerNorm, recurrent layers, grouped convolutions) are left out.
    The module is traced in place: give a copy.
    """
    graph = _graph(module, shape)
    place_of = {name: i for i, name in enumerate(order)}
    label = {m: name for name, m in module.named_modules()}
    found = [_group(items, graph, label, names, place_of) for items in graph.get_all_groups()]
    ordered = sorted((g for g in found if g is not None), key=lambda g: place_of[g.name])
    return tuple(ordered)


def _graph(module: nn.Module, shape: tuple[int, ...]) -> Any:
    pruning: Any = importlib.import_module("torch_pruning")
    module.requires_grad_(True).eval()
    like = next(module.parameters())
    x = torch.zeros((1, *shape), dtype=like.dtype, device=like.device)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pruning.DependencyGraph().build_dependency(module, x, verbose=False)
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise InputError(
            f"the channels of {type(module).__name__} could not be followed, {type(error).__name__}: {reason}; write"
            " its forward pass with plain tensor operations, or use a method that prunes no channels."
        ) from error


class _Spot(NamedTuple):
    """A tensor of a module by its key there, and the dimension that falls."""

    key: str
    dim: int
    role: Role
    fill: float = 0.0


FILTERS = (_Spot("weight", 0, "filter"), _Spot("bias", 0, "bias"))
NORM = (_Spot("weight", 0, "scale"), _Spot("bias", 0, "shift"))
STATISTICS = (_Spot("running_mean", 0, "statistic"), _Spot("running_var", 0, "statistic", 1.0))


def _group(
    items: Any,
    graph: Any,
    label: Mapping[nn.Module, str],
    names: Mapping[int, str],
    order: Mapping[str, int],
) -> ChannelGroup | None:
    """One group as plain data; None where it must stay whole."""
    places: dict[tuple[str, int], Place] = {}
    makers: list[str] = []
    for item in items:
        part, out = item.dep.target.module, graph.is_out_channel_pruning_fn(item.dep.handler)
        spots = _spots(part, out) if part in label else None if _fixed(part) else ()
        if spots is None:
            return None
        if out and any(spot.role == "filter" for spot in spots):
            makers.append(label[part])
        for spot in spots:
            tensor = getattr(part, spot.key, None)
            if tensor is None or id(tensor) not in names:
                continue
            if not _note(places, names[id(tensor)], tensor.shape[spot.dim], spot, item):
                return None
    return ChannelGroup(
        min(makers, key=lambda name: order[name]), len(items[0].idxs), tuple(places.values())
    )


def _fixed(part: Any) -> bool:
    """The network's output, and parameters that belong to no layer we know."""
    return isinstance(part, nn.Parameter) or type(part).__name__ == "_OutputOp"


def _spots(part: nn.Module, out: bool) -> tuple[_Spot, ...] | None:
    """What falls in a module with an output (or an input); None if its channels are not independent."""
    match part:
        case _ConvTransposeNd() if part.groups == 1:
            return (
                (_Spot("weight", 1, "filter"), FILTERS[1])
                if out
                else (_Spot("weight", 0, "input"),)
            )
        case _ConvNd() | nn.Linear() if getattr(part, "groups", 1) == 1:
            return FILTERS if out else (_Spot("weight", 1, "input"),)
        case _ConvNd() if part.groups == part.in_channels == part.out_channels:
            return FILTERS  # each channel by itself: what reads it makes it
        case _NormBase():
            return NORM + STATISTICS
        case nn.GroupNorm() if part.affine:
            return NORM
        case _:
            return None if [*part.parameters(), *part.buffers()] else ()


def _note(
    places: dict[tuple[str, int], Place], name: str, length: int, spot: _Spot, item: Any
) -> bool:
    """Write down with which channel each entry of a tensor falls; what is met twice is joined.

    False where an entry does not exist, or falls with two channels: the forward pass mixes them.
    """
    old = places.get((name, spot.dim))
    channel = list(old.channel) if old else [-1] * length
    for i, root in zip(item.idxs, item.root_idxs, strict=True):
        if i >= length or channel[i] not in (-1, root):
            return False
        channel[i] = root
    places[name, spot.dim] = Place(name, spot.dim, tuple(channel), spot.role, spot.fill)
    return True
