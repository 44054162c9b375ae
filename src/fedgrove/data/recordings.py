"""Prepare recordings before windows are cut: fill in empty cells, and bring them to one rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..errors import InputError, list_some, spell_option
from .arrays import SECONDS
from .dataset import Floats, Ints

EPOCHS = {"ns": 1e17, "us": 1e14, "ms": 1e11}
"""Larger times can only be of this unit: as seconds they lie more than a thousand years ahead."""
SAME_RATE = 1.1
"""Rates are the same if they differ by no more than this factor."""
MOST_UPSAMPLED = 20.0
"""A larger factor means that the times are in another unit, such as ms: these differ by 1000."""
MOST_DOWNSAMPLED = 500.0
"""The same for rates that become smaller, which they often do by more."""
PASSED = 0.8
"""The share of the new rate's band that the filter before it lets through."""


# ---- empty cells ---------------------------------------------------------------------------------


def fill_empty(signal: Floats, recording: Ints, fill: str) -> Floats:
    """Fill the empty cells of a user's recordings; NaN stays where a recording has no number.

    "previous" takes the next number where a recording begins with an empty cell.

    >>> fill_empty(np.array([[np.nan], [1.0], [np.nan], [3.0]]), np.zeros(4, int), "previous").T
    array([[1., 1., 1., 3.]])
    """
    columns = pd.DataFrame(signal)
    recordings = columns.groupby(recording)
    if fill == "zero":
        columns = columns.fillna(0.0)
    elif fill == "mean":
        columns = columns.fillna(recordings.transform("mean"))
    else:
        forward = recordings.ffill()
        columns = forward.fillna(forward.groupby(recording).bfill())
    filled: Floats = columns.to_numpy(np.float64)
    return filled


# ---- rates ---------------------------------------------------------------------------------------


def find_seconds(clock: Floats, unit: str | None) -> float:
    """Return the seconds of one unit of a recording's clock; epochs are recognised by their size.

    >>> find_seconds(np.array([1.7e12, 1.7e12 + 20]), None), find_seconds(np.array([0, 20]), "ms")
    (0.001, 0.001)
    """
    if unit is not None:
        return SECONDS[unit]
    usual = float(np.median(np.abs(clock)))
    for name, least in EPOCHS.items():
        if usual >= least:
            return SECONDS[name]
    return 1.0


def recorded_rates(clock: Floats, recording: Ints) -> pd.Series:
    """Return the usual number of rows per second of each recording, NaN if time stands still.

    >>> recorded_rates(np.array([0.0, 0.02, 0.04, 5.0, 5.1]), np.array([0, 0, 0, 1, 1])).tolist()
    [50.0, 10.0]
    """
    steps = pd.Series(clock).groupby(recording).diff()
    usual = steps.where(steps > 0).groupby(recording).median()
    # Times have rounding errors: .1 s after 5 s is .0999999999999996.
    return (1 / usual).round(9)


def list_rates(rates: Sequence[tuple[str, float]]) -> list[tuple[float, list[str]]]:
    """Group recordings of about the same rate, the highest rate first.

    >>> list_rates([("a", 25.0), ("b", 50.1), ("c", 50.0)])
    [(50.1, ['b', 'c']), (25.0, ['a'])]
    """
    groups: list[tuple[float, list[str]]] = []
    for name, rate in sorted(rates, key=lambda entry: (-entry[1], entry[0])):
        if not groups or groups[-1][0] > SAME_RATE * rate:
            groups.append((rate, []))
        if name not in groups[-1][1]:
            groups[-1][1].append(name)
    return groups


def describe_rates(groups: Sequence[tuple[float, list[str]]]) -> str:
    """Return the rates of a user's recordings with the names of these, for a message."""
    return ", ".join(f"{rate:.4g} Hz ({list_some(names, 3)})" for rate, names in groups)


@dataclass(frozen=True)
class Resampled:
    """Rows of recordings at equal distances in time."""

    signal: Floats
    clock: Floats
    nearest: Ints
    """The number of the row that is nearest in time."""


def resample(signal: Floats, clock: Floats, piece: Ints, rates: Floats, rate: float) -> Resampled:
    """Resample recordings, each piece without gaps by itself, by linear interpolation.

    If the rate becomes smaller, a low-pass filter first removes what the new rate cannot contain.

    Args:
        signal: The rows (n, channels), sorted by piece and time.
        clock: The time of each row in seconds.
        piece: The piece of each row.
        rates: The rate that each row was recorded at.
        rate: The rate of the result.

    >>> made = resample(np.array([[0.0], [2.0]]), np.array([0.0, 0.5]), np.zeros(2, int),
    ...                 np.array([2.0, 2.0]), 4)
    >>> made.signal.ravel().tolist(), made.nearest.tolist()
    ([0.0, 1.0, 2.0], [0, 0, 1])
    """
    parts = []
    begins = np.flatnonzero(np.r_[True, np.diff(piece) != 0])
    ends = np.r_[begins[1:], len(piece)]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        rows = slice(begin, end)
        parts.append(_resample_piece(signal[rows], clock[rows], float(rates[begin]), rate, begin))
    return Resampled(
        np.concatenate([part.signal for part in parts]),
        np.concatenate([part.clock for part in parts]),
        np.concatenate([part.nearest for part in parts]),
    )


def _resample_piece(
    signal: Floats, clock: Floats, recorded: float, rate: float, first: int
) -> Resampled:
    span = float(clock[-1] - clock[0])
    # The last row is kept where rounding errors put it just before the last new time.
    times = clock[0] + np.arange(int(span * rate + 1e-6) + 1) / rate
    known = clock
    if recorded > SAME_RATE * rate and len(clock) > 2 and span > 0:
        known, signal = _low_pass(signal, clock, recorded, rate)
    new = np.stack([np.interp(times, known, column) for column in signal.T], axis=1)
    middle = (clock[1:] + clock[:-1]) / 2
    nearest = first + np.searchsorted(middle, times - 1e-9 / rate)
    return Resampled(new, times, nearest.astype(np.int64))


def _low_pass(signal: Floats, clock: Floats, recorded: float, rate: float) -> tuple[Floats, Floats]:
    """Return times at equal distances, and the signal without what ``rate`` cannot contain."""
    from scipy.signal import butter, sosfiltfilt

    # A filter needs samples at equal distances.
    count = round((clock[-1] - clock[0]) * recorded) + 1
    even = np.linspace(clock[0], clock[-1], count)
    values = np.stack([np.interp(even, clock, column) for column in signal.T], axis=1)
    sections = butter(8, PASSED * rate / 2, fs=recorded, output="sos")
    # Forwards and backwards, so that nothing is delayed; scipy's own padding, if there are as many.
    usual = 3 * (2 * len(sections) + 1)
    filtered = sosfiltfilt(sections, values, axis=0, padlen=min(usual, count - 1))
    return even, np.asarray(filtered, dtype=np.float64)


def check_rates(
    groups: Sequence[tuple[float, list[str]]], rate: float, time: str, unit: str | None
) -> None:
    """Refuse to resample by so much that the times must be in another unit."""
    for recorded, names in (groups[0], groups[-1]):
        if recorded / MOST_DOWNSAMPLED <= rate <= recorded * MOST_UPSAMPLED:
            continue
        raise InputError(
            f"{spell_option('rate')} is {rate:g}, and {names[0]} has {recorded:.3g} rows per second"
            f" if '{time}' is in {unit or 's'}; give the unit of the times "
            f"({spell_option('time', f'{time}:ms')}, or s, us, ns), or a rate nearer to that of "
            "the recordings."
        )


def note_rates(
    groups: Sequence[tuple[float, list[str]]], rate: float | None, window: int | None
) -> tuple[str, ...]:
    """Note to which rate recordings were resampled, or that their rates differ."""
    if rate is not None:
        return (f"recordings are resampled to {rate:g} Hz, from {describe_rates(groups)}",)
    if len(groups) < 2 or window is None:
        return ()
    fastest = window / groups[0][0]
    slowest = window / groups[-1][0]
    return (
        f"recordings have different rates, if times are in seconds: {describe_rates(groups)}; a "
        f"window of {window} rows lasts {fastest:.3g} to {slowest:.3g} s: resample all to one rate "
        "with the option rate",
    )


def note_empty(counts: Mapping[str, int], rows: int, fill: str) -> tuple[str, ...]:
    """Note how many rows had empty cells, in which files, and what was done about it."""
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return ()
    listed = list_some([f"{name} {count}" for name, count in found.items()], 3)
    done = {
        "drop": "are left out",
        "zero": "have 0 there",
        "mean": "have the mean of the column in the recording there",
        "previous": "have the previous value of the column there",
    }[fill]
    return (f"{sum(found.values())} of {rows} rows have empty cells and {done}: {listed}",)
