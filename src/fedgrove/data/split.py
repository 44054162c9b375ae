"""Split every client's rows into train, validation and test.

By single rows, by whole blocks, or with the test part that the set was published with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import check
from ..options.groups import VALIDATION
from ..renamed import find_old_names
from ..seeds import numpy_rng
from .dataset import Dataset, Ints, find_overlaps

SPLITS = ("blocks", "random", "official")
TEST = 0.2
"""Share of a client's rows that is held out for testing."""
MAX_VALIDATION = 0.5
"""The largest share for validation: training has at least as many rows."""


@dataclass(frozen=True)
class SplitRows:
    """Row numbers of one client's three parts."""

    train: Ints
    validation: Ints
    test: Ints


def check_validation(share: float) -> None:
    """Refuse a share of validation data that cannot be held out."""
    allowed = f"from 0, which means none, to {MAX_VALIDATION}"
    check(0 <= share <= MAX_VALIDATION, "validation", share, allowed)


def split(
    dataset: Dataset, owned: Sequence[Ints], kind: str, seed: int, validation: float = VALIDATION
) -> list[SplitRows]:
    """Split the rows of every client, stratified by label; each client has its own random draws.

    With ``blocks``, whole blocks are held out for testing and for validation. Windows that overlap
    any client's test windows are dropped from training and validation, those that overlap any
    client's validation windows from training: no raw sample is on both sides.

    With ``official``, all rows of a client are for training and validation. Each client is tested
    on all rows of the set's own test part that have one of the client's labels.

    Args:
        dataset: The data set.
        owned: The rows of each client.
        kind: "random" holds out single rows, "blocks" whole blocks, "official" none.
        seed: The seed of the draws.
        validation: The share for validation, of the rows outside the test part. The test part does
            not depend on it.

    Returns:
        The parts of each client. A part may be empty: the caller decides what to do with such a
        client.
    """
    # One generator per client: the draws of a client do not depend on how many others there are.
    rngs = [numpy_rng(seed, "split", client) for client in range(len(owned))]
    clients = list(zip(owned, rngs, strict=True))
    if kind == "random":
        return [_split_rows(dataset.y, rows, rng, validation) for rows, rng in clients]
    if kind == "official":
        return [_add_official_test(dataset, rows, rng, validation) for rows, rng in clients]

    # The held-out parts of all clients come first: clients may share a recording, so what a client
    # trains on must not overlap the held-out windows of another either.
    tests = [_draw_blocks(dataset, rows, TEST, rng) for rows, rng in clients]
    all_tests = _join(tests)
    rests = []
    validations = []
    for rows, test, rng in zip(owned, tests, rngs, strict=True):
        rest = _drop_overlaps(dataset, np.setdiff1d(rows, test), all_tests)
        rests.append(rest)
        validations.append(_draw_validation_blocks(dataset, rest, validation, rng))
    all_validations = _join(validations)
    splits = []
    for rest, held_out, test in zip(rests, validations, tests, strict=True):
        train = _drop_overlaps(dataset, np.setdiff1d(rest, held_out), all_validations)
        splits.append(SplitRows(train, np.sort(held_out), np.sort(test)))
    return splits


def limit_train(y: Ints, part: SplitRows, most: int, rng: np.random.Generator) -> SplitRows:
    """Draw at most ``most`` training rows of a client; classes keep their shares.

    >>> y = np.array([0] * 8 + [1] * 4)
    >>> part = SplitRows(np.arange(12), np.zeros(0, int), np.zeros(0, int))
    >>> y[limit_train(y, part, 3, np.random.default_rng(0)).train].tolist()
    [0, 0, 1]
    """
    rows = part.train
    if len(rows) <= most:
        return part
    quota = divide_by_class(_count_labels(y, rows), most / len(rows), 0, rng)
    drawn = _take_first(y, rng.permutation(rows), quota)
    return replace(part, train=np.sort(drawn))


def _join(parts: Sequence[Ints]) -> Ints:
    """Concatenate row numbers of held-out parts; unlike np.concatenate, also if there are none."""
    return np.concatenate([*parts, np.zeros(0, dtype=np.int64)])


# ---- single rows ---------------------------------------------------------------------------------


def _split_rows(y: Ints, rows: Ints, rng: np.random.Generator, share: float) -> SplitRows:
    """Hold out single rows: the first of every class after a shuffle."""
    # Sorted first, so that the draw depends on which rows a client has, not on their order.
    rows = rng.permutation(np.sort(rows))
    quota = {label: test_size(n, TEST) for label, n in _count_labels(y, rows).items()}
    test = _take_first(y, rows, quota)
    return _hold_out_validation(y, rows[~np.isin(rows, test)], test, rng, share)


def _add_official_test(
    dataset: Dataset, rows: Ints, rng: np.random.Generator, share: float
) -> SplitRows:
    """Give a client all official test rows with one of its labels; hold out rows to validate."""
    assert dataset.is_test is not None
    has_label = np.isin(dataset.y, np.unique(dataset.y[rows]))
    test = np.flatnonzero(dataset.is_test & has_label)
    return _hold_out_validation(dataset.y, rng.permutation(np.sort(rows)), test, rng, share)


def _hold_out_validation(
    y: Ints, rest: Ints, test: Ints, rng: np.random.Generator, share: float
) -> SplitRows:
    """Divide the rows that are not for testing, which are in random order."""
    validation = rest[:0]
    if share > 0:
        quota = divide_by_class(_count_labels(y, rest), share, 1, rng)
        validation = _take_first(y, rest, quota)
    train = rest[~np.isin(rest, validation)]
    return SplitRows(np.sort(train), np.sort(validation), np.sort(test))


def test_size(n: int, fraction: float) -> int:
    """Return how many of n examples to hold out: the nearest whole number, at least one.

    They are never all held out.

    >>> [test_size(n, 0.2) for n in (1, 2, 3, 10, 12, 13)]
    [0, 1, 1, 2, 2, 3]
    """
    return min(max(round(fraction * n), 1), n - 1)


def divide_by_class(
    counts: dict[int, int], fraction: float, spare: int, rng: np.random.Generator
) -> dict[int, int]:
    """Divide round(fraction * total), at least one, among the classes by largest remainder.

    ``spare`` examples of each class are never taken; if too few are left, the sum is smaller.
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
    # One pass is the method of largest remainders; more are needed if classes are full.
    while missing > 0:
        not_full = [label for label in order if quota[label] < counts[label] - spare]
        if not not_full:
            break
        for label in not_full[:missing]:
            quota[label] += 1
            missing -= 1
    return quota


def _count_labels(y: Ints, rows: Ints) -> dict[int, int]:
    """Count how many of the rows have each label, in the order of the labels."""
    labels, n = np.unique(y[rows], return_counts=True)
    return dict(zip(labels.tolist(), n.tolist(), strict=True))


def _take_first(y: Ints, rows: Ints, quota: dict[int, int]) -> Ints:
    """Return the first rows of each class, the number in its quota."""
    return _join([rows[y[rows] == label][:n] for label, n in quota.items()])


# ---- whole blocks --------------------------------------------------------------------------------


def _draw_blocks(dataset: Dataset, rows: Ints, share: float, rng: np.random.Generator) -> Ints:
    """Return the rows of the blocks held out: for every label, blocks of about the share."""
    assert dataset.block is not None
    blocks, block, size = np.unique(dataset.block[rows], return_inverse=True, return_counts=True)
    label = majority_label(block, dataset.y[rows], len(blocks))
    labels = np.unique(label)
    chosen = [_draw_about(share, np.flatnonzero(label == c), size, rng) for c in labels]
    return rows[np.isin(block, _join(chosen))]


def majority_label(group: Ints, y: Ints, groups: int) -> Ints:
    """Return the most frequent label of every group of examples, the lower one in a tie.

    >>> majority_label(np.array([0, 0, 0, 1]), np.array([2, 1, 2, 0]), 2).tolist()
    [2, 0]
    """
    classes = int(y.max(initial=0)) + 1
    # One bincount over (group, label) pairs written as one number counts all groups at once.
    table = np.bincount(group * classes + y, minlength=groups * classes).reshape(groups, classes)
    return np.asarray(table.argmax(axis=1), dtype=np.int64)


def _draw_about(share: float, blocks: Ints, size: Ints, rng: np.random.Generator) -> Ints:
    """Take blocks in random order, as long as each brings the sum nearer to the share.

    The smallest one if all are too large; none if there is a single block, which stays in training.
    With a share of at most a half never all: the last one could not bring the sum nearer.
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


def _draw_validation_blocks(
    dataset: Dataset, rest: Ints, share: float, rng: np.random.Generator
) -> Ints:
    """Draw blocks of what testing left; a class needs three blocks to have validation examples.

    Every such class gives a block, even if the sum is then far above the share. A share over all
    classes together would take blocks of some classes only. Training would have less of just these
    classes, and a client that trains alone would do worse on them than it does on the test part.
    """
    if share == 0:
        return rest[:0]
    drawn = _draw_blocks(dataset, rest, share, rng)
    # A block may have more than one label. It goes back if training would lose one of them.
    assert dataset.block is not None
    kept = np.setdiff1d(rest, drawn)
    missing = drawn[~np.isin(dataset.y[drawn], dataset.y[kept])]
    return drawn[~np.isin(dataset.block[drawn], dataset.block[missing])]


def _drop_overlaps(dataset: Dataset, rows: Ints, others: Ints) -> Ints:
    """Return the rows that share no raw sample with the others."""
    assert dataset.start is not None
    return rows[~find_overlaps(dataset.start[rows], dataset.start[others], dataset.reach)]


__getattr__ = find_old_names(__name__)
