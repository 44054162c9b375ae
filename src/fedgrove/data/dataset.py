"""All examples of a set in one place, before they are dealt to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pixels:
    """How images become numbers: (x / top - mean) / deviation, with one mean and deviation per channel of the set."""

    top: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """A whole set: what a row is, whose it is, and which rows share raw samples.

    Rows i and j overlap when ``|start[i] - start[j]| < reach``. A ``block`` is what a `blocks` split holds out
    together: a chain of overlapping windows, or a contiguous piece of a longer run. ``refusal`` says why there
    are none; ``pixels`` is set for images, None means that each client standardises its own channels.
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
    refusal: str = "its examples are not windows of a series, so there is nothing to keep together"


def ids(values: Array) -> Ints:
    """Number the distinct values 0, 1, ... in sorted order.

    >>> ids(np.array([33, 7, 33])).tolist()
    [1, 0, 1]
    """
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
    """The place of every row within its group, in row order.

    >>> positions(np.array([4, 4, 9, 4])).tolist()
    [0, 1, 0, 2]
    """
    order = np.argsort(group, kind="stable")
    firsts = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0]) if len(group) else order
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - np.repeat(firsts, np.diff(np.r_[firsts, len(group)]))
    return place


def overlapping(start: Ints, others: Ints, reach: int) -> NDArray[np.bool_]:
    """Which rows share a raw sample with any of the others.

    >>> overlapping(np.array([0, 100, 200]), np.array([250]), 200).tolist()
    [False, True, True]
    """
    ordered = np.sort(others)
    first = np.searchsorted(ordered, start - reach, side="right")
    last = np.searchsorted(ordered, start + reach, side="left")
    return np.asarray(last > first)
