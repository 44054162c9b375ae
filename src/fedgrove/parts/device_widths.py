"""Sub-models by device: which share of the channels each client gets, and what it sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TypeVar

from ..channels.find_groups import find_groups, require_groups
from ..channels.submodel import (
    PlainGroups,
    average_submodels,
    count_params_at,
    groups_from_plain,
    groups_to_plain,
    make_masked_packet,
)
from ..channels.widths import choose_width, measure_widths
from ..core import MOST_AT_ONCE, Carry, Client, Outcome, Report, Setup
from ..errors import check
from ..nets import Net
from ..renamed import find_old_names
from .aggregate import Averaging
from .local import LocalTraining
from .one_model import OneModel

LOOKED_AT = 100
"""How many devices are sampled if there are more than a server lists at once."""
WHY_ALL = "fits models to devices (--set fit=false: all get the same model)"


@dataclass(frozen=True)
class WideModel(OneModel):
    """A width method's state: the round, the model in full width, and which channels it has."""

    structure: PlainGroups


State = TypeVar("State", bound=WideModel)


def find_plain_groups(net: Net, narrows: bool) -> PlainGroups:
    """Part of width methods: the channels of a net, as a state may contain them.

    A net without removable channels is refused only if some client ``narrows`` it.
    """
    find = require_groups if narrows else find_groups
    return groups_to_plain(find(net))


def average_widths(state: State, reports: Iterable[Report], rule: Averaging) -> State:
    """Part of width methods: the next model, every parameter over the clients that have it."""
    groups = groups_from_plain(state.structure)
    model = average_submodels(state.model, reports, groups, rule)
    return replace(state, round=state.round + 1, model=model)


def batch_and_slots(local: LocalTraining | None) -> tuple[int, int]:
    """Part of width methods: what decides a training step's memory, batch and optimiser slots.

    Without a recipe a batch of 32 and one vector, as ``measure_widths`` assumes.
    """
    if local is None:
        return 32, 1
    return local.batch, local.optimiser.slots


def check_shares(shares: Sequence[float]) -> None:
    """Refuse widths of sub-models, as shares of channels, that are not in (0, 1]."""
    check(all(0 < s <= 1 for s in shares), "widths", tuple(shares), "shares in (0, 1]")


def client_shares(
    setup: Setup, shares: Sequence[float], local: LocalTraining | None
) -> dict[int, float]:
    """Part of width methods: every client's share of channels, given or what its device holds."""
    clients = setup.all_clients("keeps a width for every client")
    if shares:
        # Without strict: the cycle has no end, the clients decide.
        return dict(zip(clients, cycle(shares), strict=False))
    options = measure_widths(setup.net, *batch_and_slots(local))
    return {k: choose_width(setup.clients[k], options) for k in clients}


def narrow_clients(setup: Setup, local: LocalTraining | None) -> dict[int, float]:
    """The clients whose devices are too small or too slow for the whole net, with their shares.

    Of very many clients only a sample is looked at. If one of those is narrow, every client would
    need an entry in the state, and that is refused.
    """
    batch, slots = batch_and_slots(local)
    needed = setup.layout.memory(batch, slots)

    def is_narrow(client: int) -> bool:
        device = setup.clients[client]
        return device.memory < needed or device.speed < 1

    if len(setup.clients) > MOST_AT_ONCE:
        sample = setup.some_clients(LOOKED_AT)
        if not any(map(is_narrow, sample)):
            return {}
    narrow = list(filter(is_narrow, setup.all_clients(WHY_ALL)))
    if not narrow:
        # Before widths are measured: a net whose channels cannot be removed is fine here.
        return {}
    options = measure_widths(setup.net, batch, slots)
    return {client: choose_width(setup.clients[client], options) for client in narrow}


def send_masked(carry: Carry, client: Client) -> Outcome:
    """Part of width methods: the client sends its sub-model under the mask it came with."""
    return Outcome({"model": make_masked_packet(carry["local"], carry.get("model.mask"))})


def submodel_bytes(net: Net, shares: Sequence[float], cohort: int, rounds: int) -> int:
    """Part of width methods: bytes of sub-models of these widths, 4 a number, down and up."""
    sizes = [count_params_at(net, share) for share in shares] or [net.layout.size]
    return round(2 * 4 * cohort * rounds * sum(sizes) / len(sizes))


__getattr__ = find_old_names(__name__)
