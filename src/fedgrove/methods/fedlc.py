r"""FedLC: logits are calibrated by how often a client has each class (Zhang, Li, Li, Xu, Wu, Ding &
Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; client k has n_kc examples of class c::

    n_kc = counted on the client, and never sent                       -> LabelCounts
    w_k  = E epochs of min CE(z_c - tau n_kc^(-1/4); D_k) from w       -> Train(LogitCalibration)
    w    = sum_k n_k w_k / sum_k n_k                                   -> average

With tau = 0 this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Batches, Give, Measure, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.labels import LabelCounts, LogitCalibration
from ..parts.local import LocalTraining
from ..parts.one_model import (
    OneModel,
    average,
    deliver_model,
    dense_bytes,
    initial_model,
    send_model,
    train_cohort,
)
from ..problems import check_has_classes
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class FedLC:
    """One model for all; clients train with logits calibrated by how often they have a class."""

    objective: LogitCalibration = LogitCalibration()
    """In place of the usual loss, and not beside it."""
    mean: Averaging = WeightedMean()
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
        """Count the labels, train with calibrated logits and send."""
        if verb == "train":
            return (
                Measure(self.objective.labels, LabelCounts(), Batches("train")),
                Train(self.objective, self.local),
                Give(send_model),
            )
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg."""
        return dense_bytes(net.layout.size, cohort, rounds)
