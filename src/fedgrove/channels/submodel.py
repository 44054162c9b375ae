"""Sub-models: what a client trains when it has only some of a network's channels.

A server that averages sub-models must know which tensors a channel reaches.
:func:`groups_to_plain` converts the groups to plain data, which a method's state may contain;
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
from ..renamed import find_old_names
from ..trees import Mask, Tree
from .find_groups import find_groups, make_channel_mask
from .groups import (
    ChannelGroup,
    Channels,
    Place,
    Role,
    find_channels_with_filters,
    intern_group,
    is_whole,
)
from .mask_cache import find_once, get_shared_mask
from .selection import Slim, select_first
from .widths import choose_largest_that_fits

if TYPE_CHECKING:
    from ..parts.aggregate import Average, Averaging
    from ..parts.local import LocalTraining

PlainPlace = tuple[str, int, Tensor, str, float]
"""A place as plain data: tensor, dimension, channels, role, fill."""
PlainGroups = tuple[tuple[str, int, tuple[PlainPlace, ...]], ...]
"""Groups as plain data: name, size, places."""
Score = Callable[[Mapping[str, Tensor], Sequence[ChannelGroup]], Tree]


def groups_to_plain(groups: Sequence[ChannelGroup]) -> PlainGroups:
    """Convert channel groups to what a method's state may contain."""
    plain = []
    for group in groups:
        places: list[PlainPlace] = []
        for p in group.places:
            places.append((p.tensor, p.dim, torch.tensor(p.channel), p.role, p.fill))
        plain.append((group.name, group.size, tuple(places)))
    return tuple(plain)


# Cached: tensors hash by identity, so one state's groups are read once.
@lru_cache(maxsize=64)
def groups_from_plain(plain: PlainGroups) -> tuple[ChannelGroup, ...]:
    """Undo :func:`groups_to_plain`."""
    groups = []
    for name, size, plain_places in plain:
        places: list[Place] = []
        for tensor, dim, channel, role, fill in plain_places:
            places.append(Place(tensor, dim, tuple(channel.tolist()), cast(Role, role), fill))
        groups.append(intern_group(ChannelGroup(name, size, tuple(places))))
    return tuple(groups)


def all_channels(groups: Sequence[ChannelGroup]) -> Channels:
    """Return all channels of all groups."""
    channels = {}
    for group in groups:
        channels[group.name] = torch.ones(group.size, dtype=torch.bool)
    return channels


def count_params_at(net: Net, share: float) -> int:
    """Count the parameters of the net with the same share of channels in every group.

    This is what a formula for bytes can know before training.
    """
    mask = make_channel_mask(net, select_first(find_groups(net), share))
    return net.layout.size - sum(int((~kept).sum()) for kept in mask.values())


# ---- the server ----------------------------------------------------------------------------------


def get_shapes(tree: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every leaf before channels are removed."""
    return {name: tuple(leaf.shape) for name, leaf in tree.items()}


def extract_submodel(
    model: Tree, groups: Sequence[ChannelGroup], channels: Mapping[str, Tensor] | None
) -> Packet:
    """Return the part of a model that lies in these channels.

    The whole model, without a mask, if no channel is missing.
    """
    if channels is None or is_whole(channels):
        return Packet(model)
    mask = get_shared_mask(groups, get_shapes(model), channels)
    return Packet(trees.apply_mask(model, mask), mask)


def read_packet_channels(packet: Packet, groups: Sequence[ChannelGroup]) -> Channels:
    """Return the channels of a received sub-model: those with a filter weight under its mask.

    (Only filters count: norm layers may be local to the client.)
    """
    mask = packet.mask or {}

    def find() -> Channels:
        return {group.name: find_channels_with_filters(group, mask) for group in groups}

    channels = find_once("filters", groups, mask, find)
    assert channels is not None
    return channels


def fill_missing_channels(packet: Packet, model: Tree, groups: Sequence[ChannelGroup]) -> Tree:
    r"""Return a sub-model in full width, with the server's values in the channels it lacks.

    :math:`w_i = \hat w_i + w \odot (1 - M_i)` (FedMP's R2SP; FedAPTA, Eq. 3): :math:`\hat w_i`,
    :math:`M_i` -> ``packet``, :math:`w` -> ``model``.
    """
    channels = read_packet_channels(packet, groups)
    if is_whole(channels):
        return packet.values
    # Running statistics too: those of a removed channel are not the client's.
    mask = get_shared_mask(groups, get_shapes(packet.values), channels, buffers=True)
    whole: Tree = {}
    for name, leaf in packet.values.items():
        if name in mask:
            # Whole channels come in runs, where torch.where is as fast as :func:`trees.where`.
            leaf = torch.where(mask[name], leaf, model[name])
        whole[name] = leaf
    return whole


def average_submodels(
    previous: Tree, reports: Iterable[Report], groups: Sequence[ChannelGroup], rule: Averaging
) -> Tree:
    """Average every parameter by a rule over the clients that have it.

    Where no client has it, it keeps its previous value.
    """
    mean = rule.start(previous)
    for report in reports:
        add_submodel(mean, report.give["model"], groups, report.examples)
    return mean.value()


def add_submodel(
    mean: Average, packet: Packet, groups: Sequence[ChannelGroup], weight: float
) -> Channels:
    """Add a sub-model to a mean over clients, and return its channels.

    Running statistics count wherever the client has the channel.
    """
    channels = read_packet_channels(packet, groups)
    if is_whole(channels):
        mean.add(packet.values, weight)
    else:
        mask = get_shared_mask(groups, get_shapes(packet.values), channels, buffers=True)
        mean.add(packet.values, weight, mask)
    return channels


# ---- a client ------------------------------------------------------------------------------------


def restore_submodel(carry: Carry, client: Client) -> Carry:
    """Make ``carry["model"]`` the client's own sub-model, under the mask of its channels.

    It is made of what the client received, then what it remembers, then the network's initial
    parameters. A client that has forgotten its channels takes those it was sent.
    """
    received = carry.get("model", {})
    kept = carry.get("personal", {})
    complete = {**client.start, **kept, **received}
    received_mask = carry.get("model.mask")
    channels = carry.get("channels")
    if channels is None and received_mask:
        channels = read_packet_channels(Packet({}, received_mask), find_groups(client.net))
    mask = make_client_mask(client, channels)
    model = trees.pick(complete, client.layout.shapes)

    next_carry = dict(carry)
    next_carry.pop("model.mask", None)
    if not mask:
        next_carry["model"] = model
    else:
        next_carry["model"] = trees.apply_mask(model, mask)
        next_carry["model.mask"] = mask
    return next_carry


def make_client_mask(client: Client, channels: Mapping[str, Tensor] | None) -> Mask | None:
    """Return the mask of a client's channels, not to be written into; None if it has them all."""
    if channels is None or is_whole(channels):
        return None
    return get_shared_mask(find_groups(client.net), client.net.layout.shapes, channels)


def list_shared_tensors(layout: Layout, head: bool) -> list[str]:
    """List the shared tensors of a sub-model without some channels: all but the norm layers.

    Without ``head``, the last layer is local too.
    """
    allowed = "true where a network has no last linear layer to keep"
    check(head or bool(layout.head), "share_head", head, allowed)
    local = set(layout.norms)
    if not head:
        local.update(layout.head)
    weights, statistics = layout.without(local)
    return [*weights, *statistics]


def expected_submodel(net: Net, head: bool) -> ExpectedReport:
    """Declare what a client sends of its sub-model: what is shared, under its own mask."""
    shared = trees.pick(net.blank(), list_shared_tensors(net.layout, head))
    return ExpectedReport({"model": ExpectedPacket.of(shared, "own")})


def share_submodel(carry: Carry, client: Client, head: bool) -> Outcome:
    """Send the shared channels of a sub-model, under its mask; remember the whole sub-model."""
    shared = trees.pick(carry["local"], list_shared_tensors(client.layout, head))
    packet = make_masked_packet(shared, carry.get("model.mask"))
    return Outcome({"model": packet}, memory={"personal": carry["local"]})


def make_masked_packet(values: Tree, mask: Mask | None) -> Packet:
    """Pack a sub-model with the part of the channel mask that names it, if any."""
    if not mask:
        return Packet(values)
    return Packet(values, {name: leaf for name, leaf in mask.items() if name in values})


def slim_submodel(
    carry: Carry,
    client: Client,
    score: Score,
    density: float,
    recipe: LocalTraining | None = None,
    left: Mapping[str, Tensor] | None = None,
) -> Carry:
    """Select channels of ``carry["guided"]`` by network slimming.

    Args:
        carry: The client's trees.
        client: The client.
        score: Scores the channels; groups without a score keep all.
        density: The share to keep, of all channels of the net.
        recipe: With it, no more channels than fit the client's device while it trains.
        left: With it, only channels among these.

    Returns:
        The carry with ``channels``, those that are kept, and ``slim.mask``, their mask.
    """
    groups = find_groups(client.net)
    # Compared in single precision, so that rounding in the last digit cannot decide between equals.
    scores = trees.map(Tensor.float, score(carry["guided"], groups))
    if left is None:
        left = all_channels(groups)
    possible = dict(left)
    for name in scores:
        # Behind every channel that is left, whatever its score: also one of score 0.
        gone = ~possible[name].to(scores[name].device)
        scores[name] = scores[name].masked_fill(gone, -torch.inf)

    def choose(density: float) -> Channels:
        # A density above that of what is left would select channels that were removed.
        chosen = dict(possible)
        for name, kept in Slim()(scores, density).items():
            chosen[name] = kept & possible[name]
        return chosen

    if recipe is None:
        channels = choose(density)
    else:
        slots = recipe.optimiser.slots
        channels = choose_largest_that_fits(
            client.info, client.net, choose, density, recipe.batch, slots
        )
    return {**carry, "channels": channels, "slim.mask": make_client_mask(client, channels) or {}}


def restore_full_width(carry: Carry, client: Client) -> Tree:
    """Return the client's sub-model in full width, with all channels.

    ``tuned`` in the channels that are kept; removed channels are as before pruning (``guided``),
    except for the scale of their norm, which is 0.

    The shift stays: behind a scale and a shift of 0 no gradient passes a ReLU, and no channel could
    ever come back.
    """
    groups = find_groups(client.net)
    mask = get_shared_mask(groups, client.layout.shapes, carry["channels"], buffers=True)
    scale_masks = {name: leaf for name, leaf in mask.items() if name in client.layout.scales}
    before = trees.apply_mask(carry["guided"], scale_masks)
    model: Tree = {}
    for name, leaf in carry["tuned"].items():
        if name in mask:
            leaf = torch.where(mask[name], leaf, before[name])
        model[name] = leaf
    return model


__getattr__ = find_old_names(__name__)
