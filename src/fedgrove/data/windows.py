"""Cut long recordings into windows that never cross a change of user or activity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import InputError
from .dataset import Array, Dataset, Ints, ids, positions, runs

PIECES = 5
"""Pieces of a run at most: one of five is the fifth that a client holds out for test."""
LEAST = 3
"""Windows in a piece at least: both neighbours may be held out and one is still left. This is so
where a window overlaps the next one only, with steps of half a window (:func:`least_in_piece`)."""


def starts(run: Ints, length: int, step: int) -> Ints:
    """First sample of every window that lies within one run.

    >>> starts(np.array([0] * 5 + [1] * 3), length=3, step=1).tolist()
    [0, 1, 2, 5]
    """
    if len(run) == 0:
        return np.zeros(0, dtype=np.int64)
    begins = np.flatnonzero(np.r_[True, np.diff(run) != 0])
    ends = np.r_[begins[1:], len(run)]
    windows = []
    for begin, end in zip(begins, ends, strict=True):
        # Empty where the run is shorter than a window.
        windows.append(np.arange(begin, end - length + 1, step))
    return np.concatenate(windows).astype(np.int64)


def least_in_piece(length: int, step: int) -> int:
    """How many windows a piece needs for one to be left where both neighbours are held out.

    >>> least_in_piece(128, 64), least_in_piece(128, 128), least_in_piece(128, 1)
    (3, 1, 255)
    """
    # A window overlaps so many of those that follow it: as many are dropped on either side.
    following = (length - 1) // step
    return 2 * following + 1


def pieces(run: Ints, least: int = LEAST) -> Ints:
    """Cut the windows of every run into at most five contiguous pieces of so many windows or more.

    >>> pieces(np.array([0] * 7 + [1] * 2)).tolist()
    [0, 0, 0, 0, 1, 1, 1, 2, 2]
    """
    if len(run) == 0:
        return np.zeros(0, dtype=np.int64)
    n = np.bincount(run)[run]
    count = np.clip(n // least, 1, PIECES)
    # Whole division spreads the n windows over the pieces evenly, give or take one.
    piece = positions(run) * count // n
    return ids(run * PIECES + piece)


def windowed(
    signal: Array,
    y: Array,
    user: Array,
    labels: Sequence[str],
    length: int,
    step: int,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """A dataset of windows (C, length) from samples (n, C), ``step`` apart.

    A window has one user and one label, so its label is that of its first sample.
    """
    run = runs(user, y)
    start = starts(run, length, step)
    if not len(start):
        raise InputError(
            f"no user does one activity for {length} samples without a break, which is one window; "
            f"get the whole recording."
        )
    # A view of all windows, of which only those wanted are copied; the window is its last axis.
    x = np.lib.stride_tricks.sliding_window_view(signal, length, axis=0)[start]
    return Dataset(
        x,
        y[start].astype(np.int64),
        tuple(labels),
        user=ids(user[start]),
        block=pieces(ids(run[start])),
        start=start,
        reach=length,
        notes=notes,
    )
