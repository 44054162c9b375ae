r"""FedNTD: clients keep what the shared model says of the classes an example is not of (Lee, Jeong,
Shin, Bae & Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(v; D_k) + beta KL~(w | v; D_k) from w    -> Train(NotTrueDistillation)
    w    = sum_k n_k w_k / sum_k n_k                                   -> average

KL~ leaves out every example's true class. With beta = 0 this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Give, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.local import LocalTraining
from ..parts.objective import Objective, ProblemLoss
from ..parts.one_model import (
    OneModel,
    average,
    deliver_model,
    dense_bytes,
    initial_model,
    send_model,
    train_cohort,
)
from ..parts.teacher import NotTrueDistillation
from ..problems import check_has_classes
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class FedNTD:
    """One model for all; clients learn without forgetting what it knows of other classes."""

    distil: NotTrueDistillation = NotTrueDistillation()
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, setup: Setup) -> OneModel:
        """Start at the network's initial parameters."""
        check_has_classes(setup.net.problem)
        return initial_model(setup)

    def deliver(self, state: OneModel, client: int) -> Mapping[str, Packet]:
        """Every client uses the model."""
        return deliver_model(state)

    def plan(self, state: OneModel, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return train_cohort(state, cohort)

    def fold(self, state: OneModel, reports: Iterable[Report]) -> OneModel:
        """The weighted mean is the next model."""
        return average(state, reports, self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the distillation and send."""
        if verb == "train":
            return (Train(self.objective + self.distil, self.local), Give(send_model))
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg: the teacher is the model that was received."""
        return dense_bytes(net.layout.size, cohort, rounds)
