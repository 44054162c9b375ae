r"""FedAvg: one model for all (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Alg. 1).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(w; D_k) from w         -> Train(CrossEntropy)
    w    = sum_k n_k w_k / sum_k n_k                  -> Mean
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Carry, Client, Give, Outcome, Packet, Report, Stage, Start, Task, Train
from ..nets import Net
from ..parts.aggregate import Mean
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..trees import Tree
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    """The round and the one model."""

    round: int
    model: Tree


@dataclass(frozen=True)
class FedAvg:
    """One model for all: the weighted mean of what the cohort trained."""

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
        """Train and send; to use the model, nothing need be done."""
        return {"train": (Train(self.objective, self.local), Give(send)), "use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """All parameters, 4 bytes each, down and up."""
        return dense_bytes(net.layout.size, cohort, rounds)


def average(state: State, reports: Iterable[Report]) -> State:
    """The weighted mean of the reported models, report by report."""
    mean = Mean()
    for report in reports:
        mean.add(report.give["model"].values, report.examples)
    return State(state.round + 1, mean.value())


def dense_bytes(numbers: int, cohort: int, rounds: int) -> int:
    """``numbers`` float32 values down and up again, per client of the cohort and round."""
    return 2 * 4 * numbers * cohort * rounds


def send(carry: Carry, client: Client) -> Outcome:
    """The client sends what it trained."""
    return Outcome({"model": Packet(carry["local"])})
