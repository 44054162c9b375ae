"""Who holds what: the ways a set is dealt to clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import InputError, check, unknown
from .dataset import Array, Ints

KINDS = (
    "natural",
    "iid",
    "dirichlet:ALPHA",
    "classes:K",
    "classes:K:N",
    "shards",
    "shards:K",
    "shards:K:N",
)
DRAWS = 500
"""How often an unlucky draw is repeated before we say that it cannot be done."""


@dataclass(frozen=True)
class Partition:
    """A parsed choice: ``alpha`` for dirichlet, ``k`` classes per client, at most ``cap`` examples of each.

    With shards ``cap`` is how many examples of each class are dealt in all.
    """

    kind: str
    alpha: float = 0.0
    k: int = 0
    cap: int = 0


def parse(text: str) -> Partition:
    """Read a partition as the command line writes it.

    >>> parse("dirichlet:0.5")
    Partition(kind='dirichlet', alpha=0.5, k=0, cap=0)
    >>> parse("classes:5:20")
    Partition(kind='classes', alpha=0.0, k=5, cap=20)
    """
    kind, *values = text.split(":")
    try:
        match kind, values:
            case (("natural" | "iid"), []):
                return Partition(kind)
            case "dirichlet", [alpha]:
                return _checked(Partition(kind, alpha=float(alpha)), text)
            case "classes", [k]:
                return _checked(Partition(kind, k=int(k)), text)
            case (("classes" | "shards"), [k, cap]):
                return _checked(Partition(kind, k=int(k), cap=int(cap)), text)
            case "shards", _ if len(values) < 2:
                return _checked(Partition(kind, k=int((values or ["2"])[0])), text)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
    raise unknown("partition", text, KINDS)


def _checked(partition: Partition, text: str) -> Partition:
    if partition.kind == "dirichlet":
        check(
            0 < partition.alpha < float("inf"),
            "partition",
            text,
            "dirichlet:ALPHA with ALPHA above 0",
        )
    else:
        check(
            partition.k > 0 and (partition.cap > 0 or text.count(":") < 2),
            "partition",
            text,
            f"{partition.kind}:K with whole numbers above 0",
        )
    return partition


def deal(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> list[Ints]:
    """Deal units (rows, or blocks of ``size`` rows with label ``y``) to clients, each unit once at most.

    Draws that leave a client with too few examples (10, or a quarter of an even share) are repeated.
    """
    one = {"iid": _iid, "dirichlet": _dirichlet, "classes": _classes, "shards": _shards}[
        partition.kind
    ]
    least = max(2, min(10, int(size.sum()) // (4 * clients)))
    for _ in range(DRAWS):
        owner = one(partition, y, size, clients, rng)
        held = np.bincount(owner[owner >= 0], weights=size[owner >= 0], minlength=clients)
        if held.min() >= min(least, partition.cap * partition.k or least):
            return [np.flatnonzero(owner == k) for k in range(clients)]
    raise InputError(
        f"{_said(partition)} leaves one of {clients} clients with fewer than {least} of {int(size.sum())} examples "
        f"in each of {DRAWS} draws; take fewer clients{', or a larger ALPHA' * (partition.kind == 'dirichlet')}."
    )


def _said(partition: Partition) -> str:
    value = (
        f":{partition.alpha:g}"
        if partition.kind == "dirichlet"
        else f":{partition.k}"
        if partition.k
        else ""
    )
    return f"partition {partition.kind}{value}"


def _share(units: Ints, size: Ints, shares: Array, rng: np.random.Generator) -> Ints:
    """Which of the shares each unit falls into, after a shuffle: cut where the cumulative sizes say."""
    order = rng.permutation(len(units))
    middle = np.cumsum(size[units][order]) - size[units][order] / 2
    place = np.empty(len(units), dtype=np.int64)
    place[order] = np.searchsorted(np.cumsum(shares)[:-1] * size[units].sum(), middle)
    return place


def _iid(partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator) -> Ints:
    return _share(np.arange(len(y)), size, np.full(clients, 1 / clients), rng)


def _dirichlet(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Shares of every class ~ Dirichlet(alpha, ..., alpha) over the clients."""
    owner = np.full(len(y), -1)
    for label in np.unique(y):
        units = np.flatnonzero(y == label)
        owner[units] = _share(units, size, rng.dirichlet(np.full(clients, partition.alpha)), rng)
    return owner


def _by_class(
    partition: Partition,
    y: Ints,
    size: Ints,
    clients: int,
    rng: np.random.Generator,
    weigh: Callable[[int], Array],
) -> Ints:
    """Give each client ``k`` classes and share every class among its holders by ``weigh(holders)``."""
    labels = np.unique(y)
    check(
        partition.k <= len(labels),
        "partition",
        _said(partition),
        f"of at most {len(labels)} classes, which is all",
    )
    hand = hands(len(labels), partition.k, clients, rng)
    owner = np.full(len(y), -1)
    for i, label in enumerate(labels):
        holders, units = np.flatnonzero((hand == i).any(axis=1)), np.flatnonzero(y == label)
        if partition.kind == "shards" and partition.cap:
            units = np.sort(rng.permutation(units)[: partition.cap])
        if len(holders):
            weights = weigh(len(holders))
            owner[units] = holders[_share(units, size, weights / weights.sum(), rng)]
            owner[units] = _capped(owner[units], size[units], partition.cap)
    return owner


def _capped(owner: Ints, size: Ints, cap: int) -> Ints:
    """Discard (-1) what a client holds of one class beyond ``cap`` examples."""
    if not cap:
        return owner
    before = np.zeros(len(owner), dtype=np.int64)
    for k in np.unique(owner):
        mine = owner == k
        before[mine] = np.cumsum(size[mine])
    return np.where(before <= cap, owner, -1)


def hands(classes: int, k: int, clients: int, rng: np.random.Generator) -> Ints:
    """The ``k`` different classes of every client (clients, k), each class held equally often give or take one.

    Clients, in random order, take the classes held least so far, ties at random.
    """
    held, hand = np.zeros(classes), np.empty((clients, k), dtype=np.int64)
    for client in rng.permutation(clients):
        hand[client] = np.lexsort((rng.random(classes), held))[:k]
        held[hand[client]] += 1
    return hand


def _classes(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    return _by_class(partition, y, size, clients, rng, np.ones)


def _shards(
    partition: Partition, y: Ints, size: Ints, clients: int, rng: np.random.Generator
) -> Ints:
    """Unbalanced: holders' shares of a class are log-normal with sigma 1, so the largest is several times the least."""
    return _by_class(partition, y, size, clients, rng, lambda n: rng.lognormal(0.0, 1.0, n))
