"""Split every client's rows into train, validation and test, by single rows or whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import check
from ..seeds import numpy_rng
from .dataset import Dataset, Ints, overlapping

KINDS = ("blocks", "random")
TEST = 0.2
"""Share of a client's rows held out for test."""
VALIDATION = 0.1
"""Share held out for validation unless told otherwise, of what is left after the test part."""
MOST_VALIDATION = 0.5
"""The largest share that may be asked for: training has at least as much as validation."""


@dataclass(frozen=True)
class Rows:
    """Row numbers of one client's three parts."""

    train: Ints
    validation: Ints
    test: Ints


def check_validation(share: float) -> None:
    """Refuse a share of validation data that cannot be held out."""
    allowed = f"from 0, which means none, to {MOST_VALIDATION}"
    check(0 <= share <= MOST_VALIDATION, "validation", share, allowed)


def split(
    dataset: Dataset, owned: Sequence[Ints], kind: str, seed: int, validation: float = VALIDATION
) -> list[Rows]:
    """Split the rows of every client, stratified by label, by a draw for each seed and client.

    ``validation`` is a share of what is left after the test part, which does not depend on it.
    With ``blocks``, whole blocks are held out for test and for validation. Windows that overlap any
    client's test windows are dropped from training and validation, those that overlap any client's
    validation windows from training: no raw sample is on both sides. A part may be empty: the
    caller decides what becomes of such a client.
    """
    # One generator per client: the draws of a client do not depend on how many others there are.
    rngs = [numpy_rng(seed, "split", client) for client in range(len(owned))]
    splits = []
    if kind == "random":
        for rows, rng in zip(owned, rngs, strict=True):
            splits.append(_random(dataset.y, rows, rng, validation))
        return splits

    # The held-out parts of all clients come first: clients may share a recording, so what a client
    # trains on must not overlap the held-out windows of another either.
    tests = []
    for rows, rng in zip(owned, rngs, strict=True):
        tests.append(_blocks(dataset, rows, TEST, rng))
    all_tests = _joined(tests)
    rests = []
    validations = []
    for rows, test, rng in zip(owned, tests, rngs, strict=True):
        rest = _without_overlap(dataset, np.setdiff1d(rows, test), all_tests)
        rests.append(rest)
        validations.append(_validation_blocks(dataset, rest, validation, rng))
    all_validations = _joined(validations)
    for rest, held, test in zip(rests, validations, tests, strict=True):
        train = _without_overlap(dataset, np.setdiff1d(rest, held), all_validations)
        splits.append(Rows(train, np.sort(held), np.sort(test)))
    return splits


def _joined(parts: Sequence[Ints]) -> Ints:
    """All parts in one array; unlike np.concatenate alone, also of no parts at all."""
    return np.concatenate([*parts, np.zeros(0, dtype=np.int64)])


# ---- single rows ---------------------------------------------------------------------------------


def _random(y: Ints, rows: Ints, rng: np.random.Generator, share: float) -> Rows:
    """Hold out single rows: the first of every class after a shuffle."""
    # Sorted first, so that the draw depends on which rows a client has, not on their order.
    rows = rng.permutation(np.sort(rows))
    test_quota = {label: test_size(n, TEST) for label, n in _counts(y, rows).items()}
    test = _first(y, rows, test_quota)
    rest = rows[~np.isin(rows, test)]
    validation = rest[:0]
    if share > 0:
        validation = _first(y, rest, quotas(_counts(y, rest), share, 1, rng))
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
    """Share round(fraction * total), at least one, over the classes by largest remainder.

    ``spare`` examples of each class are never taken; where that leaves too few, the sum is smaller.
    """
    wanted = max(1, round(fraction * sum(counts.values())))
    quota = {}
    rank = {}
    for label, n in counts.items():
        quota[label] = min(int(fraction * n), max(n - spare, 0))
        # The largest remainder comes first, since it is the lowest when negated; ties at random.
        rank[label] = (quota[label] - fraction * n, rng.random())
    order = sorted(counts, key=lambda label: rank[label])
    missing = wanted - sum(quota.values())
    # One pass is the method of largest remainders; more are needed where classes are full.
    while missing > 0:
        not_full = [label for label in order if quota[label] < counts[label] - spare]
        if not not_full:
            break
        for label in not_full[:missing]:
            quota[label] += 1
            missing -= 1
    return quota


def _counts(y: Ints, rows: Ints) -> dict[int, int]:
    """How many of the rows have each label, in the order of the labels."""
    labels, n = np.unique(y[rows], return_counts=True)
    return dict(zip(labels.tolist(), n.tolist(), strict=True))


def _first(y: Ints, rows: Ints, quota: dict[int, int]) -> Ints:
    """The first rows of each class, as many as its quota says."""
    return _joined([rows[y[rows] == label][:n] for label, n in quota.items()])


# ---- whole blocks --------------------------------------------------------------------------------


def _blocks(dataset: Dataset, rows: Ints, share: float, rng: np.random.Generator) -> Ints:
    """The rows of the blocks held out: for every label, blocks that sum to about the share."""
    assert dataset.block is not None
    blocks, block, size = np.unique(dataset.block[rows], return_inverse=True, return_counts=True)
    label = majority(block, dataset.y[rows], len(blocks))
    chosen = []
    for c in np.unique(label):
        chosen.append(_about(share, np.flatnonzero(label == c), size, rng))
    return rows[np.isin(block, _joined(chosen))]


def majority(group: Ints, y: Ints, groups: int) -> Ints:
    """The most frequent label of every group, the lower one when two tie.

    >>> majority(np.array([0, 0, 0, 1]), np.array([2, 1, 2, 0]), 2).tolist()
    [2, 0]
    """
    classes = int(y.max(initial=0)) + 1
    # One bincount over (group, label) pairs written as one number counts all groups at once.
    table = np.bincount(group * classes + y, minlength=groups * classes).reshape(groups, classes)
    return np.asarray(table.argmax(axis=1), dtype=np.int64)


def _about(share: float, blocks: Ints, size: Ints, rng: np.random.Generator) -> Ints:
    """Blocks, in random order, as long as each brings the sum nearer to the share.

    The smallest one if all are too large; none of a single block, which stays in training. With a
    share of at most a half never all: the last one could not bring the sum nearer.
    """
    blocks = rng.permutation(blocks)
    if len(blocks) < 2:
        return blocks[:0]
    target = share * size[blocks].sum()
    total = 0
    taken = []
    for block in blocks:
        if abs(total + size[block] - target) < abs(total - target):
            taken.append(block)
            total += size[block]
    if not taken:
        taken = [blocks[np.argmin(size[blocks])]]
    return np.array(taken)


def _validation_blocks(
    dataset: Dataset, rest: Ints, share: float, rng: np.random.Generator
) -> Ints:
    """As test does, of what test left: so a class needs three blocks to have validation examples.

    Every such class gives a block, even where the sum is then far above the share. A share kept
    over all classes together would take blocks of some classes only; of just these training would
    have less, and a client that trains alone would do worse on them than it does on test.
    """
    if share == 0:
        return rest[:0]
    held = _blocks(dataset, rest, share, rng)
    # A block may hold more than one label. It goes back if training would lose one of them.
    assert dataset.block is not None
    kept = np.setdiff1d(rest, held)
    lost = held[~np.isin(dataset.y[held], dataset.y[kept])]
    return held[~np.isin(dataset.block[held], dataset.block[lost])]


def _without_overlap(dataset: Dataset, rows: Ints, others: Ints) -> Ints:
    """Those rows that share no raw sample with the others."""
    assert dataset.start is not None
    return rows[~overlapping(dataset.start[rows], dataset.start[others], dataset.reach)]
