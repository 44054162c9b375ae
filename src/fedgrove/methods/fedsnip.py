r"""FedSNIP: one sparse model, its mask found once by connection sensitivity before training.

(The baseline of CA-AFP's tables, after Bustincio et al., "Reducing communication overhead through
one-shot model pruning in federated learning", 2025; SNIP: Lee et al. 2019, Eq. 5.)

Before round 0 an exchange with all clients, which is not a round; then FedAvg under the mask::

    s_k  = |w * dL_k/dw| on one random batch of client k, shares of its sum   -> sensitivity
    M    = the density * d largest of sum_k n_k s_k, all layers together      -> GlobalRank, top
    w_k  = E epochs of min CE(w; D_k) from w, under M                         -> Train
    w    = (sum_k n_k w_k / sum_k n_k) M                                      -> average

Clients draw the initial w from the seed, so the exchange costs only their answers, in 16 bits. With
density 1 this is FedAvg.

- Shared: a sparse model, pruned once by sensitivity.
- A client uses: the shared sparse model.
- Bytes in the paper: 8 ρ d M T.
- Secure aggregation: yes; clients first send sensitivities, which are averaged like the model
  later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import trees
from ..core import (
    Carry,
    Client,
    Edit,
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
from ..parts.allocate import GlobalRank, Uniform
from ..parts.common import CommonParts
from ..parts.gradient import Gradient, random_batches
from ..parts.mask import top, weights_to_prune
from ..parts.one_model import (
    SparseModel,
    average,
    deliver_sparse,
    dense_bytes,
    send_sparse,
    use_network_start,
)
from ..parts.score import expected_scores, scores_of, scores_packet
from ..trees import Mask, Tree


@dataclass(frozen=True)
class State(SparseModel):
    """The round, the model and its mask, and the clients that report sensitivities."""

    clients: tuple[int, ...]


@dataclass(frozen=True)
class FedSNIP(CommonParts):
    """One sparse model for all; its mask comes from the first gradients and stays."""

    density: float = 0.3
    """The share of prunable weights that is kept."""
    allocation: GlobalRank | Uniform = GlobalRank()
    """How the kept weights are divided among layers."""
    ask: int = 1000
    """Maximum number of clients, drawn with the seed, that report sensitivities."""

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(self.ask >= 1, "ask", self.ask, "1 or more clients")

    def init(self, setup: Setup) -> State:
        """Dense, until sensitivities are known."""
        # Raises where there is nothing to prune.
        weights_to_prune(setup.layout, self.density)
        return State(0, setup.params, {}, setup.some_clients(self.ask))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model, under its mask once it has one."""
        return deliver_sparse(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """All clients report sensitivities first; then the cohort trains."""
        if self._needs_mask(state):
            # No model is sent: clients measure at the start, which they draw from the seed.
            return [Task(client, verb="snip") for client in state.clients]
        return [Task(client, self.deliver(state, client)) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mask from the mean sensitivities, or the weighted mean under the mask."""
        if self._needs_mask(state):
            mask = self._find_mask(reports)
            # Not a round: its number stays 0.
            return replace(state, model=trees.apply_mask(state.model, mask), mask=mask)
        dense = average(state, reports, self.mean)
        return replace(dense, model=trees.apply_mask(dense.model, state.mask))

    def _needs_mask(self, state: State) -> bool:
        return self.density < 1 and not state.mask

    def _find_mask(self, reports: Iterable[Report]) -> Mask:
        """The weights with the largest mean sensitivity, clients weighted by their examples."""
        mean = self.mean.start()
        for report in reports:
            mean.add(scores_of(report.give["sensitivity"]), report.examples)
        scores = mean.value()
        return top(scores, self.allocation(scores, self.density))

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Measure one batch at the network's start, or train under the mask."""
        return {
            "snip": (
                Edit(use_network_start),
                Measure("gradient", Gradient(self.objective), random_batches(self.local, 1)),
                Give(send_sensitivity, expected_sensitivity),
            ),
            "train": (Train(self.objective, self.local), Give(send_sparse)),
            "use": (),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The kept share of all parameters, biases included; neither exchange nor mask counts."""
        return round(self.density * dense_bytes(net.layout.size, cohort, rounds))


def send_sensitivity(carry: Carry, client: Client) -> Outcome:
    """FedSNIP: the sensitivity of every prunable weight."""
    gradient = carry["gradient"]
    scores = sensitivity(trees.pick(client.start, gradient), gradient)
    return Outcome({"sensitivity": scores_packet(scores)})


def expected_sensitivity(task: Task, net: Net) -> ExpectedReport:
    """FedSNIP: a number for every prunable weight."""
    return ExpectedReport({"sensitivity": expected_scores(net)})


def sensitivity(params: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> Tree:
    r"""FedSNIP: the sensitivity :math:`s_j = |w_j g_j| / \sum_u |w_u g_u|` (Lee et al., Eq. 5).

    0 where every product is.

    >>> sensitivity({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([1.0, 1.5])})["w"]
    tensor([0.2500, 0.7500])
    """
    products = trees.map(lambda w, g: (w * g).abs(), params, gradient)
    total = trees.flatten(products).sum()
    # The sum goes over all layers, so scores can be ranked across them (GlobalRank).
    return trees.map(lambda product: product / torch.where(total > 0, total, 1.0), products)
