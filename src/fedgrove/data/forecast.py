"""Forecasts: windows whose targets are the samples that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .dataset import Dataset

AHEAD = 8
"""Samples that are forecast, of every channel: .4 s at motion's 20 Hz, .16 s at UCI-HAR's 50."""


def forecast(windows: Dataset, ahead: int, channels: Sequence[str]) -> Dataset:
    """Of windows (C, L + ahead): inputs are the first L samples, targets the rest.

    Targets stand one channel after another. ``windows.y``, what was done in a window, stays: a
    split holds out some of everything.

    >>> import numpy as np
    >>> x = np.arange(10.0).reshape(1, 2, 5)
    >>> made = forecast(Dataset(x, np.zeros(1, int), ("a",)), 2, ("x", "y"))
    >>> made.x.tolist(), made.targets.tolist()
    ([[[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]], [[3.0, 4.0, 8.0, 9.0]])
    >>> made.labels
    ('x +1', 'x +2', 'y +1', 'y +2')
    """
    labels = []
    for channel in channels:
        labels += [f"{channel} +{step + 1}" for step in range(ahead)]
    return replace(
        windows,
        x=windows.x[:, :, :-ahead],
        labels=tuple(labels),
        kind="numbers",
        targets=windows.x[:, :, -ahead:].reshape(len(windows.x), -1),
        ahead=ahead,
        notes=(*windows.notes, FORECAST.format(ahead=ahead)),
    )


FORECAST = (
    "forecasts the next {ahead} samples of every channel; errors are in deviations of the "
    "client's own training data, unless these are not standardised"
)
