"""All examples of a data set in one place, before they are assigned to clients.

Also how recordings become examples: cutting them into windows, and making forecasts of windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Array = NDArray[Any]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_PIECES = 5
"""The largest number of pieces of a run. With five, one piece is the fifth held out for testing."""
MIN_WINDOWS = 3
"""The smallest number of windows in a piece: if both neighbours are held out, one window is left.
This holds if a window overlaps only the next one, with steps of half a window
(:func:`min_windows_in_piece`)."""
FORECAST_SAMPLES = 8
"""Samples of every channel that are forecast: .4 s at motion's 20 Hz, .16 s at UCI-HAR's 50 Hz."""
FORECAST_NOTE = (
    "forecasts the next {ahead} samples of every channel; errors are in standard deviations of the "
    "client's own training data, unless the data are not standardised"
)


@dataclass(frozen=True)
class Pixels:
    """How pixels become inputs: (x / top - mean) / deviation, with constants of the whole set.

    ``top`` is the largest raw value; ``mean`` and ``deviation`` have one value per channel.
    """

    top: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """A whole data set, one row per example.

    Args:
        x: Raw inputs (n, *shape), channels first.
        y: Labels (n,), indices into ``labels``. If the targets are not classes: all zeros, or
            labels that a split should hold out evenly.
        labels: The names of the outputs.
        user: The person each row comes from, numbered from 0; None if the set has no users.
        block: What a `blocks` split holds out together: a chain of overlapping windows or a
            contiguous piece of a longer run. None if there are no blocks; ``refusal`` says why.
        start: The time of each row: rows i and j share a raw sample if
            ``|start[i] - start[j]| < reach``.
        reach: See ``start``.
        pixels: Set for images; None if each client standardises its own channels.
        notes: Remarks that every federation of the set carries.
        kind: What the targets are: "classes", "labels" or "numbers".
        targets: The targets (n, L) if they are not classes, one column for each of ``labels``.
        ahead: Above 0 if the targets are this number of samples of every channel that follow the
            input, one channel after another. They are scaled as the client's inputs are.
        kinds: The kind of user of each row, if it is known; methods do not see it
            (:mod:`fedgrove.runs.summary`).
        refusal: Why the set cannot be split by blocks.
        names: The names of the users, by their number; empty if they have none.
        channels: The names of the channels; empty if they have none.
        window: The number of samples of a window, if windows were cut from recordings.
        rate: Samples per second, if recordings were resampled.
        is_test: Which rows are the test part that the set was published with, bool (n,); None if
            it has none, or its files do not tell.
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
    refusal: str = "its examples are not windows of a series, so they form no blocks"
    names: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    window: int | None = None
    rate: float | None = None
    is_test: NDArray[np.bool_] | None = None


# ---- numbering rows ------------------------------------------------------------------------------


def number_values(values: Array) -> Ints:
    """Number the distinct values of a data set's column 0, 1, ... in sorted order.

    >>> number_values(np.array([33, 7, 33])).tolist()
    [1, 0, 1]
    """
    # NumPy 2 may give the inverse in the shape of the values, NumPy 1 gives it flat.
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def number_runs(*columns: Array) -> Ints:
    """Number the runs of rows of a data set in which no column changes.

    >>> number_runs(np.array([1, 1, 1, 2]), np.array([5, 6, 6, 6])).tolist()
    [0, 1, 1, 2]
    """
    change = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    return np.cumsum(change)


def count_within_groups(group: Ints) -> Ints:
    """Return the position of every row of a data set within its group, in row order.

    >>> count_within_groups(np.array([4, 4, 9, 4])).tolist()
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


def find_overlaps(start: Ints, others: Ints, reach: int) -> NDArray[np.bool_]:
    """Find the rows that share a raw sample with any of the others.

    >>> find_overlaps(np.array([0, 100, 200]), np.array([250]), 200).tolist()
    [False, True, True]
    """
    # The others strictly between start - reach and start + reach are ordered[first:last]; sorting
    # them once makes this n log n rather than all pairs.
    ordered = np.sort(others)
    first = np.searchsorted(ordered, start - reach, side="right")
    last = np.searchsorted(ordered, start + reach, side="left")
    return np.asarray(last > first)


# ---- windows of recordings -----------------------------------------------------------------------


def find_window_starts(run: Ints, length: int, step: int) -> Ints:
    """Return the first sample of every window that lies within one run.

    >>> find_window_starts(np.array([0] * 5 + [1] * 3), length=3, step=1).tolist()
    [0, 1, 2, 5]
    """
    if len(run) == 0:
        return np.zeros(0, dtype=np.int64)
    begins = np.flatnonzero(np.r_[True, np.diff(run) != 0])
    ends = np.r_[begins[1:], len(run)]
    windows = []
    for begin, end in zip(begins, ends, strict=True):
        # Empty if the run is shorter than a window.
        windows.append(np.arange(begin, end - length + 1, step))
    return np.concatenate(windows).astype(np.int64)


def min_windows_in_piece(length: int, step: int) -> int:
    """Return how many windows a piece needs for one to be left if both neighbours are held out.

    >>> min_windows_in_piece(128, 64), min_windows_in_piece(128, 128), min_windows_in_piece(128, 1)
    (3, 1, 255)
    """
    # A window overlaps this number of the windows after it: as many are dropped on either side.
    following = (length - 1) // step
    return 2 * following + 1


def cut_into_pieces(run: Ints, least: int = MIN_WINDOWS) -> Ints:
    """Cut the windows of every run into at most five contiguous pieces of at least ``least``.

    >>> cut_into_pieces(np.array([0] * 7 + [1] * 2)).tolist()
    [0, 0, 0, 0, 1, 1, 1, 2, 2]
    """
    if len(run) == 0:
        return np.zeros(0, dtype=np.int64)
    n = np.bincount(run)[run]
    count = np.clip(n // least, 1, MAX_PIECES)
    # Whole division spreads the n windows over the pieces evenly, give or take one.
    piece = count_within_groups(run) * count // n
    return number_values(run * MAX_PIECES + piece)


def take_windows(signal: Array, start: Ints, length: int) -> Array:
    """Return the windows (n, C, length) of samples (n, C) that begin at ``start``."""
    # A view of all windows, of which only those wanted are copied; the window is its last axis.
    return np.lib.stride_tricks.sliding_window_view(signal, length, axis=0)[start]


def cut_windows(
    rows: Dataset, length: int, step: int, run: Ints | None = None, least: int = MIN_WINDOWS
) -> Dataset:
    """Cut the rows of recordings into windows; a window has the label of its first row.

    Args:
        rows: A data set in which every row is a moment: ``x`` has the shape (n, C).
        length: Rows per window.
        step: Rows from one window to the next.
        run: The number of each row's run; a window never crosses a change of it. By default a run
            is rows of one user with one label.
        least: The smallest number of windows in a block (:func:`cut_into_pieces`).

    Raises:
        InputError: No run is as long as a window.
    """
    if run is None:
        assert rows.user is not None
        run = number_runs(rows.user, rows.y)
    start = find_window_starts(run, length, step)
    if not len(start):
        raise InputError(
            f"no user does one activity for {length} samples without a break, which is one window; "
            f"use the complete recording."
        )
    return replace(
        rows,
        x=take_windows(rows.x, start, length),
        y=rows.y[start].astype(np.int64),
        user=None if rows.user is None else number_values(rows.user[start]),
        block=cut_into_pieces(number_values(run[start]), least),
        start=start,
        reach=length,
        # A number to predict is that of the last row.
        targets=None if rows.targets is None else rows.targets[start + length - 1],
    )


def make_forecast(windows: Dataset, ahead: int, channels: Sequence[str]) -> Dataset:
    """Turn windows (C, L + ahead) into inputs of L samples, whose targets are the rest.

    The targets of one channel follow those of another. ``windows.y``, the activity in a window,
    stays, so that a split holds out some of every activity.

    >>> x = np.arange(10.0).reshape(1, 2, 5)
    >>> made = make_forecast(Dataset(x, np.zeros(1, int), ("a",)), 2, ("x", "y"))
    >>> made.x.tolist(), made.targets.tolist()
    ([[[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]], [[3.0, 4.0, 8.0, 9.0]])
    >>> made.labels
    ('x +1', 'x +2', 'y +1', 'y +2')
    """
    labels = [f"{channel} +{step}" for channel in channels for step in range(1, ahead + 1)]
    return replace(
        windows,
        x=windows.x[:, :, :-ahead],
        labels=tuple(labels),
        kind="numbers",
        targets=windows.x[:, :, -ahead:].reshape(len(windows.x), -1),
        ahead=ahead,
        notes=(*windows.notes, FORECAST_NOTE.format(ahead=ahead)),
    )
