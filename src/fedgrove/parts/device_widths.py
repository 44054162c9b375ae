"""Sub-models by device: what HeteroFL, FedRolex and FedDrop share.

Each client holds a share of the channels of every layer, and every parameter is averaged over the
clients that have it. The three differ in which channels a client gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..channels.find import groups_of, removable_groups
from ..channels.shrink import cut
from ..channels.submodel import (
    PlainGroups,
    groups_from_plain,
    groups_to_plain,
    masked_packet,
    mean_of,
    size_at,
)
from ..channels.widths import Width, width_for, widths
from ..core import MOST_AT_ONCE, Carry, Client, Outcome, Report, Setup
from ..errors import InputError, check
from ..nets import Net
from ..trees import Tree
from .aggregate import Averaging
from .channel_rules import ChannelRule, largest_ratio
from .layer_importance import candidates
from .local import LocalTraining

RATIO_STEP = 0.05
"""Pruning ratios that follow from devices are multiples of it."""
LOOKED_AT = 100
"""So many devices are looked at where there are too many to look at all."""
WHY_ALL = "fits models to devices (--set fit=false: all get the same)"


@dataclass(frozen=True)
class SharedWidths:
    """A method's state: the model in full width, and each client's share of the channels."""

    round: int
    structure: PlainGroups
    model: Tree
    shares: dict[int, float]


def check_shares(shares: Sequence[float]) -> None:
    """Refuse shares of channels that are not in (0, 1]."""
    check(all(0 < s <= 1 for s in shares), "widths", tuple(shares), "shares in (0, 1]")


def initial_widths(
    setup: Setup, shares: Sequence[float], local: LocalTraining | None
) -> SharedWidths:
    """The network's initial parameters, and every client's share."""
    everybody_has_all = bool(shares) and min(shares) == 1
    find = groups_of if everybody_has_all else removable_groups
    structure = groups_to_plain(find(setup.net))
    return SharedWidths(0, structure, setup.params, client_shares(setup, shares, local))


def client_shares(
    setup: Setup, shares: Sequence[float], local: LocalTraining | None
) -> dict[int, float]:
    """Every client's share of channels: given in turn, or what its device can hold."""
    clients = setup.all_clients("holds a width for every client")
    if shares:
        return {k: shares[i % len(shares)] for i, k in enumerate(clients)}
    if local is None:
        options = widths(setup.net)
    else:
        options = widths(setup.net, local.batch, local.optimiser.slots)
    return {k: width_for(setup.clients[k], options) for k in clients}


def narrow_clients(setup: Setup, local: LocalTraining | None) -> dict[int, float]:
    """The clients whose devices are too small or too slow for the whole net, with their shares.

    Of very many clients a sample is looked at; where one of those is narrow, each would need a
    place, and that is refused.
    """
    batch, slots = 32, 1
    if local is not None:
        batch, slots = local.batch, local.optimiser.slots
    needed = setup.layout.memory(batch, slots)

    def is_narrow(client: int) -> bool:
        device = setup.clients[client]
        return device.memory < needed or device.speed < 1

    if len(setup.clients) > MOST_AT_ONCE:
        sample = setup.some_clients(LOOKED_AT)
        if not any(is_narrow(client) for client in sample):
            return {}
    narrow = [client for client in setup.all_clients(WHY_ALL) if is_narrow(client)]
    if not narrow:
        # Nothing has to be cut, nor need it be possible.
        return {}
    options = widths(setup.net, batch, slots)
    return {client: width_for(setup.clients[client], options) for client in narrow}


def client_ratios(setup: Setup, rule: ChannelRule, local: LocalTraining | None) -> dict[int, float]:
    """Every client's pruning ratio: the smallest with which a training step fits its device.

    A step fits as in :func:`fedgrove.channels.widths.width_for`, in the net that ``rule`` really
    cuts, from the initial weights: what a ratio saves depends on the rule and on the layers it
    cuts. Ratios are multiples of :data:`RATIO_STEP`. A device whose memory is too small at the
    largest is refused.
    """
    clients = setup.all_clients("holds a pruning ratio for every client")
    batch, slots = 32, 1
    if local is not None:
        batch, slots = local.batch, local.optimiser.slots
    layout = setup.layout
    whole = Width(1.0, layout.memory(batch, slots), layout.macs)
    devices = {k: setup.clients[k] for k in clients}
    if all(d.memory >= whole.memory and d.speed >= 1 for d in devices.values()):
        # Nothing has to be cut, nor need it be possible.
        return dict.fromkeys(clients, 0.0)
    groups = candidates(removable_groups(setup.net), layout.shapes)
    ratio_of = {1.0: 0.0}
    options = [whole]
    for i in range(1, round(1 / RATIO_STEP)):
        # Not 0.15000000000000002.
        ratio = round(i * RATIO_STEP, 6)
        if ratio > largest_ratio(rule, groups):
            break
        kept = rule(setup.params, groups, ratio, 0, clients[0])
        small = cut(setup.net, kept).net.layout
        options.append(Width(1 - ratio, small.memory(batch, slots), small.macs))
        ratio_of[1 - ratio] = ratio
    least = min(option.memory for option in options)
    for k, device in devices.items():
        if device.memory < least:
            raise InputError(
                f"client {k}'s device has {device.memory} bytes of memory, and at a pruning ratio "
                f"of {max(ratio_of.values()):g}, the largest, a training step of this net needs "
                f"{least}; take a smaller net or batch, or a rule that cuts all layers alike "
                "(--set prune=UniformL1), or give the ratios (--set ratios=0,0.5)."
            )
    return {k: ratio_of[width_for(device, options)] for k, device in devices.items()}


def average_overlap(
    state: SharedWidths, reports: Iterable[Report], rule: Averaging
) -> SharedWidths:
    """The next model: every parameter averaged over the clients that have it."""
    model = mean_of(state.model, reports, groups_from_plain(state.structure), rule)
    return replace(state, round=state.round + 1, model=model)


def send_masked(carry: Carry, client: Client) -> Outcome:
    """The client sends its sub-model under the mask it came with."""
    return Outcome({"model": masked_packet(carry["local"], carry.get("model.mask"))})


def submodel_bytes(net: Net, shares: Sequence[float], cohort: int, rounds: int) -> int:
    """Sub-models of these widths, in turn, 4 bytes a number, down and up."""
    sizes = [size_at(net, share) for share in shares] or [net.layout.size]
    return round(2 * 4 * cohort * rounds * sum(sizes) / len(sizes))
