"""Sub-models by device: what HeteroFL, FedRolex and FedDrop share.

Each client holds a share of the channels of every layer, and every parameter is averaged over the
clients that have it. The three differ in which channels a client gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..channels.find import groups_of, removable_groups
from ..channels.submodel import (
    PlainGroups,
    groups_from_plain,
    groups_to_plain,
    masked_packet,
    mean_of,
    size_at,
)
from ..channels.widths import width_for, widths
from ..core import Carry, Client, Outcome, Report, Start
from ..errors import check
from ..nets import Net
from ..trees import Tree
from .aggregate import Averaging
from .local import LocalTraining


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
    start: Start, shares: Sequence[float], local: LocalTraining | None
) -> SharedWidths:
    """The network's initial parameters, and every client's share."""
    everybody_has_all = bool(shares) and min(shares) == 1
    find = groups_of if everybody_has_all else removable_groups
    structure = groups_to_plain(find(start.net))
    return SharedWidths(0, structure, start.params, client_shares(start, shares, local))


def client_shares(
    start: Start, shares: Sequence[float], local: LocalTraining | None
) -> dict[int, float]:
    """Every client's share of channels: given in turn, or what its device can hold."""
    clients = start.all_clients("holds a width for every client")
    if shares:
        return {k: shares[i % len(shares)] for i, k in enumerate(clients)}
    if local is None:
        options = widths(start.net)
    else:
        options = widths(start.net, local.batch, local.optimiser.slots)
    return {k: width_for(start.clients[k], options) for k in clients}


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
