"""The fields that nearly every method has: the mean, the objective, the recipe and the codec."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire.codec import Codec, Smallest
from .aggregate import Averaging, WeightedMean
from .local import LocalTraining
from .objective import Objective, ProblemLoss


@dataclass(frozen=True, kw_only=True)
class CommonParts:
    """Four fields and nothing else: a method inherits them and adds its own.

    They are keyword-only, so that a method's own fields come first: ``FixedPrune(0.5)``.
    """

    mean: Averaging = WeightedMean()
    """How the clients' packets are averaged."""
    objective: Objective = ProblemLoss()
    """What local training minimises."""
    local: LocalTraining | None = None
    """How clients train; None takes the data set's own recipe."""
    codec: Codec = Smallest()
    """How packets are encoded."""
