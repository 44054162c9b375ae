"""Raw values to float32 inputs, standardised.

Pixels by constants of the set, sensor channels by statistics of the client's training windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dataset import Array, Dataset, Ints

Scaling = Callable[[Array], Tensor]


@dataclass(frozen=True)
class Constants:
    """Mean and deviation of each channel: an input is (raw - mean) / deviation."""

    mean: Array
    deviation: Array

    def scaling(self, ndim: int) -> Scaling:
        """The map from raw rows, of so many dimensions, to inputs."""
        return _affine(self.mean, self.deviation, ndim)

    @property
    def change_nothing(self) -> bool:
        """Whether inputs stay as they are."""
        return bool((self.mean == 0).all() and (self.deviation == 1).all())


def scaling(dataset: Dataset, train: Ints, standardise: bool) -> Scaling:
    """The map from raw rows to inputs for a client whose training rows are ``train``."""
    return constants(dataset, train, standardise).scaling(dataset.x.ndim)


def constants(dataset: Dataset, train: Ints, standardise: bool) -> Constants:
    """By what the inputs of a client are standardised whose training rows are ``train``.

    Images: x / top, then (x - mean) / deviation with the fixed constants of the set. All else: the
    mean and deviation of each channel over the client's own training rows, never its test rows; a
    constant channel is only centred. Without ``standardise`` images are divided by ``top`` and all
    else is left as it is.
    """
    pixels = dataset.pixels
    if pixels is not None:
        # (x / top - mean) / deviation, as one shift and one factor on the raw values.
        if not standardise:
            channels = len(pixels.mean)
            return Constants(np.zeros(channels), np.ones(channels) * pixels.top)
        mean = np.array(pixels.mean) * pixels.top
        return Constants(mean, np.array(pixels.deviation) * pixels.top)
    if not standardise:
        channels = dataset.x.shape[1]
        return Constants(np.zeros(channels), np.ones(channels))

    # Axis 1 holds the channels. Sums in float64: in float32 those of many windows lose digits.
    axes = (0, *range(2, dataset.x.ndim))
    x = dataset.x[train]
    mean = x.mean(axis=axes, dtype=np.float64)
    deviation = x.std(axis=axes, dtype=np.float64)
    # The deviation of a constant channel may be a rounding error; dividing by it would blow the
    # error up to the size of a signal.
    varies = deviation > 1e-6 * (1 + np.abs(mean))
    return Constants(mean, np.where(varies, deviation, 1.0))


def _affine(mean: Array, deviation: Array, ndim: int) -> Scaling:
    """The map (x - mean) / deviation in float32, with one mean and deviation per channel."""
    shape = (1, -1, *(1,) * (ndim - 2))
    shift = torch.tensor(mean, dtype=torch.float32).reshape(shape)
    factor = torch.tensor(1 / deviation, dtype=torch.float32).reshape(shape)

    def scale(rows: Array) -> Tensor:
        # In place, to spare two copies; indexing with rows has already made one of the set's data.
        x = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
        return x.sub_(shift).mul_(factor)

    return scale
