r"""FedProx: FedAvg whose clients stay near the model they got (Li et al., "Federated Optimization in Heterogeneous
Networks", MLSys 2020, Eq. 2).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(v; D_k) + mu/2 |v - w|^2 from w     -> Train(CrossEntropy + Proximal)
    w    = sum_k n_k w_k / sum_k n_k                               -> average
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Give, Packet, Report, Stage, Start, Task, Train
from ..nets import Net
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective, Proximal
from ..wire.codec import Codec, Dense
from .fedavg import State, average, dense_bytes, send


@dataclass(frozen=True)
class FedProx:
    """One model for all; a pull keeps clients near it while they train."""

    pull: Proximal = Proximal(mu=0.01)
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, start: Start) -> State:
        """Start at the network's initial parameters."""
        return State(0, start.params)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Everybody gets the model."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean is the next model."""
        return average(state, reports)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the pull and send."""
        return {"train": (Train(self.objective + self.pull, self.local), Give(send)), "use": ()}[
            verb
        ]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg."""
        return dense_bytes(net.layout.size, cohort, rounds)
