r"""MOON: features stay near the shared model's, away from the client's last ones (Li, He & Song,
"Model-Contrastive Federated Learning", CVPR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; p_k is what client k trained last::

    w_k  = E epochs of min CE(v; D_k) + mu l_con(v; w, p_k) from w     -> Train(ModelContrast)
    p_k  = w_k, which the client keeps                                 -> send_and_keep
    w    = sum_k n_k w_k / sum_k n_k                                   -> average

Who trains for the first time has p_k = w: the term is then constant. With mu = 0 this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Carry, Client, Edit, Give, Outcome, Packet, Report, Setup, Stage, Task, Train
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
    train_cohort,
)
from ..parts.teacher import ModelContrast, check_has_features
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class MOON:
    """One model for all; its features are contrasted with those a client had before."""

    contrast: ModelContrast = ModelContrast()
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, setup: Setup) -> OneModel:
        """Start at the network's initial parameters."""
        check_has_features(setup.layout)
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
        """Alg. 1, PartyLocalTraining: train against the last model, send, and keep the new one."""
        if verb == "train":
            return (
                # First of all, so that old and new clients have the same trees, and train at once.
                Edit(begin_previous),
                Train(self.objective + self.contrast, self.local),
                Give(send_and_keep),
            )
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg: the last model stays with the client."""
        return dense_bytes(net.layout.size, cohort, rounds)


def begin_previous(carry: Carry, client: Client) -> Carry:
    """A client that never trained takes the model it got for its last one."""
    return {"previous": carry["model"], **carry}


def send_and_keep(carry: Carry, client: Client) -> Outcome:
    """Send what was trained, and keep it to be contrasted with."""
    return Outcome({"model": Packet(carry["local"])}, memory={"previous": carry["local"]})
