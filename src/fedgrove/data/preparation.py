"""How raw input becomes what a network was trained on, so that it can be done again elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, check


@dataclass(frozen=True)
class Preparation:
    """What was done to the inputs, and what the outputs mean; an empty one changes nothing.

    A client that standardises by its own training data has one of its own: take
    :meth:`Federation.preparation_of`, which knows both these and the common one.

    mean, std: of each channel; an input becomes (raw - mean) / std. None: it stays as it is.
    labels: the names of the outputs, in their order.
    window: how many samples a window has, where windows were cut from recordings.
    channels: the names of the channels, in their order.
    shape: of one input, channels first; None: not known, and one input is told from several by
        nothing but the number of channels.
    ahead: where targets are so many samples of every channel that follow the input, which are
        standardised as the input is.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None
    window: int | None = None
    channels: tuple[str, ...] | None = None
    shape: tuple[int, ...] | None = None
    ahead: int | None = None

    def __post_init__(self) -> None:
        for word in ("mean", "std", "labels", "channels", "shape"):
            value = getattr(self, word)
            if value is not None:
                # The class is frozen; JSON has lists where the fields are tuples.
                object.__setattr__(self, word, tuple(value))
        both = (self.mean is None) == (self.std is None)
        check(both, "std", self.std, "given together with mean, or None together with it")
        if self.mean is None or self.std is None:
            return
        check(len(self.mean) == len(self.std), "std", len(self.std), f"{len(self.mean)} numbers")
        check(all(value > 0 for value in self.std), "std", self.std, "above 0")

    @property
    def changes_nothing(self) -> bool:
        """Whether inputs stay as they are."""
        return self.mean is None

    def apply(self, raw: Any) -> NDArray[np.float32]:
        """Raw input as the network takes it, to the bit: one example or several, in float32.

        Where windows were cut from recordings, one may also come as it is recorded, a row for each
        moment: (window, channels).

        >>> Preparation(mean=(1.0, 0.0), std=(2.0, 1.0), shape=(2,)).apply([3.0, 4.0]).tolist()
        [1.0, 4.0]
        """
        x = np.array(raw, dtype=np.float32)
        x = self._channels_first(x)
        if self.mean is None or self.std is None:
            return x
        axis = self._channel_axis(x)
        shape = [1] * x.ndim
        shape[axis] = -1
        # The inverse first, then float32: the same roundings as in training (data.scale).
        shift = np.asarray(self.mean, dtype=np.float64).astype(np.float32).reshape(shape)
        factor = (1 / np.asarray(self.std, dtype=np.float64)).astype(np.float32).reshape(shape)
        x -= shift
        x *= factor
        return x

    def _channels_first(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The input in the shape that the network takes; another shape is refused."""
        if self.shape is None or _ends(x, self.shape):
            return x
        is_window = self.window is not None and len(self.shape) == 2
        if is_window and _ends(x, self.shape[::-1]):
            return np.ascontiguousarray(np.swapaxes(x, -1, -2))
        or_so = f" or {self.shape[::-1]}" if is_window else ""
        raise InputError(
            f"the input has the shape {x.shape}; one example is {self.shape}{or_so}, several are "
            f"(n, {', '.join(str(size) for size in self.shape)})."
        )

    def _channel_axis(self, x: NDArray[np.float32]) -> int:
        """The axis of the channels: the first of one input, the second of several."""
        assert self.mean is not None
        if self.shape is not None:
            return x.ndim - len(self.shape)
        axis = 1 if x.ndim > 1 and x.shape[1] == len(self.mean) else 0
        allowed = f"with {len(self.mean)} channels on the first axis, or the second of several"
        is_there = x.ndim > axis and x.shape[axis] == len(self.mean)
        check(is_there, "the shape of the input", x.shape, allowed)
        return axis

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, words and lists; no bit of a number is lost."""
        found = {}
        for word, value in asdict(self).items():
            if value is not None:
                found[word] = list(value) if isinstance(value, tuple) else value
        return found

    @classmethod
    def from_json(cls, document: Any) -> Preparation:
        """What :meth:`to_json` gave.

        >>> Preparation.from_json(Preparation(labels=("walk", "sit")).to_json()).labels
        ('walk', 'sit')
        """
        if not isinstance(document, Mapping):
            raise InputError(
                f"a preparation is a {type(document).__name__}; it must be a table of mean, std, "
                "labels, window, channels, shape and ahead."
            )
        known = cls.__dataclass_fields__
        others = sorted(str(word) for word in document if word not in known)
        check(not others, "a preparation's words", others, f"of {', '.join(known)}")
        try:
            return cls(**document)
        except TypeError as error:
            raise InputError(f"a preparation cannot be read ({error}).") from None


IDENTITY = Preparation()
"""Leaves everything as it is."""


def _ends(x: NDArray[np.float32], shape: tuple[int, ...]) -> bool:
    """Whether an array is one input of this shape, or several."""
    return x.shape == shape or (x.ndim == len(shape) + 1 and x.shape[1:] == shape)
