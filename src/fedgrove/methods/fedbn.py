r"""FedBN: normalisation stays at home (Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; u the norm layers' parameters and statistics, v the rest::

    (u_k, v_k)  = E epochs of min CE from (u_k, v)    -> complete, Train, share_received
    v           = sum_k n_k v_k / sum_k n_k            -> average

A client that has not trained yet uses the initial u. On a network without norm layers this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Edit, Give, Packet, Report, Stage, Start, Task, Train
from ..nets import Net
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..parts.personal import complete, share_received
from ..wire.codec import Codec, Dense
from .fedavg import State, average, dense_bytes


@dataclass(frozen=True)
class FedBN:
    """One model for all, except its norm layers, which every client keeps to itself."""

    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, start: Start) -> State:
        """What is not a norm layer's is shared."""
        return State(0, {k: v for k, v in start.params.items() if k not in start.layout.norms})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Everybody gets the shared part."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of the shared parts."""
        return average(state, reports)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Put the own norms in, train all, send all but the norms."""
        join = Edit(complete)
        return {
            "train": (join, Train(self.objective, self.local), Give(share_received)),
            "use": (join,),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The parameters outside the norm layers."""
        return dense_bytes(
            net.layout.count(set(net.layout.params) - set(net.layout.norms)), cohort, rounds
        )
