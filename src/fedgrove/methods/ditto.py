r"""Ditto: a personal model beside the global one (Li et al., "Ditto: Fair and Robust Federated
Learning Through Personalization", ICML 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; w global, v_k personal::

    w_k  = E epochs of min CE(w; D_k) from w                       -> Train(ProblemLoss)
    v_k  = E epochs of min CE(v; D_k) + mu/2 |v - w|^2 from v_k    -> Train(ProblemLoss + Proximal)
    w    = sum_k n_k w_k / sum_k n_k                               -> average

The paper's lambda is our ``mu``. A client uses v_k; before it has one, w. Only w_k travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Carry, Client, Edit, Give, Outcome, Packet, Report, Setup, Stage, Task, Train
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
    train_cohort,
)
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class Ditto:
    """A global model, and beside it a personal one pulled towards it."""

    pull: Proximal = Proximal(mu=0.1)
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, setup: Setup) -> OneModel:
        """Start at the network's initial parameters."""
        return initial_model(setup)

    def deliver(self, state: OneModel, client: int) -> Mapping[str, Packet]:
        """Every client gets the global model."""
        return deliver_model(state)

    def plan(self, state: OneModel, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return train_cohort(state, cohort)

    def fold(self, state: OneModel, reports: Iterable[Report]) -> OneModel:
        """The weighted mean is the next global model."""
        return average(state, reports, self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the global model, then the personal one; send the first, keep the second."""
        if verb == "train":
            return (
                # First of all, so that old and new clients have the same trees, and train at once.
                Edit(begin_personal),
                Train(self.objective, self.local),
                # `pull` is towards carry["model"], the global model as it was received.
                Train(self.objective + self.pull, self.local, start="personal", end="personal"),
                Give(send_and_keep),
            )
        return {"use": (Edit(use_personal),)}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg: the personal model does not travel."""
        return dense_bytes(net.layout.size, cohort, rounds)


def begin_personal(carry: Carry, client: Client) -> Carry:
    """A client's first personal model starts at the global one."""
    return {"personal": carry["model"], **carry}


def use_personal(carry: Carry, client: Client) -> Carry:
    """The client uses its personal model, once it has one."""
    rest = dict(carry)
    # Taken out, so that old and new clients are scored at once.
    own = rest.pop("personal", carry["model"])
    return {**rest, "model": own}


def send_and_keep(carry: Carry, client: Client) -> Outcome:
    """Send the global model, keep the personal one."""
    return Outcome({"model": Packet(carry["local"])}, memory={"personal": carry["personal"]})
