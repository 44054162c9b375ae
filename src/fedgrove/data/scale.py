"""Raw values to float32: pixels by the set's own constants, sensor channels by the client's training windows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .dataset import Array, Dataset, Ints

Scaling = Callable[[Array], Tensor]


def scaling(dataset: Dataset, train: Ints, standardise: bool) -> Scaling:
    """The map from raw rows to inputs for a client whose training rows are ``train``.

    Images: x / top, then (x - mean) / deviation with the fixed constants of the set. All else: the mean and deviation
    of each channel over the client's own training rows, never its test rows; a channel that does not move is only
    centred. Without ``standardise`` images are divided by ``top`` and all else is left as it is.
    """
    if dataset.pixels is not None:
        p = dataset.pixels
        mean, deviation = (
            (p.mean, p.deviation) if standardise else ((0.0,) * len(p.mean), (1.0,) * len(p.mean))
        )
        return _affine(np.array(mean) * p.top, np.array(deviation) * p.top, dataset.x.ndim)
    channels = dataset.x.shape[1]
    if not standardise:
        return _affine(np.zeros(channels), np.ones(channels), dataset.x.ndim)
    axes = (0, *range(2, dataset.x.ndim))
    x = dataset.x[train]
    mean, deviation = x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)
    return _affine(
        mean, np.where(deviation > 1e-6 * (1 + np.abs(mean)), deviation, 1.0), dataset.x.ndim
    )


def _affine(mean: Array, deviation: Array, ndim: int) -> Scaling:
    shape = (1, -1, *(1,) * (ndim - 2))
    shift = torch.tensor(mean, dtype=torch.float32).reshape(shape)
    factor = torch.tensor(1 / deviation, dtype=torch.float32).reshape(shape)

    def scale(rows: Array) -> Tensor:
        x = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
        return x.sub_(shift).mul_(factor)

    return scale
