"""Partitions: the ways a set is dealt to clients."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InputError, check, unknown
from .dataset import Array, Ints

KINDS = (
    "natural",
    "iid",
    "iid:N",
    "dirichlet:ALPHA",
    "dirichlet:ALPHA:N",
    "classes:K",
    "classes:K:N",
    "classes:K:grouped",
    "shards",
    "shards:K",
    "shards:K:N",
    "shards:K:grouped",
)
GROUPED = ":grouped"
"""Ends a partition in which clients of one set hold the same classes; N may stand before it."""
DRAWS = 500
"""How often an unlucky draw is repeated before the partition is refused."""


@dataclass(frozen=True)
class Partition:
    """A parsed partition.

    kind: natural, iid, dirichlet, classes or shards.
    alpha: the parameter of dirichlet.
    k: classes per client, of classes and shards.
    cap: with classes, how many examples of each class a client holds at most; with the others, how
        many examples of each class are dealt in all; 0 is no limit.
    grouped: whether the classes are divided into sets of k, so that clients of one set hold the
        same classes; of classes and shards.
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
    # A value that is not a number leaves None, to be refused like any other unknown word.
    with contextlib.suppress(ValueError):
        match kind, values:
            case (("natural" | "iid"), []):
                partition = Partition(kind)
            case "iid", [cap]:
                partition = Partition(kind, cap=int(cap))
            case "dirichlet", [alpha]:
                partition = Partition(kind, alpha=float(alpha))
            case "dirichlet", [alpha, cap]:
                partition = Partition(kind, alpha=float(alpha), cap=int(cap))
            case "shards", []:
                partition = Partition(kind, k=2)
            case (("classes" | "shards"), [k]):
                partition = Partition(kind, k=int(k))
            case (("classes" | "shards"), [k, cap]):
                partition = Partition(kind, k=int(k), cap=int(cap))
    by_class = kind in ("classes", "shards")
    if partition is None or (grouped and not by_class):
        raise unknown("partition", text, KINDS)

    if kind == "iid":
        check(partition.cap > 0 or not values, "partition", text, "iid:N with N above 0")
    elif kind == "dirichlet":
        # Refuses NaN as well, which no comparison holds for.
        alpha_is_valid = 0 < partition.alpha < float("inf")
        check(alpha_is_valid, "partition", text, "dirichlet:ALPHA with ALPHA above 0")
        cap_is_valid = partition.cap > 0 or len(values) < 2
        check(cap_is_valid, "partition", text, "dirichlet:ALPHA:N with N above 0")
    elif by_class:
        # A cap of 0 means no limit only where none was written.
        cap_is_valid = partition.cap > 0 or len(values) < 2
        allowed = f"{kind}:K with whole numbers above 0"
        check(partition.k > 0 and cap_is_valid, "partition", text, allowed)
    return replace(partition, grouped=grouped)


def deal(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> list[Ints]:
    """The units each client gets: rows, or blocks of ``size`` rows with label ``y``.

    A unit goes to one client at most. Draws that leave a client with too few examples (10, or a
    quarter of an even share) are repeated.
    """
    draw = {"iid": _iid, "dirichlet": _dirichlet, "classes": _by_class, "shards": _by_class}[
        partition.kind
    ]
    draws_from_all = partition.kind in ("iid", "dirichlet")
    if draws_from_all and partition.cap:
        some = _some_of_each(y, size, partition.cap, rng)
        own = deal(replace(partition, cap=0), y[some], size[some], clients, rng)
        return [some[units] for units in own]
    examples = int(size.sum())
    least = max(2, min(10, examples // (4 * clients)))
    # A small cap cannot give a client more than K times itself.
    reachable = partition.cap * partition.k or least
    for _ in range(DRAWS):
        owner = draw(partition, y, size, clients, rng)
        dealt = owner >= 0
        held = np.bincount(owner[dealt], weights=size[dealt], minlength=clients)
        if held.min() >= min(least, reachable):
            return [np.flatnonzero(owner == client) for client in range(clients)]
    advice = "take fewer clients"
    if partition.kind == "dirichlet":
        advice += ", or a larger ALPHA"
    raise InputError(
        f"partition {_described(partition)} leaves one of {clients} clients with fewer than "
        f"{least} of {examples} examples in each of {DRAWS} draws; {advice}."
    )


def _some_of_each(y: Ints, size: Ints, cap: int, rng: np.random.Generator) -> Ints:
    """Units drawn from every class, as long as they hold at most ``cap`` examples of it."""
    some = []
    for label in np.unique(y):
        units = rng.permutation(np.flatnonzero(y == label))
        some.append(units[np.cumsum(size[units]) <= cap])
    return np.sort(np.concatenate(some))


def _described(partition: Partition) -> str:
    if partition.kind == "dirichlet":
        return f"dirichlet:{partition.alpha:g}"
    if partition.k:
        ending = GROUPED if partition.grouped else ""
        return f"{partition.kind}:{partition.k}{ending}"
    return partition.kind


# ---- one draw each: the client of every unit, -1 for a unit that goes to nobody ------------------


def _iid(partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator) -> Ints:
    """Equal shares of all units, whatever their labels."""
    return _share(np.arange(len(y)), size, np.full(clients, 1 / clients), rng)


def _dirichlet(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Shares of every class ~ Dirichlet(alpha, ..., alpha) over the clients."""
    owner = np.full(len(y), -1)
    for label in np.unique(y):
        units = np.flatnonzero(y == label)
        shares = rng.dirichlet(np.full(clients, partition.alpha))
        owner[units] = _share(units, size, shares, rng)
    return owner


def _by_class(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Give each client ``k`` classes and share every class among the clients that hold it.

    `classes` shares evenly. `shards` is unbalanced: shares are log-normal with sigma 1, so the
    largest is several times the least.
    """
    labels = np.unique(y)
    allowed = f"of at most {len(labels)} classes, which is all"
    check(partition.k <= len(labels), "partition", _described(partition), allowed)
    if partition.grouped:
        allowed = (
            f"of a K that divides the {len(labels)} classes into whole sets, or without :grouped"
        )
        check(len(labels) % partition.k == 0, "partition", _described(partition), allowed)
        hand = grouped_hands(len(labels), partition.k, clients, rng)
    else:
        hand = hands(len(labels), partition.k, clients, rng)
    owner = np.full(len(y), -1)
    for i, label in enumerate(labels):
        holders = np.flatnonzero((hand == i).any(axis=1))
        units = np.flatnonzero(y == label)
        # Discarding before the shares are cut keeps them as unequal as they were drawn.
        if partition.kind == "shards" and partition.cap:
            units = np.sort(rng.permutation(units)[: partition.cap])
        # With few clients a class may have no holder; its units go to nobody.
        if len(holders) == 0:
            continue
        if partition.kind == "shards":
            weights = rng.lognormal(0.0, 1.0, len(holders))
        else:
            weights = np.ones(len(holders))
        shares = weights / weights.sum()
        owner[units] = holders[_share(units, size, shares, rng)]
        if partition.cap:
            owner[units] = _capped(owner[units], size[units], partition.cap)
    return owner


def hands(classes: int, k: int, clients: int, rng: np.random.Generator) -> Ints:
    """The ``k`` different classes of every client (clients, k).

    Clients, in random order, take the classes held least so far, ties at random; so the numbers of
    holders of two classes differ by one at most.
    """
    held = np.zeros(classes)
    hand = np.empty((clients, k), dtype=np.int64)
    for client in rng.permutation(clients):
        # lexsort's last key is the first one to sort by: how often held, then chance.
        hand[client] = np.lexsort((rng.random(classes), held))[:k]
        held[hand[client]] += 1
    return hand


def grouped_hands(classes: int, k: int, clients: int, rng: np.random.Generator) -> Ints:
    """The ``k`` classes of every client (clients, k), where clients of one set hold the same.

    The classes, in random order, are cut into sets of ``k``, which are dealt to clients in turn: of
    S sets the first goes to clients 0, S, 2 S, and so on. ``k`` must divide ``classes``.
    """
    sets = rng.permutation(classes).reshape(-1, k)
    return sets[np.arange(clients) % len(sets)]


def _share(units: Ints, size: Ints, shares: Array, rng: np.random.Generator) -> Ints:
    """The share each unit falls into: shuffle the units, lay them end to end, cut by the shares.

    A unit that lies across a cut goes to the side that its middle is on.
    """
    order = rng.permutation(len(units))
    sizes = size[units][order]
    middle = np.cumsum(sizes) - sizes / 2
    cuts = np.cumsum(shares)[:-1] * sizes.sum()
    share = np.empty(len(units), dtype=np.int64)
    share[order] = np.searchsorted(cuts, middle)
    return share


def _capped(owner: Ints, size: Ints, cap: int) -> Ints:
    """Discard (-1) what a client holds of one class beyond ``cap`` examples."""
    total = np.zeros(len(owner), dtype=np.int64)
    for client in np.unique(owner):
        mine = owner == client
        total[mine] = np.cumsum(size[mine])
    return np.where(total <= cap, owner, -1)
