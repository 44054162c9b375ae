r"""LG-FedAvg: the first layers stay at home, the last ones are averaged (Liang et al., "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", 2020, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; u the first layers, v the last ``shared`` layers::

    (u_k, v_k)  = E epochs of min CE from (u_k, v)    -> complete, Train, share_received
    v           = sum_k n_k v_k / sum_k n_k            -> average
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Edit, Give, Packet, Report, Stage, Start, Task, Train
from ..errors import check
from ..nets import Net
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..parts.personal import complete, share_received
from ..trees import pick
from ..wire.codec import Codec, Dense
from .fedavg import State, average, dense_bytes


@dataclass(frozen=True)
class LGFedAvg:
    """Own features under a head that all share; ``shared`` counts the last layers that have parameters."""

    shared: int = 2
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.shared >= 1, "shared", self.shared, "1 or more layers")

    def init(self, start: Start) -> State:
        """The last layers are shared."""
        return State(0, pick(start.params, start.layout.last(self.shared)))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Everybody gets the shared layers."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of the shared layers."""
        return average(state, reports)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Put the own layers under the shared ones, train all, send the shared ones."""
        join = Edit(complete)
        return {
            "train": (join, Train(self.objective, self.local), Give(share_received)),
            "use": (join,),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The parameters of the shared layers."""
        return dense_bytes(
            net.layout.count(set(net.layout.last(self.shared)) & set(net.layout.params)),
            cohort,
            rounds,
        )
