r"""FedProx: FedAvg whose clients stay near the model they got (Li et al., "Federated Optimization
in Heterogeneous Networks", MLSys 2020, Eq. 2).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(v; D_k) + mu/2 |v - w|^2 from w     -> Train(ProblemLoss + Proximal)
    w    = sum_k n_k w_k / sum_k n_k                              -> average
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Give, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.local import LocalTraining
from ..parts.objective import Objective, ProblemLoss, Proximal
from ..parts.one_model import (
    OneModel,
    average,
    deliver_model,
    dense_bytes,
    initial_model,
    send_model,
    train_cohort,
)
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class FedProx:
    """One model for all; a pull keeps clients near it while they train."""

    pull: Proximal = Proximal(mu=0.01)
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, setup: Setup) -> OneModel:
        """Start at the network's initial parameters."""
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
        """Train under the pull (Eq. 2) and send."""
        if verb == "train":
            return (Train(self.objective + self.pull, self.local), Give(send_model))
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg."""
        return dense_bytes(net.layout.size, cohort, rounds)
