"""Long recordings cut into windows that never cross a change of user or activity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import InputError
from .dataset import Array, Dataset, Ints, ids, positions, runs

PIECES = 5
"""A run is held out a piece at a time; five pieces make one of them a fifth."""

LEAST = 3
"""Windows in a piece: both neighbours may be held out and one is still left."""


def starts(run: Ints, length: int, step: int) -> Ints:
    """First sample of every window that lies within one run.

    >>> starts(np.array([0] * 5 + [1] * 3), length=3, step=1).tolist()
    [0, 1, 2, 5]
    """
    edges = (
        np.flatnonzero(np.r_[True, np.diff(run) != 0]) if len(run) else np.zeros(0, dtype=np.int64)
    )
    ends = np.r_[edges[1:], len(run)]
    found = [np.arange(a, b - length + 1, step) for a, b in zip(edges, ends, strict=True)]
    return np.concatenate([*found, np.zeros(0)]).astype(np.int64)


def pieces(run: Ints) -> Ints:
    """Cut the windows of every run into at most five contiguous pieces of at least three windows.

    >>> pieces(np.array([0] * 7 + [1] * 2)).tolist()
    [0, 0, 0, 0, 1, 1, 1, 2, 2]
    """
    n = np.bincount(run, minlength=1)[run] if len(run) else run
    count = np.clip(n // LEAST, 1, PIECES)
    return ids(run * PIECES + positions(run) * count // np.maximum(n, 1))


def windowed(
    signal: Array,
    y: Array,
    user: Array,
    labels: Sequence[str],
    length: int,
    step: int,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """A dataset of windows (C, length) from samples (n, C), ``step`` apart, one user and one label in each.

    Since no window crosses a change of label, its majority label is the label of its first sample.
    """
    run = runs(user, y)
    start = starts(run, length, step)
    if not len(start):
        raise InputError(
            f"no user does one thing for {length} samples on end, one window; get the whole recording."
        )
    x = np.lib.stride_tricks.sliding_window_view(signal, length, axis=0)[start]
    label, piece = y[start].astype(np.int64), pieces(ids(run[start]))
    return Dataset(x, label, tuple(labels), ids(user[start]), piece, start, length, notes=notes)
