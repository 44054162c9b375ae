"""All examples of a set in one place, before they are partitioned into clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pixels:
    """How pixels become inputs: (x / top - mean) / deviation, constants of the whole set.

    ``top`` is the largest raw value; ``mean`` and ``deviation`` have one value per channel.
    """

    top: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """A whole set, one row per example.

    x: raw inputs (n, *shape), channels first; y: labels (n,), indices into ``labels``.
    kind: what the targets are: "classes", "labels" or "numbers".
    targets: where they are not classes: (n, L), L as many as ``labels``; ``y`` is then all zeros,
        or what a split should hold out evenly.
    ahead: above 0 where targets are so many samples of every channel that follow the input, one
        channel after another; they are then scaled as the client's inputs are.
    kinds: of generated users, the kind that each row was made for (:func:`.purity`).
    user: the person each row comes from, numbered from 0; None where a set has no users.
    block: what a `blocks` split holds out together, a chain of overlapping windows or a contiguous
        piece of a longer run; None where there are none, and ``refusal`` then says why.
    start, reach: rows i and j share a raw sample when ``|start[i] - start[j]| < reach``.
    pixels: set for images; None means that each client standardises its own channels.
    notes: remarks that every federation of the set carries.
    names: what the users are called, by their number; empty where nobody says.
    channels: what the channels are called; empty where nobody says.
    window: how many samples a window has, where windows were cut from recordings.
    """

    x: Array
    y: Ints
    labels: tuple[str, ...]
    user: Ints | None = None
    block: Ints | None = None
    start: Ints | None = None
    reach: int = 0
    pixels: Pixels | None = None
    notes: tuple[str, ...] = ()
    kind: str = "classes"
    targets: Array | None = None
    ahead: int = 0
    kinds: Ints | None = None
    refusal: str = "its examples are not windows of a series, so there is nothing to keep together"
    names: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    window: int | None = None


def ids(values: Array) -> Ints:
    """Number the distinct values 0, 1, ... in sorted order.

    >>> ids(np.array([33, 7, 33])).tolist()
    [1, 0, 1]
    """
    # NumPy 2 may give the inverse in the shape of the values, NumPy 1 gives it flat.
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def runs(*columns: Array) -> Ints:
    """Number the stretches of rows in which no column changes.

    >>> runs(np.array([1, 1, 1, 2]), np.array([5, 6, 6, 6])).tolist()
    [0, 1, 1, 2]
    """
    change = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    return np.cumsum(change)


def positions(group: Ints) -> Ints:
    """The position of every row within its group, counted in row order.

    >>> positions(np.array([4, 4, 9, 4])).tolist()
    [0, 1, 0, 2]
    """
    n = len(group)
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    # Sorted by group (stable, so row order holds within a group), a row's position is its distance
    # from the first row of its group.
    order = np.argsort(group, kind="stable")
    firsts = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0])
    sizes = np.diff(np.r_[firsts, n])
    position = np.empty(n, dtype=np.int64)
    position[order] = np.arange(n) - np.repeat(firsts, sizes)
    return position


def overlapping(start: Ints, others: Ints, reach: int) -> NDArray[np.bool_]:
    """Which rows share a raw sample with any of the others.

    >>> overlapping(np.array([0, 100, 200]), np.array([250]), 200).tolist()
    [False, True, True]
    """
    # The others strictly between start - reach and start + reach are ordered[first:last]; sorting
    # them once makes this n log n rather than all pairs.
    ordered = np.sort(others)
    first = np.searchsorted(ordered, start - reach, side="right")
    last = np.searchsorted(ordered, start + reach, side="left")
    return np.asarray(last > first)
