"""Versions of published models: which one a client has, and what it has missed.

A server that publishes its model as a series of small updates does not send the model: a client
that has version v is sent the sum of the updates since (Sattler et al. 2019, "weight update
caching"). The server keeps one number per client, and a bounded history of updates, sparse, that
all clients share. A client whose version is older than the history is sent the model whole, and
nothing is kept of it.

There may be several models, one for each group of clients. A group branches off another
(:func:`branch`) and shares its history up to then.

How both sides agree on what a client has: it keeps the model that it received in its memory as
"held", and the server notes the version when it folds the client's report (:func:`note`). Where the
exchange is lost, or the report is refused, neither happens: the client goes back to the memory that
the next task names (:attr:`fedgrove.core.Task.memory`), which is that of the last report that was
folded. At first all clients have version 0, the initial parameters, which cost no bytes.

Sums are taken in the model's own precision, on either side in a different order: what a client has
is the published model except for the rounding of a few additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ... import trees
from ...core import Carry, Packet
from ...trees import Tree

IN_ONE_PACKET = 5
"""How many ternary updates are summed in a packet: five have 3^5 = 243 different sums, which a
codec writes as places in a book of up to 256. A longer sum would be written value by value, at
twice the bytes."""
MISSED = "missed"
"""The name of packets of missed updates, before their number."""
NO_GROUP = -1
"""A group that no client is in: what belongs to it is of no use."""


@dataclass(frozen=True)
class Versions:
    """The published models, by group, with their histories; and which version each client has."""

    models: dict[int, Tree]
    numbers: dict[int, int]
    """The number of each group's newest version."""
    updates: dict[int, tuple[Tree, ...]]
    """The updates that led to it, the newest last: places and values in the flat model."""
    origins: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The group that a group came from, and the last version that the two share."""
    client_versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The group and version that a client has; a client that is not here has version 0, or one that
    is older than the history."""


def first(model: Tree, group: int = 0) -> Versions:
    """STC: version 0 of the published model."""
    return Versions({group: model}, {group: 0}, {group: ()})


def publish(
    versions: Versions, update: Mapping[str, Tensor], room: float, group: int = 0
) -> Versions:
    """STC: the next version of a group's model: the newest, and this sparse update.

    The group's history takes the memory of ``room`` models at most. The oldest updates of a longer
    one are dropped; so are clients with a version before them, once no history is complete.
    """
    model = trees.map(torch.add, versions.models[group], update)
    history = (*versions.updates[group], _sparse(update))
    return _published(versions, model, _recent(history, room * bytes_of(model)), group)


def publish_whole(versions: Versions, model: Tree, group: int = 0) -> Versions:
    """STC: publish the next version of a group's model, without an update that leads to it."""
    return _published(versions, model, (), group)


def branch(versions: Versions, groups: Sequence[int], of: int = 0, stays: bool = False) -> Versions:
    """STC: versions with new groups in the place of one, all with its model and history.

    If it ``stays``, it goes on next to them.
    """
    models = {**versions.models, **dict.fromkeys(groups, versions.models[of])}
    numbers = {**versions.numbers, **dict.fromkeys(groups, versions.numbers[of])}
    updates = {**versions.updates, **dict.fromkeys(groups, versions.updates[of])}
    if not stays:
        for by_group in (models, numbers, updates):
            del by_group[of]
    origin = (of, versions.numbers[of])
    origins = {**versions.origins, **dict.fromkeys(groups, origin)}
    return Versions(models, numbers, updates, origins, versions.client_versions)


def note(versions: Versions, clients: Iterable[int], group: int = 0) -> Versions:
    """STC: note that these clients have received their group's newest version."""
    newest = (group, versions.numbers[group])
    return replace(
        versions, client_versions={**versions.client_versions, **dict.fromkeys(clients, newest)}
    )


def forget(versions: Versions, clients: Iterable[int]) -> Versions:
    """STC: forget which versions these clients have; they are sent the whole model."""
    # Version 1 of a group that no other shares a version with.
    return replace(
        versions,
        client_versions={**versions.client_versions, **dict.fromkeys(clients, (NO_GROUP, 1))},
    )


# ---- what a client is sent -----------------------------------------------------------------------


def packets(
    versions: Versions,
    client: int,
    group: int = 0,
    known: dict[tuple[int, int], Mapping[str, Packet]] | None = None,
) -> Mapping[str, Packet]:
    """STC: what brings a client to its group's newest version; nothing if it has that.

    The updates it has missed, in sums of a few; or the whole model, as "model", if the history does
    not reach back so far, or if the updates would take more bytes. ``known`` has what clients of
    one version were sent before, so that it is made, and encoded, once.
    """
    missed = _missed(versions, client, group)
    if missed is None:
        return {"model": Packet(versions.models[group])}
    key = (group, len(missed))
    if known is not None and key in known:
        return known[key]
    send = {}
    for number, start in enumerate(range(0, len(missed), IN_ONE_PACKET)):
        some = missed[start : start + IN_ONE_PACKET]
        send[f"{MISSED}{number}"] = Packet(_sum(some, versions.models[group]))
    if known is not None:
        known[key] = send
    return send


def receive(carry: Carry, start: Mapping[str, Tensor]) -> tuple[Tree, Carry]:
    """STC: the client's side of an update: the newest version of the model.

    The carry loses what that version was made of.

    ``start`` is version 0, with the names of what is published.
    """
    rest = dict(carry)
    # Before its first report a client has version 0, which it draws from the seed.
    held = rest.pop("held", start)
    whole = rest.pop("model", None)
    if whole is not None:
        return trees.pick(whole, start), rest
    model = trees.pick(held, start)
    number = 0
    while f"{MISSED}{number}" in rest:
        model = trees.map(torch.add, model, rest.pop(f"{MISSED}{number}"))
        number += 1
    return model, rest


def update_bits(numbers: int, kept: int) -> float:
    r"""STC: about what a ternary update takes: the entropy of its places, and a sign for each.

    :math:`n H(k/n) + k`. A sum of updates takes no more than they do one by one.

    >>> update_bits(8, 4)
    12.0
    """
    share = kept / numbers
    if share in (0, 1):
        return float(kept)
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return numbers * entropy + kept


def _missed(versions: Versions, client: int, group: int) -> tuple[Tree, ...] | None:
    """The updates since the version that a client has; None: the whole model is better."""
    their_group, version = versions.client_versions.get(client, (group, 0))
    if version > _last_common(versions, their_group, group):
        # The other group has gone its own way since.
        return None
    history = versions.updates[group]
    count = versions.numbers[group] - version
    if count > len(history):
        return None
    missed = history[len(history) - count :]
    numbers = trees.size(versions.models[group])
    bits = sum(update_bits(numbers, len(update["place"])) for update in missed)
    # The whole model takes 32 bits a number.
    if bits >= 32 * numbers:
        return None
    return missed


def _last_common(versions: Versions, one: int, other: int) -> float:
    """The last version that two groups share: that of the nearest group both came from."""
    shared = _line(versions, one)
    for group, version in _line(versions, other).items():
        if group in shared:
            return min(version, shared[group])
    return 0


def _line(versions: Versions, group: int) -> dict[int, float]:
    """A group and those it came from, the nearest first, with the last version it has of each."""
    line: dict[int, float] = {}
    version = math.inf
    while True:
        line[group] = version
        if group not in versions.origins:
            return line
        group, last = versions.origins[group]
        version = min(version, last)


def _published(versions: Versions, model: Tree, history: tuple[Tree, ...], group: int) -> Versions:
    numbers = {**versions.numbers, group: versions.numbers[group] + 1}
    updates = {**versions.updates, group: history}
    # By group: the oldest version from which its history leads to the newest.
    oldest = {one: numbers[one] - len(updates[one]) for one in numbers}
    earliest = min(oldest.values())
    client_versions = {}
    for client, (their_group, version) in versions.client_versions.items():
        # Of clients with a version older than their history, nothing need be known. But a client
        # that is not known counts as having version 0, and may change to a group that still leads
        # there.
        if earliest == 0 or version >= oldest.get(their_group, earliest):
            client_versions[client] = (their_group, version)
    return replace(
        versions,
        models={**versions.models, group: model},
        numbers=numbers,
        updates=updates,
        client_versions=client_versions,
    )


# ---- updates in little room ----------------------------------------------------------------------


def _sparse(update: Mapping[str, Tensor]) -> Tree:
    """The places and values of what is not 0, in the flat update."""
    vector = trees.flatten(update)
    place = torch.nonzero(vector).reshape(-1)
    # 32 bits reach two thousand million places: half of the memory of torch's own indices.
    return {"place": place.to(torch.int32), "value": vector[place]}


def _sum(updates: Iterable[Mapping[str, Tensor]], like: Mapping[str, Tensor]) -> Tree:
    """The sum of sparse updates as a tree."""
    total = torch.zeros_like(trees.flatten(like))
    for update in updates:
        total.index_add_(0, update["place"], update["value"])
    return trees.unflatten(total, like)


def _recent(history: tuple[Tree, ...], room: float) -> tuple[Tree, ...]:
    """The newest updates that fit into a number of bytes."""
    used = 0.0
    kept = 0
    # From the newest on, without gaps: an update is of use only with all later ones.
    for update in reversed(history):
        used += bytes_of(update)
        if used > room:
            break
        kept += 1
    return history[len(history) - kept :]


def bytes_of(tree: Mapping[str, Tensor]) -> int:
    """STC: the bytes that a published update takes in memory."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.values())
