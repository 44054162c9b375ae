r"""ClusterFL: clustered multi-task learning, a model per client tied to its cluster.

(Ouyang et al., "ClusterFL: a clustering-based federated learning system for human activity
recognition", ACM TOSN 2023; the dense baseline of CA-AFP's tables.)

W has one row per client, F the K leading eigenvectors of :math:`W W^T`; minimised in turn over W
and F::

    min  sum_k L_k(w_k) + alpha tr(W W^T) - beta tr(F^T W W^T F)
    u_k  = sum_j (F F^T)_kj w_j                                     -> shares
    w_k  = E epochs of min CE(w) + alpha |w|^2 - 2 beta w.u_k
                         + rho/2 |w - w_k|^2                        -> Train, Clustered
    F    = the K leading eigenvectors of W W^T                      -> leading_eigenvectors

The server sends u_k and a client returns w_k, so a round costs as much as in FedAvg; the server
keeps every client's model. A client uses its own w_k. For an ideal F, u_k is the mean of the
client's cluster. Groups, by k-means on the rows of F, are only reported. With alpha = beta = rho =
0 every client trains alone, as ``local`` does.

Differs from the paper: the quadratic term in F uses the last W, so that a client needs only one
vector; the cohort updates its rows of W, and the other rows do not change; stragglers are not
dropped.

- Shared: every client's model, but only with the server.
- A client uses: a personal model, pulled towards its cluster.
- Bytes in the paper: 8 d M T.
- Secure aggregation: no; the server keeps every client's model and groups them; a report is a
  change of what was sent, so noise can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import trees
from ..core import (
    Batch,
    Carry,
    Client,
    Edit,
    Give,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net, Output
from ..parts.aggregate import Averaging
from ..parts.group import renumbered
from ..parts.local import LocalTraining
from ..parts.objective import Loss, Objective, ProblemLoss
from ..parts.one_model import dense_bytes
from ..parts.personal import start_personal, use_personal
from ..trees import Tree
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class Clustered(Objective):
    r"""ClusterFL's tie: :math:`\alpha|w|^2 - 2\beta\, w \cdot u + \frac{\rho}{2}|w - w_{last}|^2`.

    (Ouyang et al. 2023.) :math:`u`, the client's share of all models -> ``carry["model"]``;
    :math:`w_{last}` -> ``carry["personal"]``.
    """

    is_loss: ClassVar[bool] = False
    alpha: float = 1e-3
    beta: float = 5e-4
    rho: float = 5e-3

    def __post_init__(self) -> None:
        given = (self.alpha, self.beta, self.rho)
        check(min(given) >= 0, "alpha, beta, rho", given, "0 or more each")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """Small, along the cluster, and near where it was."""
        w = trees.flatten(params)
        u = trees.flatten(trees.pick(carry["model"], params))
        last = trees.flatten(trees.pick(carry["personal"], params))
        away = w - last
        # The first two terms of the formula above, then the third.
        along_cluster = self.alpha * (w * w).sum() - 2 * self.beta * (w * u).sum()
        near_last = 0.5 * self.rho * (away * away).sum()
        return along_cluster + near_last, {}


@dataclass(frozen=True)
class State:
    """Every client's model as a row of W, the start they share, and their groups."""

    round: int
    clients: tuple[int, ...]
    start: Tree
    rows: Tensor
    """W, in the order of ``clients``."""
    groups: dict[int, int]


@dataclass(frozen=True)
class ClusterFL:
    """A model per client, tied to the others of its cluster by a spectral penalty."""

    clusters: int = 3
    """K, how many clusters the penalty assumes."""
    tie: Clustered = Clustered()
    """The penalty that pulls a client towards its cluster, with its three weights."""
    mean: Averaging | None = None
    """None: u_k by the eigenvectors, as above. A robust mean: u_k is this mean of the models of the
    client's group, as for an ideal F; all clients have equal weight, and a clipped mean clips
    around the client's own model."""
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.clusters >= 1, "clusters", self.clusters, "1 or more")

    def init(self, setup: Setup) -> State:
        """All rows are equal."""
        clients = setup.all_clients("keeps a model of every client")
        return State(
            round=0,
            clients=clients,
            start=setup.params,
            rows=trees.flatten(setup.params).repeat(len(clients), 1),
            groups=dict.fromkeys(clients, 0),
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Nothing: a client uses its own model."""
        return {}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client tied to its u_k."""
        if self.mean is not None:
            return [Task(k, {"model": Packet(group_average(state, k, self.mean))}) for k in cohort]
        # In double precision: single could not tell which eigenvalues are 0.
        rows = state.rows.double()
        share = shares(rows, self.clusters)
        tasks = []
        for client in cohort:
            u = (share[state.clients.index(client)] @ rows).to(state.rows.dtype)
            tasks.append(Task(client, {"model": Packet(trees.unflatten(u, state.start))}))
        return tasks

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The cohort's rows are replaced; all others stay."""
        rows = state.rows.clone()
        for report in reports:
            rows[state.clients.index(report.of)] = trees.flatten(report.give["model"].values)
        # Labels are for reports and for `mean`; u_k itself needs no hard clusters.
        labels = cluster_labels(rows.double(), self.clusters)
        groups = dict(zip(state.clients, labels, strict=True))
        return replace(state, round=state.round + 1, rows=rows, groups=groups)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the client's own model and send it."""
        return {
            "train": (
                Edit(start_personal),
                Train(self.objective + self.tie, self.local, start="personal"),
                Give(send_and_keep_personal),
            ),
            "use": (Edit(use_personal),),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg: one model down, one up."""
        return dense_bytes(net.layout.size, cohort, rounds)


def group_average(state: State, client: int, rule: Averaging) -> Tree:
    """ClusterFL: u_k by a rule: the average of the models of the client's group."""
    models = dict(zip(state.clients, state.rows, strict=True))
    average = rule.start(trees.unflatten(models[client], state.start))
    for other, row in models.items():
        if state.groups[other] == state.groups[client]:
            average.add(trees.unflatten(row, state.start), weight=1)
    return average.value()


def leading_eigenvectors(rows: Tensor, k: int) -> Tensor:
    r"""ClusterFL: F, the k leading eigenvectors of :math:`W W^T`; fewer if its rank is smaller.

    >>> leading_eigenvectors(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 1).abs()
    tensor([[1.],
            [0.]])
    """
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    # Directions in which no client differs (all start equal) are left out: they add nothing to u,
    # and their eigenvectors are only rounding.
    rank = int((values > 1e-12 * values[-1]).sum())
    # eigh sorts eigenvalues in ascending order.
    leading: Tensor = vectors.flip(1)[:, : min(k, rank)]
    return leading


def shares(rows: Tensor, k: int) -> Tensor:
    r"""ClusterFL: :math:`F F^T`: how much each client's model counts in each other's u."""
    f = leading_eigenvectors(rows, k)
    return f @ f.T


def cluster_labels(rows: Tensor, k: int) -> list[int]:
    """ClusterFL: the clients' clusters: k-means on the rows of F."""
    # Imported where it is used: scikit-learn is slow to load.
    from sklearn.cluster import KMeans

    # Rounded, since rows that differ only by rounding would be distinct points to k-means.
    points = leading_eigenvectors(rows, k).numpy().round(9)
    distinct = len(set(map(tuple, points.tolist())))
    if distinct <= 1:
        return [0] * len(rows)
    # k-means cannot make more clusters than there are distinct points.
    rule = KMeans(min(k, distinct), n_init=10, random_state=0)
    # Numbered anew: which cluster k-means calls 0 is a matter of its random start.
    return renumbered(rule.fit_predict(points).tolist())


def send_and_keep_personal(carry: Carry, client: Client) -> Outcome:
    """ClusterFL: what was trained is sent, and kept as the client's own model."""
    return Outcome({"model": Packet(carry["local"])}, memory={"personal": carry["local"]})
