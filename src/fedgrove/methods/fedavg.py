r"""FedAvg: one model for all (McMahan et al., "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Alg. 1).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(w; D_k) from w         -> Train(ProblemLoss)
    w    = sum_k n_k w_k / sum_k n_k                 -> WeightedMean

Methods with one model that differ only in what clients do, or in how models are averaged, inherit
from :class:`FedAvg` and override that function.

- Shared: the model.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Give, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.one_model import (
    OneModel,
    average,
    deliver_model,
    dense_bytes,
    initial_model,
    send_model,
    train_cohort,
)
from ..parts.server import ServerOptimiser
from ..wire.codec import Codec, Dense


@dataclass(frozen=True, kw_only=True)
class FedAvg(CommonParts):
    """One model for all: the weighted mean of what the cohort trained."""

    codec: Codec = Dense()
    server: ServerOptimiser | None = None
    """What the server makes of the mean update; none: the mean is the next model."""

    def init(self, setup: Setup) -> OneModel:
        """Alg. 1, "initialize w_0"."""
        return initial_model(setup, self.server)

    def deliver(self, state: OneModel, client: int) -> Mapping[str, Packet]:
        """Every client uses the model."""
        return deliver_model(state)

    def plan(self, state: OneModel, cohort: Sequence[int]) -> list[Task]:
        """Alg. 1, "for each client k in S_t in parallel"."""
        return train_cohort(state, cohort)

    def fold(self, state: OneModel, reports: Iterable[Report]) -> OneModel:
        """Alg. 1, the last line of the round: the weighted mean is the next model."""
        return average(state, reports, self.mean, self.server)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Alg. 1, ClientUpdate: train and send; to use the model, nothing need be done."""
        if verb == "train":
            return (Train(self.objective, self.local), Give(send_model))
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """All parameters, 4 bytes each, down and up."""
        return dense_bytes(net.layout.size, cohort, rounds)
