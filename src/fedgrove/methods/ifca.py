r"""IFCA: several models, every client trains the one that fits it best (Ghosh et al., "An Efficient
Framework for Clustered Federated Learning", NeurIPS 2020, Alg. 1, model averaging).

Round :math:`t`, cohort :math:`S_t`, models :math:`w^1..w^K` from K different starts::

    j_k  = argmin_j L_k(w^j), on the training data      -> Measure(Losses), choose
    w_k  = E epochs of min CE(w; D_k) from w^{j_k}      -> Train
    w^j  = sum_{k: j_k = j} n_k w_k / sum n_k           -> WeightedMean

All K models are sent down, and one is sent up. Before a client uses a model, it chooses again. With
one model this is FedAvg.

- Shared: ``clusters`` models.
- A client uses: the one with the lowest loss.
- Bytes in the paper: 4 (C + 1) d M T.
- Secure aggregation: no; clients report which model they chose, and are averaged with the clients
  that chose the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from ..core import (
    Batch,
    Batches,
    Carry,
    Client,
    Edit,
    ExpectedPacket,
    ExpectedReport,
    Give,
    Measure,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.group import GroupMeans
from ..trees import Tree
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    """The models, and which one each client chose last."""

    round: int
    models: dict[int, Tree]
    groups: dict[int, int]


@dataclass(frozen=True)
class IFCA(CommonParts):
    """Several models; a client trains the one with the lowest loss on its data."""

    clusters: int = 3
    """Number of models."""
    _: KW_ONLY
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.clusters >= 1, "clusters", self.clusters, "1 or more")

    def init(self, setup: Setup) -> State:
        """The network's initial parameters and other draws of them."""
        models = {0: setup.params}
        # Different starts: equal models would have equal losses for ever.
        for j in range(1, self.clusters):
            models[j] = setup.fresh(j)
        return State(0, models, {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """All models: the client chooses."""
        return {f"model{j}": Packet(model) for j, model in state.models.items()}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort chooses and trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of the clients that chose a model; one that no client chose stays."""
        means = GroupMeans(self.mean, state.models)
        groups = dict(state.groups)
        for report in reports:
            j = int(report.metrics["group"])
            groups[report.of] = j
            means.add(j, report.give["model"].values, report.examples)
        return State(state.round + 1, means.value(), groups)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Choose; then train and send, or use."""
        # Of the training data: the choice must not see what the model is scored on.
        losses = Measure("losses", Losses(self.clusters), Batches("train"), of="model0")
        if verb == "train":
            train = Train(self.objective, self.local)
            return (losses, Edit(choose), train, Give(send_choice, self._model_and_choice))
        return {"use": (losses, Edit(choose))}[verb]

    def _model_and_choice(self, task: Task, net: Net) -> ExpectedReport:
        """A trained model, and which of those sent it was."""
        return ExpectedReport(
            {"model": ExpectedPacket.of(net.blank())}, {"group": (0, self.clusters - 1)}
        )

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """K models down, one up, 4 bytes a number."""
        return 4 * net.layout.size * (self.clusters + 1) * cohort * rounds


@dataclass(frozen=True)
class Losses:
    """What :class:`~fedgrove.core.Measure` sums: each model's loss over a batch.

    The models are ``carry["model0"]``, ``carry["model1"]``, ...; ``models`` is their number.
    """

    models: int

    @property
    def passes(self) -> int:
        """IFCA: each model runs once."""
        return self.models

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The summed loss of each model."""
        losses = []
        for j in range(self.models):
            out = net(carry[f"model{j}"], batch.x, train=False)
            per_example = net.problem.losses(out.logits, batch.y, carry.get("client", {}))
            # Padding has weight 0. A sum, not a mean: sums of batches of any size add up.
            losses.append((per_example * batch.weight).sum())
        return {"loss": torch.stack(losses)}


def choose(carry: Carry, client: Client) -> Carry:
    r"""IFCA: :math:`\arg\min_j L_k(w^j)` becomes ``carry["model"]``; of equal ones the first."""
    j = int(carry["losses"]["loss"].argmin())
    return {**carry, "model": carry[f"model{j}"], "choice": {"group": torch.tensor(j)}}


def send_choice(carry: Carry, client: Client) -> Outcome:
    """IFCA: send the trained model, and which model it was."""
    return Outcome({"model": Packet(carry["local"])}, {"group": float(carry["choice"]["group"])})
