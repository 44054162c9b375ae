"""The figures of an exported file: its size, its accuracy, and the time of one example."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..report.tables import Scores
from .formats import Predict

TURNS = 15
"""How many turns each version of a model has when it is timed."""
TURN_SECONDS = 0.004
"""About how long one turn of the slowest version takes."""
TRIAL_CALLS = 3
"""Calls from which the length of a turn is estimated."""


@dataclass(frozen=True)
class Row:
    """One version of a model: dense (full width), shrunk, or int8 (shrunk and quantised)."""

    version: str
    params: int
    macs: int
    bytes: int
    latency_us: float
    """Processor time of one example, that of the shortest turn; it depends on the machine."""
    latency: float
    """The ratio of that time to the dense model's."""
    score: float
    """In the metric of the run, on the client's own test examples."""
    file: str | None = None
    int8: tuple[float, float] | None = (0.0, 0.0)
    """The shares of weights and of MACs in int8; None where the writer does not report them."""

    @property
    def shares(self) -> str:
        """The shares of an exported model in int8 as percentages, weights / MACs.

        It is empty for float.
        """
        if self.int8 is None:
            return "not known"
        weights, macs = self.int8
        is_float = weights == 0 and macs == 0
        return "" if is_float else f"{100 * weights:.1f} / {100 * macs:.1f}"


@dataclass(frozen=True)
class Exported:
    """What was written for one client, and its figures."""

    client: int
    to: str
    folder: Path
    rows: tuple[Row, ...]
    card: str
    """The name of the model card; empty if no file was kept."""
    difference: float
    """The largest difference to torch's outputs on the test data.

    Relative to the largest of these outputs where that is above 1.
    """
    allowed: float
    """The largest such difference that is allowed."""
    metric: str
    """What ``score`` is, as accuracy, f1 or mae."""
    more_is_better: bool
    share: bool
    """Whether the score lies between 0 and 1 and is shown in percent."""
    score_torch: float
    same_int8: float | None
    """The share of equal predictions of int8 and the shrunk model, on all the client's examples;
    None without int8, and for numbers."""
    int8_gap: float | None
    """The mean difference between the outputs of int8 and of the shrunk model, on these."""
    notes: tuple[str, ...]
    name: str = ""
    """What the client is called; its number where it has no name."""

    @property
    def file(self) -> str:
        """The file that was kept: the float file if there are two, "" if there is none."""
        kept = [row.file for row in self.rows if row.file]
        return kept[0] if kept else ""

    @property
    def scores(self) -> Scores:
        """The metric, which formats scores for tables."""
        return Scores(self.metric, self.more_is_better, self.share)

    def json(self) -> dict[str, Any]:
        """What was exported, as ``--json`` prints it."""
        return {**asdict(self), "folder": str(self.folder)}


def spread_out(x: Tensor, most: int) -> Tensor:
    """Return at most ``most`` rows of ``x``, evenly spaced, to test an exported model.

    >>> spread_out(torch.arange(10), 5).tolist()
    [0, 2, 4, 6, 8]
    """
    return x if len(x) <= most else x[torch.arange(most) * len(x) // most]


# ---- time ----------------------------------------------------------------------------------------


def latencies(predicts: Mapping[str, Predict], x: Tensor) -> dict[str, float]:
    """Measure the microseconds that each exported version takes for ``x``, its shortest turn.

    The shortest, because other processes only ever add to a time.
    """
    trial = _seconds(predicts, x, TRIAL_CALLS, 1)
    slowest = max(seconds / TRIAL_CALLS for (seconds,) in trial.values())
    # One call is too short for the clock; a turn makes as many as take about TURN_SECONDS. The
    # lower bound is for calls so short that the clock reads 0.
    calls = max(1, round(TURN_SECONDS / max(slowest, 1e-6)))
    times = _seconds(predicts, x, calls, TURNS)
    return {version: 1e6 * min(turns) / calls for version, turns in times.items()}


def _seconds(
    predicts: Mapping[str, Predict], x: Tensor, calls: int, turns: int
) -> dict[str, list[float]]:
    """Processor time of ``calls`` predictions by each version, turn by turn.

    Of the processor, not the clock: on one thread these are the same, unless other processes want
    the core.
    """
    times: dict[str, list[float]] = {version: [] for version in predicts}
    for turn in range(turns + 1):
        # Every version within each turn, so that a change in the machine's load falls on all.
        for version, predict in predicts.items():
            began = time.process_time()
            for _ in range(calls):
                predict(x)
            elapsed = time.process_time() - began
            # Turn 0 warms up: it fills caches and lets runtimes allocate their memory.
            if turn > 0:
                times[version].append(elapsed)
    return times
