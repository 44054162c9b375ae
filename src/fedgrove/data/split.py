"""Train, validation and test of every client: rows, or whole blocks so that no raw sample is on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..seeds import numpy_rng
from .dataset import Dataset, Ints, ids, overlapping

KINDS = ("blocks", "random")
TEST = 0.2
VALIDATION = 0.1
"""Of what is left after the test part."""


@dataclass(frozen=True)
class Rows:
    """Row numbers of one client's three parts."""

    train: Ints
    validation: Ints
    test: Ints


def split(dataset: Dataset, owned: Sequence[Ints], kind: str, seed: int) -> list[Rows]:
    """Split the rows of every client, stratified by label; the draw depends on seed and client alone.

    With ``blocks``, whole blocks are held out and windows that overlap any client's test windows are dropped from
    training and validation; validation is cut from the edge of a block and its overlapping neighbours are dropped too.
    A part may be empty: whoever calls decides what becomes of such a client.
    """
    rngs = [numpy_rng(seed, "split", k) for k in range(len(owned))]
    if kind == "random":
        return [_random(dataset.y, rows, rng) for rows, rng in zip(owned, rngs, strict=True)]
    tests = [_held_blocks(dataset, rows, rng) for rows, rng in zip(owned, rngs, strict=True)]
    out = np.concatenate([*tests, np.zeros(0, dtype=np.int64)])
    rests = [
        _apart(dataset, np.setdiff1d(rows, test), out)
        for rows, test in zip(owned, tests, strict=True)
    ]
    return [
        _edge(dataset, rest, test, rng) for rest, test, rng in zip(rests, tests, rngs, strict=True)
    ]


def _random(y: Ints, rows: Ints, rng: np.random.Generator) -> Rows:
    rows = rng.permutation(np.sort(rows))
    test = _first(y, rows, {c: test_size(n, TEST) for c, n in _counts(y, rows).items()})
    rest = rows[~np.isin(rows, test)]
    validation = _first(y, rest, quotas(_counts(y, rest), VALIDATION, 1, rng))
    train = rest[~np.isin(rest, validation)]
    return Rows(np.sort(train), np.sort(validation), np.sort(test))


def test_size(n: int, fraction: float) -> int:
    """How many of n to hold out: the nearest whole number, at least one, never all.

    >>> [test_size(n, 0.2) for n in (1, 2, 3, 10, 12, 13)]
    [0, 1, 1, 2, 2, 3]
    """
    return min(max(round(fraction * n), 1), n - 1)


def quotas(
    counts: dict[int, int], fraction: float, spare: int, rng: np.random.Generator
) -> dict[int, int]:
    """Share round(fraction * total), at least one, over the classes by largest remainder; ``spare`` of each stay."""
    wanted = max(1, round(fraction * sum(counts.values())))
    quota = {c: min(int(fraction * n), max(n - spare, 0)) for c, n in counts.items()}
    order = sorted(counts, key=lambda c: (quota[c] - fraction * counts[c], rng.random()))
    while sum(quota.values()) < wanted and any(quota[c] < counts[c] - spare for c in counts):
        for c in order:
            quota[c] += int(sum(quota.values()) < wanted and quota[c] < counts[c] - spare)
    return quota


def _counts(y: Ints, rows: Ints) -> dict[int, int]:
    labels, n = np.unique(y[rows], return_counts=True)
    return dict(zip(labels.tolist(), n.tolist(), strict=True))


def _first(y: Ints, rows: Ints, quota: dict[int, int]) -> Ints:
    """The first rows of each class, as many as its quota says."""
    picked = [rows[y[rows] == c][:n] for c, n in quota.items()]
    return np.concatenate([*picked, np.zeros(0, dtype=np.int64)])


def _held_blocks(dataset: Dataset, rows: Ints, rng: np.random.Generator) -> Ints:
    """Rows of the blocks held out: for every label, those blocks whose sum comes near a fifth."""
    assert dataset.block is not None
    blocks, where, size = np.unique(dataset.block[rows], return_inverse=True, return_counts=True)
    label = majority(where, dataset.y[rows], len(blocks))
    chosen = [_near(np.flatnonzero(label == c), size, rng) for c in np.unique(label)]
    return rows[np.isin(where, np.concatenate([*chosen, np.zeros(0, dtype=np.int64)]))]


def majority(group: Ints, y: Ints, groups: int) -> Ints:
    """The most frequent label of every group, the lower one when two tie.

    >>> majority(np.array([0, 0, 0, 1]), np.array([2, 1, 2, 0]), 2).tolist()
    [2, 0]
    """
    classes = int(y.max(initial=0)) + 1
    table = np.bincount(group * classes + y, minlength=groups * classes).reshape(groups, classes)
    return np.asarray(table.argmax(axis=1), dtype=np.int64)


def _near(units: Ints, size: Ints, rng: np.random.Generator) -> Ints:
    """Units, in random order, as long as each brings the sum nearer to a fifth; the smallest if all are too large."""
    units, target, total = rng.permutation(units), TEST * size[units].sum(), 0
    if len(units) < 2:
        return units[:0]
    taken = []
    for unit in units:
        if abs(total + size[unit] - target) < abs(total - target):
            taken.append(unit)
            total += size[unit]
    return np.array(taken or [units[np.argmin(size[units])]])


def _apart(dataset: Dataset, rows: Ints, others: Ints) -> Ints:
    """Those rows that share no raw sample with the others."""
    assert dataset.start is not None
    return rows[~overlapping(dataset.start[rows], dataset.start[others], dataset.reach)]


def _edge(dataset: Dataset, rest: Ints, test: Ints, rng: np.random.Generator) -> Rows:
    """Cut validation from the beginning of randomly ordered blocks and drop the windows it overlaps."""
    assert dataset.block is not None
    assert dataset.start is not None
    block = ids(dataset.block[rest])
    order = rest[
        np.lexsort((dataset.start[rest], rng.permutation(block.max(initial=-1) + 1)[block]))
    ]
    validation = _first(dataset.y, order, quotas(_counts(dataset.y, rest), VALIDATION, 1, rng))
    train = _apart(dataset, np.setdiff1d(rest, validation), validation)
    # A class so small that all its training windows touch its validation windows goes back to training.
    validation = validation[np.isin(dataset.y[validation], dataset.y[train])]
    return Rows(
        _apart(dataset, np.setdiff1d(rest, validation), validation),
        np.sort(validation),
        np.sort(test),
    )
