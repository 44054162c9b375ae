"""Sub-models: what a client trains when it has only some of a network's channels.

A server that averages sub-models must know which tensors a channel reaches.
:func:`groups_to_plain` writes the groups down as plain data, which a method's state may hold;
:func:`groups_from_plain` reads them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .. import trees
from ..core import Carry, Client, ExpectedPacket, ExpectedReport, Outcome, Packet, Report
from ..errors import check
from ..nets import Net
from ..nets.layout import Layout
from ..trees import Mask, Tree
from .choice import Slim, nested
from .find import channel_mask, groups_of
from .groups import ChannelGroup, Channels, Place, Role, has_filters, interned
from .mask_cache import found, shared_mask
from .widths import largest_that_fits

if TYPE_CHECKING:
    from ..parts.aggregate import Average, Averaging
    from ..parts.local import LocalTraining

PlainPlace = tuple[str, int, Tensor, str, float]
"""A place as plain data: tensor, dimension, channels, role, fill."""
PlainGroups = tuple[tuple[str, int, tuple[PlainPlace, ...]], ...]
"""Groups as plain data: name, size, places."""
Score = Callable[[Mapping[str, Tensor], Sequence[ChannelGroup]], Tree]


def groups_to_plain(groups: Sequence[ChannelGroup]) -> PlainGroups:
    """The groups as a method's state may hold them."""
    plain = []
    for group in groups:
        places: list[PlainPlace] = []
        for p in group.places:
            places.append((p.tensor, p.dim, torch.tensor(p.channel), p.role, p.fill))
        plain.append((group.name, group.size, tuple(places)))
    return tuple(plain)


# Tensors hash by identity, and a state keeps its own: the same state is read once.
@lru_cache(maxsize=64)
def groups_from_plain(plain: PlainGroups) -> tuple[ChannelGroup, ...]:
    """The inverse of :func:`groups_to_plain`."""
    groups = []
    for name, size, plain_places in plain:
        places: list[Place] = []
        for tensor, dim, channel, role, fill in plain_places:
            places.append(Place(tensor, dim, tuple(channel.tolist()), cast(Role, role), fill))
        groups.append(interned(ChannelGroup(name, size, tuple(places))))
    return tuple(groups)


def every(groups: Sequence[ChannelGroup]) -> Channels:
    """All channels of all groups."""
    return {group.name: torch.ones(group.size, dtype=torch.bool) for group in groups}


def is_whole(channels: Mapping[str, Tensor]) -> bool:
    """Whether no channel is missing."""
    return all(bool(kept.all()) for kept in channels.values())


def size_at(net: Net, share: float) -> int:
    """Parameters of the net with the same share of channels in every group.

    What a byte formula can know before training.
    """
    mask = channel_mask(net, nested(groups_of(net), share))
    return net.layout.size - sum(int((~kept).sum()) for kept in mask.values())


# ---- the server ----------------------------------------------------------------------------------


def shapes_of(tree: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf."""
    return {name: tuple(leaf.shape) for name, leaf in tree.items()}


def cut_out(
    model: Tree, groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor] | None
) -> Packet:
    """The part of a model that lies in these channels.

    The whole model, without a mask, if none is missing.
    """
    if channels is None or is_whole(channels):
        return Packet(model)
    mask = shared_mask(groups, shapes_of(model), channels)
    return Packet(trees.apply_mask(model, mask), mask)


def channels_in(packet: Packet, groups: Sequence[ChannelGroup]) -> Channels:
    """The channels of a received sub-model: those of which its mask leaves a filter anything.

    (Only filters are looked at: norm layers may have stayed on the client.)
    """
    mask = packet.mask or {}

    def find() -> Channels:
        return {group.name: has_filters(group, mask) for group in groups}

    channels = found("filters", groups, mask, find)
    assert channels is not None
    return channels


def infilled(packet: Packet, model: Tree, groups: Sequence[ChannelGroup]) -> Tree:
    r"""A sub-model in full width, with the server's own values in the channels it lacks.

    :math:`w_i = \hat w_i + w \odot (1 - M_i)` (FedMP's R2SP; FedAPTA, Eq. 3): :math:`\hat w_i`,
    :math:`M_i` -> ``packet``, :math:`w` -> ``model``.
    """
    channels = channels_in(packet, groups)
    if is_whole(channels):
        return packet.values
    # Running statistics too: those of a removed channel are not the client's.
    mask = shared_mask(groups, shapes_of(packet.values), channels, buffers=True)
    whole: Tree = {}
    for name, leaf in packet.values.items():
        if name in mask:
            # Whole channels come in runs, where torch.where is as quick as :func:`trees.where`.
            leaf = torch.where(mask[name], leaf, model[name])
        whole[name] = leaf
    return whole


def mean_of(
    previous: Tree, reports: Iterable[Report], groups: Sequence[ChannelGroup], rule: Averaging
) -> Tree:
    """Every parameter averaged by a rule over the clients that have it.

    Where none has it, the previous value.
    """
    mean = rule.start(previous)
    for report in reports:
        add(mean, report.give["model"], groups, report.examples)
    return mean.value()


def add(mean: Average, packet: Packet, groups: Sequence[ChannelGroup], weight: float) -> Channels:
    """Add a sub-model to a mean; returns its channels.

    Running statistics count wherever the channel is there.
    """
    channels = channels_in(packet, groups)
    if is_whole(channels):
        mean.add(packet.values, weight)
    else:
        mask = shared_mask(groups, shapes_of(packet.values), channels, buffers=True)
        mean.add(packet.values, weight, mask)
    return channels


# ---- a client ------------------------------------------------------------------------------------


def own(carry: Carry, client: Client) -> Carry:
    """``carry["model"]`` becomes the client's own sub-model, under the mask of its channels.

    It is made of what the client received, then what it keeps, then the network's initial
    parameters. A client that lost its channels takes those it was sent.
    """
    received = carry.get("model", {})
    kept = carry.get("personal", {})
    complete = {**client.start, **kept, **received}
    received_mask = carry.get("model.mask")
    channels = carry.get("channels")
    if channels is None and received_mask:
        channels = channels_in(Packet({}, received_mask), groups_of(client.net))
    mask = mask_of(client, channels)
    model = trees.pick(complete, client.layout.shapes)

    next_carry = {name: tree for name, tree in carry.items() if name != "model.mask"}
    if not mask:
        next_carry["model"] = model
    else:
        next_carry["model"] = trees.apply_mask(model, mask)
        next_carry["model.mask"] = mask
    return next_carry


def mask_of(client: Client, channels: Mapping[str, Tensor] | None) -> Mask | None:
    """The mask of a client's channels, not to be written into; None if it has them all."""
    if channels is None or is_whole(channels):
        return None
    return shared_mask(groups_of(client.net), client.net.layout.shapes, channels)


def travels(layout: Layout, head: bool) -> list[str]:
    """The names of what is shared of a sub-model: all but the norm layers.

    Without ``head``, the last layer stays on the client too.
    """
    allowed = "true where a network has no last linear layer to keep"
    check(head or bool(layout.head), "share_head", head, allowed)
    stays = set(layout.norms)
    if not head:
        stays.update(layout.head)
    return [name for name in layout.shapes if name not in stays]


def expected_submodel(net: Net, head: bool) -> ExpectedReport:
    """What a client sends of its sub-model: what is shared, under a mask of its own."""
    shared = trees.pick(net.blank(), travels(net.layout, head))
    return ExpectedReport({"model": ExpectedPacket.of(shared, "own")})


def share_submodel(carry: Carry, client: Client, head: bool) -> Outcome:
    """Send what is shared, under its mask; keep the whole sub-model."""
    shared = trees.pick(carry["local"], travels(client.layout, head))
    packet = masked_packet(shared, carry.get("model.mask"))
    return Outcome({"model": packet}, memory={"personal": carry["local"]})


def masked_packet(values: Tree, mask: Mask | None) -> Packet:
    """Values with the part of the mask that names them; without a mask if there is none."""
    if not mask:
        return Packet(values)
    return Packet(values, {name: leaf for name, leaf in mask.items() if name in values})


def slim(
    carry: Carry,
    client: Client,
    score: Score,
    density: float,
    recipe: LocalTraining | None = None,
    left: Mapping[str, Tensor] | None = None,
) -> Carry:
    """Network slimming of ``carry["guided"]``.

    ``carry["channels"]`` become those that stay, ``carry["slim.mask"]`` their mask. With a
    ``recipe``, no more of them than the client's device can hold while it trains by it. With
    ``left``, no channel but those. The density is of all channels of the net, whatever is left.
    Groups without a score stay whole.
    """
    groups = groups_of(client.net)
    # Compared in single precision, so that rounding in the last place cannot decide between
    # equals.
    scores = {name: s.float() for name, s in score(carry["guided"], groups).items()}
    possible = every(groups) if left is None else dict(left)
    for name in scores:
        # Behind every channel that is left, whatever its score: also one of score 0.
        gone = ~possible[name].to(scores[name].device)
        scores[name] = scores[name].masked_fill(gone, -torch.inf)

    def choose(density: float) -> Channels:
        # A density above that of what is left would take in channels that are gone.
        best = Slim()(scores, density)
        return {**possible, **{name: kept & possible[name] for name, kept in best.items()}}

    if recipe is None:
        channels = choose(density)
    else:
        slots = recipe.optimiser.slots
        channels = largest_that_fits(client.info, client.net, choose, density, recipe.batch, slots)
    return {**carry, "channels": channels, "slim.mask": mask_of(client, channels) or {}}


def recovered(carry: Carry, client: Client) -> Tree:
    """The client's model in full width.

    ``tuned`` where a channel stays; restored channels are as they were before they were pruned
    (``guided``), but for the scale of their norm, which is 0.

    The shift stays: behind a scale and a shift of 0 no gradient passes a ReLU, and no channel could
    ever come back.
    """
    groups = groups_of(client.net)
    mask = shared_mask(groups, client.layout.shapes, carry["channels"], buffers=True)
    scale_masks = {name: leaf for name, leaf in mask.items() if name in client.layout.scales}
    before = trees.apply_mask(carry["guided"], scale_masks)
    model: Tree = {}
    for name, leaf in carry["tuned"].items():
        if name in mask:
            leaf = torch.where(mask[name], leaf, before[name])
        model[name] = leaf
    return model
