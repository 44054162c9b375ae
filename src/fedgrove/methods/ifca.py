r"""IFCA: several models, every client trains the one that fits it best (Ghosh et al., "An Efficient Framework for
Clustered Federated Learning", NeurIPS 2020, Alg. 1, model averaging).

Round :math:`t`, cohort :math:`S_t`, models :math:`w^1..w^K` from K different starts::

    j_k  = argmin_j L_k(w^j), on the training data      -> Measure(Losses), choose
    w_k  = E epochs of min CE(w; D_k) from w^{j_k}       -> Train
    w^j  = sum_{k: j_k = j} n_k w_k / sum n_k            -> Mean

All K models travel down, one up. To use the model a client chooses anew. With one model this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core import Batches, Edit, Give, Measure, Packet, Report, Stage, Start, Task, Train
from ..errors import check
from ..nets import Net
from ..parts.aggregate import Mean
from ..parts.choose import Losses, choose, send_choice
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..trees import Tree
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    """The models, and which one each client chose last."""

    round: int
    models: dict[int, Tree]
    groups: dict[int, int]


@dataclass(frozen=True)
class IFCA:
    """Several models; a client trains the one with the lowest loss on its data."""

    clusters: int = 3
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.clusters >= 1, "clusters", self.clusters, "1 or more")

    def init(self, start: Start) -> State:
        """The network's start and other draws of it: equal models would tie for ever."""
        others = {j: start.fresh(j) for j in range(1, self.clusters)}
        return State(0, {0: start.params, **others}, {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """All models: the client chooses."""
        return {f"model{j}": Packet(model) for j, model in state.models.items()}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort chooses and trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of those who chose a model; one that nobody chose stays."""
        means, chosen = dict[int, Mean](), dict[int, int]()
        for report in reports:
            j = chosen[report.of] = int(report.metrics["group"])
            means.setdefault(j, Mean()).add(report.give["model"].values, report.examples)
        models = {**state.models, **{j: mean.value() for j, mean in sorted(means.items())}}
        return replace(
            state, round=state.round + 1, models=models, groups={**state.groups, **chosen}
        )

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Choose; then train and send, or use."""
        look = Measure("losses", Losses(self.clusters), Batches("train"), of="model0")
        first = (look, Edit(choose))
        return {
            "train": (*first, Train(self.objective, self.local), Give(send_choice)),
            "use": first,
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """K models down, one up, 4 bytes a number."""
        return 4 * net.layout.size * (self.clusters + 1) * cohort * rounds
