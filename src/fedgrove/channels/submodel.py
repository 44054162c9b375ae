"""Sub-models: what a client trains when it has only some of a network's channels.

A server that adds up sub-models must know which tensors a channel reaches. :func:`groups_to_plain` writes the groups of a layout
down as plain data, which a method's state may hold; :func:`groups_from_plain` reads them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from .. import trees
from ..core import Carry, Client, Outcome, Packet, Report
from ..errors import check
from ..nets.layout import Layout
from ..parts.local import LocalTraining
from ..trees import Mask, Tree
from .choice import Slim, nested
from .groups import ChannelGroup, Channels, Place, Role, expand
from .overlap import OverlapMean
from .widths import largest_that_fits

PlainGroups = tuple[tuple[str, int, tuple[tuple[str, int, Tensor, str, float], ...]], ...]
"""Groups as plain data: name, size, and of every place its tensor, dimension, channels, role and fill."""
Score = Callable[[Mapping[str, Tensor], Sequence[ChannelGroup]], Tree]


def groups_to_plain(groups: Sequence[ChannelGroup]) -> PlainGroups:
    """The groups as a method's state may hold them."""
    return tuple(
        (
            g.name,
            g.size,
            tuple((p.tensor, p.dim, torch.tensor(p.channel), p.role, p.fill) for p in g.places),
        )
        for g in groups
    )


@lru_cache(maxsize=64)  # a state keeps its tensors, by whose identity it is known here
def groups_from_plain(plain: PlainGroups) -> tuple[ChannelGroup, ...]:
    """The inverse of :func:`groups_to_plain`."""
    return tuple(
        ChannelGroup(
            name,
            size,
            tuple(
                Place(t, dim, tuple(c.tolist()), cast(Role, r), fill)
                for t, dim, c, r, fill in places
            ),
        )
        for name, size, places in plain
    )


def every(groups: Sequence[ChannelGroup]) -> Channels:
    """All channels of all groups."""
    return {g.name: torch.ones(g.size, dtype=torch.bool) for g in groups}


def is_whole(channels: Mapping[str, Tensor]) -> bool:
    """Whether no channel is missing."""
    return all(bool(kept.all()) for kept in channels.values())


def size_at(layout: Layout, share: float) -> int:
    """Parameters of the net with the same share of channels in every group: what a byte formula can know beforehand."""
    mask = layout.expand(nested(layout.groups, share))
    return layout.size - sum(int((~kept).sum()) for kept in mask.values())


# ---- the server -----------------------------------------------------------------------------------------------------


def shapes_of(tree: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf."""
    return {k: tuple(v.shape) for k, v in tree.items()}


def cut_out(
    model: Tree, groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor] | None
) -> Packet:
    """The part of a model that lies in these channels; the whole model, without a mask, where none is missing."""
    if channels is None or is_whole(channels):
        return Packet(model)
    mask = expand(groups, shapes_of(model), channels)
    return Packet(trees.masked(model, mask), mask)


def channels_in(packet: Packet, groups: Sequence[ChannelGroup]) -> Channels:
    """The channels of a sub-model that came back: those of which its mask leaves a filter anything.

    (Filters alone are asked: norm layers may have stayed at home.)
    """
    mask = packet.mask or {}
    return {g.name: _alive(g, mask) for g in groups}


def _alive(group: ChannelGroup, mask: Mapping[str, Tensor]) -> Tensor:
    filters = group.within("filter")
    if any(place.tensor not in mask for place in filters):
        return torch.ones(group.size, dtype=torch.bool)
    alive = torch.zeros(group.size, dtype=torch.bool)
    for place in filters:
        rows = mask[place.tensor].movedim(place.dim, 0).flatten(1).any(1)
        alive[place.index[rows]] = True
    return alive


def mean_of(previous: Tree, reports: Iterable[Report], groups: Sequence[ChannelGroup]) -> Tree:
    """Every parameter, weighted by examples, over the clients that have it; where none has it, the previous value."""
    mean = OverlapMean()
    for report in reports:
        add(mean, report.give["model"], groups, report.examples)
    return mean.value(previous)


def add(
    mean: OverlapMean, packet: Packet, groups: Sequence[ChannelGroup], weight: float
) -> Channels:
    """Take a sub-model into a mean; running statistics count where the channel is there. Returns its channels."""
    channels = channels_in(packet, groups)
    whole = is_whole(channels)
    mean.add(
        packet.values,
        None if whole else expand(groups, shapes_of(packet.values), channels, True),
        weight,
    )
    return channels


# ---- a client -------------------------------------------------------------------------------------------------------


def own(carry: Carry, client: Client) -> Carry:
    """The client's own sub-model: what it received in what it keeps, under the mask of its channels.

    Before it keeps anything, the network's initial parameters; a client that lost its channels has those it got.
    """
    whole, got = (
        {**client.start, **carry.get("personal", {}), **carry.get("model", {})},
        carry.get("model.mask"),
    )
    channels = (
        channels_in(Packet({}, got), client.layout.groups)
        if got and "channels" not in carry
        else carry.get("channels")
    )
    mask = mask_of(client, channels) or {}
    model = trees.masked({k: whole[k] for k in client.layout.shapes}, mask)
    rest = {k: v for k, v in carry.items() if k != "model.mask"}
    return {**rest, "model": model, **({"model.mask": mask} if mask else {})}


def mask_of(client: Client, channels: Mapping[str, Tensor] | None) -> Mask | None:
    """The mask of a client's channels; None where it has them all."""
    return None if channels is None or is_whole(channels) else client.layout.expand(channels)


def travels(layout: Layout, head: bool) -> list[str]:
    """What is shared of a sub-model: all but the norm layers and, unless it is to be, the last layer."""
    check(
        head or bool(layout.head),
        "share_head",
        head,
        "true where a network has no last linear layer to keep",
    )
    at_home = {*layout.norms, *(() if head else layout.head)}
    return [k for k in layout.shapes if k not in at_home]


def share_submodel(carry: Carry, client: Client, head: bool) -> Outcome:
    """What is shared travels, under its mask; the whole sub-model is kept."""
    packet = masked_packet(
        trees.pick(carry["local"], travels(client.layout, head)), carry.get("model.mask")
    )
    return Outcome({"model": packet}, memory={"personal": carry["local"]})


def masked_packet(values: Tree, mask: Mask | None) -> Packet:
    """Values with what the mask says of them; no mask where it says nothing."""
    return (
        Packet(values, {k: m for k, m in mask.items() if k in values}) if mask else Packet(values)
    )


def slim(
    carry: Carry, client: Client, score: Score, density: float, recipe: LocalTraining | None = None
) -> Carry:
    """Network slimming of ``carry["guided"]``: ``carry["channels"]`` are those that stay, under ``carry["slim.mask"]``.

    With a ``recipe``, no more of them than the client's device can hold while it trains by it. Scores are compared in
    single precision, so that rounding in the last place cannot decide between equals. Groups without a score stay
    whole.
    """
    groups = client.layout.groups
    scores = {k: s.float() for k, s in score(carry["guided"], groups).items()}

    def choose(density: float) -> Channels:
        return {**every(groups), **Slim()(scores, density)}

    if recipe is None:
        channels = choose(density)
    else:
        channels = largest_that_fits(
            client.info, client.layout, choose, density, recipe.batch, recipe.optimiser.slots
        )
    return {**carry, "channels": channels, "slim.mask": mask_of(client, channels) or {}}


def recovered(carry: Carry, client: Client) -> Tree:
    """The client's model in full width: ``tuned`` where a channel stays; restored channels are as they were before they
    were pruned (``guided``), but for the scale of their norm, which is 0.

    The shift stays: behind a scale and a shift of 0 no gradient passes a ReLU, and no channel could ever come back.
    """
    mask = expand(client.layout.groups, client.layout.shapes, carry["channels"], buffers=True)
    before = trees.masked(
        carry["guided"], {k: m for k, m in mask.items() if k in client.layout.scales}
    )
    return {
        k: torch.where(mask[k], v, before[k]) if k in mask else v for k, v in carry["tuned"].items()
    }
