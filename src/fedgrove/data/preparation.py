"""How raw inputs become the inputs of a network, so that a device can repeat it.

Pixels are standardised by constants of the whole set, all other channels by the mean and standard
deviation of a client's own training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import check
from .dataset import Array, Dataset, Ints

Floats32 = NDArray[np.float32]


@dataclass(frozen=True)
class Preparation:
    """What is done to raw inputs, and what the outputs mean; an empty one changes nothing.

    A client that standardises by its own training data has its own preparation:
    :meth:`Federation.preparation_of` returns that or the common one.

    Args:
        mean: The mean of each channel; an input becomes (raw - mean) / std. None: no change.
        std: The standard deviation of each channel.
        labels: The names of the outputs, in order.
        window: The number of samples of a window, if windows were cut from recordings.
        rate: Samples per second that recordings were resampled to. None: they were not.
        channels: The names of the channels, in order.
        shape: The shape of one input, channels first. None: not known.
        ahead: If the targets are the samples that follow the input, their number per channel; they
            are standardised as the input is.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None
    window: int | None = None
    channels: tuple[str, ...] | None = None
    shape: tuple[int, ...] | None = None
    ahead: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std", "labels", "channels", "shape"):
            value = getattr(self, name)
            if value is not None:
                # The class is frozen; JSON has lists where the fields are tuples.
                object.__setattr__(self, name, tuple(value))
        both_or_none = (self.mean is None) == (self.std is None)
        check(both_or_none, "std", self.std, "given together with mean, or None together with it")
        if self.mean is None or self.std is None:
            return
        check(len(self.mean) == len(self.std), "std", len(self.std), f"{len(self.mean)} numbers")
        check(all(value > 0 for value in self.std), "std", self.std, "above 0")
        if self.shape is not None:
            channels = self.shape[0] if self.shape else 1
            check(len(self.mean) == channels, "mean", self.mean, f"a number for each of {channels}")

    @property
    def changes_nothing(self) -> bool:
        """Whether a data set's inputs stay as they are."""
        return self.mean is None

    def apply(self, raw: Any) -> Floats32:
        """Prepare a batch of raw inputs (n, *shape), channels first, exactly as in training.

        >>> Preparation(mean=(1.0, 0.0), std=(2.0, 1.0)).apply([[3.0, 4.0]]).tolist()
        [[1.0, 4.0]]
        """
        x = np.array(raw, dtype=np.float32)
        is_batch = self.shape is None or x.shape[1:] == self.shape
        check(is_batch, "the shape of the input", x.shape, f"a batch of inputs {self.shape}")
        return self.scale(x)

    def scale(self, x: Floats32) -> Floats32:
        """Standardise the channels of a batch of input data (n, C, ...) in place."""
        if not self.changes_nothing:
            shift, factor = self.shift_and_factor(x.ndim)
            x -= shift
            x *= factor
        return x

    def shift_and_factor(self, dimensions: int) -> tuple[Floats32, Floats32]:
        """Return what is subtracted from a batch of inputs, and what it is multiplied by then."""
        assert self.mean is not None
        assert self.std is not None
        # Channels are the second axis, behind the batch.
        shape = (1, -1, *(1,) * (dimensions - 2))
        # The inverse in float64 first, then float32: training and devices round alike.
        shift = np.array(self.mean, dtype=np.float64).astype(np.float32).reshape(shape)
        factor = (1 / np.array(self.std, dtype=np.float64)).astype(np.float32).reshape(shape)
        return shift, factor

    def to_json(self) -> dict[str, Any]:
        """Return the data preparation as plain numbers, texts and lists, with every bit."""
        found = {}
        for name, value in asdict(self).items():
            if isinstance(value, tuple):
                value = list(value)
            if value is not None:
                found[name] = value
        return found

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Preparation:
        """Read the data preparation that :meth:`to_json` returned.

        >>> Preparation.from_json(Preparation(labels=("walk", "sit")).to_json()).labels
        ('walk', 'sit')
        """
        known = cls.__dataclass_fields__
        others = sorted(set(document) - set(known))
        check(not others, "the entries of a preparation", others, f"of {', '.join(known)}")
        return cls(**document)


IDENTITY = Preparation()
"""Changes nothing."""


# ---- from data to a preparation ------------------------------------------------------------------


def channel_statistics(x: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of each channel of the data x (n, C, ...).

    A constant channel has the deviation 1, so that it is only centred.
    """
    # Sums in float64: in float32 the sums of many windows lose digits.
    axes = (0, *range(2, x.ndim))
    mean = x.mean(axis=axes, dtype=np.float64)
    deviation = x.std(axis=axes, dtype=np.float64)
    # The deviation of a constant channel may be a rounding error; dividing by it would blow the
    # error up to the size of a signal.
    varies = deviation > 1e-6 * (1 + np.abs(mean))
    return mean, np.where(varies, deviation, 1.0)


def fit_preparation(dataset: Dataset, rows: Ints | None, standardise: bool) -> Preparation:
    """Return the preparation of the inputs of a data set.

    Images become x / top, then (x - mean) / deviation with the constants of the set. All other
    inputs are standardised by the channel statistics of ``rows``.

    Args:
        dataset: The data set.
        rows: A client's training rows, never its test rows. None: only what all clients share.
        standardise: False leaves inputs as they are; images are only divided by ``top``.
    """
    mean = None
    std = None
    if dataset.pixels is not None:
        pixels = dataset.pixels
        mean = np.zeros(len(pixels.mean))
        std = np.full(len(pixels.mean), pixels.top)
        if standardise:
            # (x / top - mean) / deviation, as one shift and one factor on the raw values.
            mean = np.array(pixels.mean) * pixels.top
            std = np.array(pixels.deviation) * pixels.top
    elif standardise and rows is not None:
        mean, std = channel_statistics(dataset.x[rows])
    preparation = Preparation(
        labels=dataset.labels,
        window=dataset.window,
        rate=dataset.rate,
        channels=dataset.channels or None,
        shape=dataset.x.shape[1:],
        ahead=dataset.ahead or None,
    )
    if mean is None or std is None:
        return preparation
    changes_nothing = bool((mean == 0).all()) and bool((std == 1).all())
    if changes_nothing:
        return preparation
    return replace(preparation, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
