"""What a file is worth: its size, its accuracy, and how long an example takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bench.device import timed
from .formats import Predict

TURNS, TURN_SECONDS = 15, 0.004


@dataclass(frozen=True)
class Row:
    """One version of a model: dense (full width), shrunk, or int8 (shrunk and quantised)."""

    version: str
    params: int
    macs: int
    bytes: int
    latency_us: float
    """Processor time of one example, the shortest of some turns; it depends on the machine."""
    latency: float
    """The same to the dense model's."""
    accuracy: float
    """On the client's own test examples."""
    file: str | None = None
    int8: tuple[float, float] | None = (0.0, 0.0)
    """The shares of weights and of MACs in int8; None where the writer does not say."""

    @property
    def shares(self) -> str:
        """The same in percent, weights / MACs; empty for float."""
        if self.int8 is None:
            return "not known"
        return " / ".join(f"{100 * share:.1f}" for share in self.int8) if any(self.int8) else ""


@dataclass(frozen=True)
class Exported:
    """What was written for one client, and what it is worth."""

    client: int
    to: str
    folder: Path
    rows: tuple[Row, ...]
    card: str
    difference: float
    """The largest difference to torch's logits on the test data, to the largest of these if that is above 1."""
    accuracy_torch: float
    same_int8: float | None
    """The share of all the client's examples on which int8 names the class that the shrunk model names."""
    notes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """The same, as ``--json`` prints it."""
        return {**asdict(self), "folder": str(self.folder)}


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The share of rows whose largest logit is at ``y``.

    >>> accuracy(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1]))
    0.5
    """
    return float((logits.argmax(1) == y).double().mean())


def spread_out(x: Tensor, most: int) -> Tensor:
    """At most so many rows, evenly spaced.

    >>> spread_out(torch.arange(10), 5).tolist()
    [0, 2, 4, 6, 8]
    """
    return x if len(x) <= most else x[torch.arange(most) * len(x) // most]


def latencies(predicts: Mapping[str, Predict], x: Tensor) -> dict[str, float]:
    """Microseconds of each on ``x``: all take turns, each many times in a turn, and the shortest turn counts."""

    def calling(predict: Predict, times: int) -> Callable[[], object]:
        return lambda: [predict(x) for _ in range(times)]

    trial = timed({version: calling(predict, 3) for version, predict in predicts.items()}, 1)
    calls = max(1, round(TURN_SECONDS / max(*(t / 3 for (t,) in trial.values()), 1e-6)))
    found = timed(
        {version: calling(predict, calls) for version, predict in predicts.items()}, TURNS
    )
    return {version: 1e6 * min(turns) / calls for version, turns in found.items()}
