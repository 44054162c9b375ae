"""Partitions: the ways in which the examples of a data set are assigned to clients."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InputError, check, unknown
from ..renamed import find_old_names
from .dataset import Array, Ints

PARTITIONS = {
    "natural": "a client per user of the data",
    "iid": "all examples, in equal shares",
    "iid:N": "N examples of each class, in equal shares",
    "dirichlet:ALPHA": "each class draws its shares over the clients",
    "dirichlet:ALPHA:N": "dirichlet with N examples of each class",
    "dirichlet-clients:ALPHA": "each client draws its shares of the classes",
    "dirichlet-clients:ALPHA:N": "dirichlet-clients with N examples of each class",
    "classes:K": "K classes per client, in equal shares",
    "classes:K:N": "classes with at most N examples of a class per client",
    "classes:K:grouped": "classes, with sets of clients that share all K",
    "shards": "two classes per client, in unequal shares",
    "shards:K": "K classes per client, in unequal shares",
    "shards:K:N": "shards with N examples of each class",
    "shards:K:grouped": "shards, with sets of clients that share all K",
}
"""Each as the command line writes it, and what it does."""
DIRICHLET = ("dirichlet", "dirichlet-clients")
"""Either each class draws its shares over the clients, or each client its shares of the classes."""
GROUPED = ":grouped"
"""Ends a partition in which the clients of one set have the same classes."""
MAX_DRAWS = 500
"""How often an unlucky draw is repeated before the partition is refused."""


@dataclass(frozen=True)
class Partition:
    """A parsed partition.

    Args:
        kind: natural, iid, dirichlet, dirichlet-clients, classes or shards.
        alpha: The parameter of dirichlet and dirichlet-clients.
        k: Classes per client, for classes and shards.
        cap: With classes, the most examples of each class that a client has; with the others, the
            most examples of each class that are assigned at all. 0 is no limit.
        grouped: Whether the classes are divided into sets of k, so that the clients of one set
            have the same classes; for classes and shards.
    """

    kind: str
    alpha: float = 0.0
    k: int = 0
    cap: int = 0
    grouped: bool = False


def parse(text: str) -> Partition:
    """Read a partition as the command line writes it.

    >>> parse("dirichlet:0.5")
    Partition(kind='dirichlet', alpha=0.5, k=0, cap=0, grouped=False)
    >>> parse("classes:5:20:grouped")
    Partition(kind='classes', alpha=0.0, k=5, cap=20, grouped=True)
    """
    grouped = text.endswith(GROUPED)
    kind, *values = text.removesuffix(GROUPED).split(":")
    partition = None
    # A value that is not a number leaves None, to be refused like any unknown partition.
    with contextlib.suppress(ValueError):
        match kind, values:
            case (("natural" | "iid"), []):
                partition = Partition(kind)
            case "iid", [cap]:
                partition = Partition(kind, cap=int(cap))
            case (("dirichlet" | "dirichlet-clients"), [alpha]):
                partition = Partition(kind, alpha=float(alpha))
            case (("dirichlet" | "dirichlet-clients"), [alpha, cap]):
                partition = Partition(kind, alpha=float(alpha), cap=int(cap))
            case "shards", []:
                partition = Partition(kind, k=2)
            case (("classes" | "shards"), [k]):
                partition = Partition(kind, k=int(k))
            case (("classes" | "shards"), [k, cap]):
                partition = Partition(kind, k=int(k), cap=int(cap))
    by_class = kind in ("classes", "shards")
    if partition is None or (grouped and not by_class):
        raise unknown("partition", text, PARTITIONS)

    if kind == "iid":
        check(partition.cap > 0 or not values, "partition", text, "iid:N with N above 0")
    elif kind in DIRICHLET:
        # Refuses NaN as well, for which every comparison is false.
        alpha_is_valid = 0 < partition.alpha < float("inf")
        check(alpha_is_valid, "partition", text, f"{kind}:ALPHA with ALPHA above 0")
        cap_is_valid = partition.cap > 0 or len(values) < 2
        check(cap_is_valid, "partition", text, f"{kind}:ALPHA:N with N above 0")
    elif by_class:
        # A cap of 0 means no limit only where none was written.
        cap_is_valid = partition.cap > 0 or len(values) < 2
        allowed = f"{kind}:K with whole numbers above 0"
        check(partition.k > 0 and cap_is_valid, "partition", text, allowed)
    return replace(partition, grouped=grouped)


def assign_units(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> list[Ints]:
    """Assign units to clients: rows, or blocks of ``size`` rows with label ``y``.

    A unit goes to one client at most. Draws that leave a client with too few examples (10, or a
    quarter of an even share) are repeated.

    Args:
        partition: How to assign them.
        y: The label of each unit.
        size: The number of examples of each unit.
        clients: The number of clients.
        rng: Draws the partition.

    Returns:
        The units of each client.

    Raises:
        InputError: No draw gives every client enough examples.
    """
    draws = {
        "iid": _draw_iid,
        "dirichlet": _draw_dirichlet_classes,
        "dirichlet-clients": _draw_dirichlet_clients,
    }
    draw = draws.get(partition.kind, _draw_by_class)
    if partition.kind in draws and partition.cap:
        some = _draw_from_each_class(y, size, partition.cap, rng)
        assigned = assign_units(replace(partition, cap=0), y[some], size[some], clients, rng)
        return [some[units] for units in assigned]
    examples = int(size.sum())
    least = max(2, min(10, examples // (4 * clients)))
    # With a small cap a client cannot have more than K times the cap.
    reachable = partition.cap * partition.k or least
    for _ in range(MAX_DRAWS):
        owner = draw(partition, y, size, clients, rng)
        is_assigned = owner >= 0
        owned = np.bincount(owner[is_assigned], weights=size[is_assigned], minlength=clients)
        if owned.min() >= min(least, reachable):
            return [np.flatnonzero(owner == client) for client in range(clients)]
    advice = "use fewer clients"
    if partition.kind in DIRICHLET:
        advice += ", or a larger ALPHA"
    raise InputError(
        f"partition {_describe(partition)} leaves one of {clients} clients with fewer than "
        f"{least} of {examples} examples in each of {MAX_DRAWS} draws; {advice}."
    )


def _draw_from_each_class(y: Ints, size: Ints, cap: int, rng: np.random.Generator) -> Ints:
    """Draw units of every class, as long as they have at most ``cap`` examples of it."""
    some = []
    for label in np.unique(y):
        units = rng.permutation(np.flatnonzero(y == label))
        some.append(units[np.cumsum(size[units]) <= cap])
    return np.sort(np.concatenate(some))


def _describe(partition: Partition) -> str:
    """Write a partition as the command line does."""
    if partition.kind in DIRICHLET:
        return f"{partition.kind}:{partition.alpha:g}"
    if partition.k:
        ending = GROUPED if partition.grouped else ""
        return f"{partition.kind}:{partition.k}{ending}"
    return partition.kind


# ---- one draw each: the client of every unit, -1 for a unit that no client gets ------------------


def _draw_iid(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Assign equal shares of all units, whatever their labels."""
    return _draw_shares(np.arange(len(y)), size, np.full(clients, 1 / clients), rng)


def _draw_dirichlet_classes(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Assign shares of every class ~ Dirichlet(alpha, ..., alpha) over the clients."""
    owner = np.full(len(y), -1)
    for label in np.unique(y):
        units = np.flatnonzero(y == label)
        shares = rng.dirichlet(np.full(clients, partition.alpha))
        owner[units] = _draw_shares(units, size, shares, rng)
    return owner


def _draw_dirichlet_clients(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Divide every class in proportion to the share of it that each client has drawn for itself."""
    labels = np.unique(y)
    wanted = rng.dirichlet(np.full(len(labels), partition.alpha), size=clients)
    shares = share_classes(wanted)
    owner = np.full(len(y), -1)
    for i, label in enumerate(labels):
        units = np.flatnonzero(y == label)
        owner[units] = _draw_shares(units, size, shares[:, i], rng)
    return owner


def share_classes(wanted: Array) -> Array:
    r"""Return the share of every class that each client gets (clients, classes).

    :math:`s_{kc} = p_{kc} / \sum_j p_{jc}`, where :math:`p_k`, the shares of the classes that
    client k wants of its own data, are drawn from Dirichlet(alpha) -> ``wanted``.

    >>> share_classes(np.array([[0.9, 0.1], [0.3, 0.7]])).round(3).tolist()
    [[0.75, 0.125], [0.25, 0.875]]
    """
    in_all = wanted.sum(axis=0)
    # With a tiny alpha shares round to 0. A class that nobody wants is divided evenly.
    nobody_wants = in_all == 0
    wanted = np.where(nobody_wants, 1.0, wanted)
    shares: Array = wanted / wanted.sum(axis=0)
    return shares


def _draw_by_class(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Give each client ``k`` classes and divide every class among the clients that have it.

    `classes` divides evenly. `shards` is unbalanced: shares are log-normal with sigma 1, so the
    largest is several times the least.
    """
    labels = np.unique(y)
    allowed = f"{partition.kind}:K with K at most {len(labels)}, the number of classes"
    check(partition.k <= len(labels), "partition", _describe(partition), allowed)
    if partition.grouped:
        allowed = f"grouped with a K that divides the {len(labels)} classes, or without :grouped"
        check(len(labels) % partition.k == 0, "partition", _describe(partition), allowed)
        classes = draw_class_sets(len(labels), partition.k, clients, rng)
    else:
        classes = draw_classes(len(labels), partition.k, clients, rng)
    owner = np.full(len(y), -1)
    for i, label in enumerate(labels):
        holders = np.flatnonzero((classes == i).any(axis=1))
        units = np.flatnonzero(y == label)
        # Discarding before the shares are cut keeps them as unequal as they were drawn.
        if partition.kind == "shards" and partition.cap:
            units = np.sort(rng.permutation(units)[: partition.cap])
        # With few clients a class may have no holder; no client gets its units.
        if len(holders) == 0:
            continue
        weights = np.ones(len(holders))
        if partition.kind == "shards":
            weights = rng.lognormal(0.0, 1.0, len(holders))
        shares = weights / weights.sum()
        owner[units] = holders[_draw_shares(units, size, shares, rng)]
        if partition.cap:
            owner[units] = _limit_examples(owner[units], size[units], partition.cap)
    return owner


def draw_classes(classes: int, k: int, clients: int, rng: np.random.Generator) -> Ints:
    """Draw ``k`` different classes for every client (clients, k).

    Clients, in random order, take the classes that the fewest clients have so far, ties at random.
    So the numbers of clients of two classes differ by one at most.
    """
    holders = np.zeros(classes)
    drawn = np.empty((clients, k), dtype=np.int64)
    for client in rng.permutation(clients):
        # lexsort sorts by its last key first: the number of holders, then chance.
        drawn[client] = np.lexsort((rng.random(classes), holders))[:k]
        holders[drawn[client]] += 1
    return drawn


def draw_class_sets(classes: int, k: int, clients: int, rng: np.random.Generator) -> Ints:
    """Draw the ``k`` classes of every client (clients, k) from disjoint sets of classes.

    The classes, in random order, are cut into sets of ``k``, and clients take the sets in turn: of
    S sets the first goes to clients 0, S, 2 S, and so on. ``k`` must divide ``classes``.
    """
    sets = rng.permutation(classes).reshape(-1, k)
    return sets[np.arange(clients) % len(sets)]


def _draw_shares(units: Ints, size: Ints, shares: Array, rng: np.random.Generator) -> Ints:
    """Return the share that each unit belongs to.

    The units are shuffled, put end to end and cut by the shares. A unit that lies across a cut
    goes to the side with its middle.
    """
    order = rng.permutation(len(units))
    sizes = size[units][order]
    middle = np.cumsum(sizes) - sizes / 2
    cuts = np.cumsum(shares)[:-1] * sizes.sum()
    share = np.empty(len(units), dtype=np.int64)
    share[order] = np.searchsorted(cuts, middle)
    return share


def _limit_examples(owner: Ints, size: Ints, cap: int) -> Ints:
    """Discard (-1) what a client has of one class beyond ``cap`` examples."""
    total = np.zeros(len(owner), dtype=np.int64)
    for client in np.unique(owner):
        is_owned = owner == client
        total[is_owned] = np.cumsum(size[is_owned])
    return np.where(total <= cap, owner, -1)


__getattr__ = find_old_names(__name__)
