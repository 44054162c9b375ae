r"""FedPrune: one model, pruned further during training, by squared gradients.

(The baseline of FedLayerPrune's tables, which cites PruneFL: Jiang et al., "Model Pruning Enables
Efficient Federated Learning on Edge Devices", IEEE TNNLS 2022.)

Round :math:`t` = 1..T, cohort :math:`S_t`; M is everything at first::

    w_k  = E epochs of min CE(w; D_k) from w, under M                             -> Train
    w    = (sum_k n_k w_k / sum_k n_k) M                                          -> average

After every ``every``-th round but the last, the s-th of n such steps, M is found again::

    g_kj = mean over batches b of (dL_b/dw_j)^2 at w_k, for pruned weights too    -> SquaredGradient
    P    = the largest |w| of M in each layer, all but a share ``contested``      -> protected
    c    = (1 - (1 - density) s / n) d                                            -> scheduled
    M    = P and the largest of sum_k n_k g_kj, c weights, all layers together    -> GlobalRank, top

There is one rate for the network, which grows with the rounds. With ``adaptive``, c is instead the
number that maximises the loss reduction per time, PruneFL's own rule (-> RiskPerTime). Weights that
come back start at 0. With density 1 this is FedAvg.

- Shared: a sparse model that is pruned further during training.
- A client uses: the shared sparse model.
- Bytes in the paper: 8 M Σ_t d_ρ(t) + 4 d_w M n.
- Secure aggregation: yes; clients send the importance of weights with the model; both are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import trees
from ..core import (
    GRADIENT_PASSES,
    Batch,
    Carry,
    Client,
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
    expected_as_sent,
)
from ..errors import check
from ..nets import Net
from ..parts.allocate import ERK, GlobalRank, Uniform
from ..parts.common import CommonParts
from ..parts.gradient import Gradient, random_batches
from ..parts.mask import all_kept, best, top, weights_to_prune
from ..parts.objective import Objective
from ..parts.one_model import SparseModel, deliver_sparse, send_sparse
from ..parts.score import expected_scores, scores_of, scores_packet
from ..trees import Mask, Tree


@dataclass(frozen=True)
class State(SparseModel):
    """The round, the one model and its mask, and the number of rounds."""

    rounds: int


@dataclass(frozen=True)
class FedPrune(CommonParts):
    """One model for all, pruned step by step; squared gradients decide which weights are kept."""

    density: float = 0.3
    """Density after the last pruning step; with ``adaptive``, the minimum."""
    every: int = 5
    """Rounds between pruning steps."""
    contested: float = 0.3
    """The share of each layer's weights in use, the smallest ones, that compete with pruned weights
    at a pruning step. It is larger if the density decreases by more."""
    adaptive: RiskPerTime | None = None
    """PruneFL's own rule for the number of kept weights; None: a rate that grows with the
    rounds."""
    allocation: GlobalRank | Uniform | ERK = GlobalRank()
    """How the kept weights are divided among layers."""

    sends_later = "send the importance of their weights"

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(self.every >= 1, "every", self.every, "1 or more rounds")
        check(0 < self.contested <= 1, "contested", self.contested, "in (0, 1]")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """Dense, until the first step."""
        # Raises where there is nothing to prune.
        weights_to_prune(setup.layout, self.density)
        check(
            self.density == 1 or self.every < setup.rounds,
            "every",
            self.every,
            f"below the number of rounds, {setup.rounds}, or nothing is ever pruned",
        )
        return State(0, setup.params, {}, setup.rounds)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model, under its mask once it has one."""
        return deliver_sparse(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, and before a step also measures importances."""
        verb = "train:importance" if self._is_before_step(state) else "train"
        return [Task(k, self.deliver(state, k), verb=verb) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean under the mask; at a step, a new mask."""
        mean = self.mean.start(state.model)
        importance = self.mean.start()
        is_step = self._is_before_step(state)
        is_measured = False
        for report in reports:
            mean.add(report.give["model"].values, report.examples)
            if is_step:
                importance.add(scores_of(report.give["importance"]), report.examples)
                is_measured = True
        after = replace(state, round=state.round + 1, model=mean.value())
        mask = state.mask
        if is_measured:
            mask = self._new_mask(after, importance.value())
        return replace(after, model=trees.apply_mask(after.model, mask), mask=mask)

    def _is_before_step(self, state: State) -> bool:
        """Whether the mask is found again after the next round."""
        return state.round + 1 in self._steps(state.rounds)

    def _steps(self, rounds: int) -> range:
        """The numbers of completed rounds after which the mask is found again; the last is no step.

        (Nothing would be trained under its mask.)
        """
        if self.density == 1:
            return range(0)
        return range(self.every, rounds, self.every)

    def _new_mask(self, state: State, importance: Tree) -> Mask:
        """The protected weights and the most important of the others."""
        weights = trees.pick(state.model, importance)
        used = state.mask or trees.map(all_kept, weights)
        total = trees.size(weights)
        # Before this step: the smallest of these compete with pruned weights.
        in_use = int(trees.flatten(used).sum())
        if self.adaptive is None:
            steps = self._steps(state.rounds)
            step = steps.index(state.round) + 1
            count = scheduled(self.density, step, len(steps), total)
            # All that must fall has to be contested.
            contested = max(self.contested, 1 - count / in_use)
            safe = protected(weights, used, contested)
        else:
            safe = protected(weights, used, self.contested)
            found = self.adaptive(trees.flatten(importance), trees.flatten(safe))
            count = max(found, round(self.density * total))
        # Protected weights rank before all others.
        scores = trees.map(lambda g, stays: g.masked_fill(stays, torch.inf), importance, safe)
        return top(scores, self.allocation(scores, count / total))

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the mask; before a step, measure what the weights are worth."""
        train = Train(self.objective, self.local)
        batches = random_batches(self.local)
        return {
            "train": (train, Give(send_sparse)),
            "train:importance": (
                train,
                Measure("importance", SquaredGradient(self.objective), batches, of="local"),
                Give(send_importance, expected_importance),
            ),
            "use": (),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Kept values in 32 bits both ways, and importances in 32 bits up before each step.

        Neither masks nor what ``adaptive`` will find are known: the schedule is counted.
        """
        layout = net.layout
        weights = layout.count(layout.prunable)
        steps = self._steps(rounds)
        numbers = 0
        kept = weights
        for completed in range(rounds):
            if completed in steps:
                step = steps.index(completed) + 1
                kept = scheduled(self.density, step, len(steps), weights)
            numbers += 2 * (layout.size - weights + kept)
        return 4 * cohort * (numbers + weights * len(steps))


def scheduled(density: float, step: int, steps: int, weights: int) -> int:
    r"""PruneFL: how many weights stay at a step: :math:`d\,(1 - (1 - \rho)\, s / n)`.

    :math:`\rho` -> ``density``, :math:`s` -> ``step``, counted from 1, :math:`n` -> ``steps``,
    :math:`d` -> ``weights``.

    >>> [scheduled(0.4, step, 3, 100) for step in (1, 2, 3)]
    [80, 60, 40]
    """
    return round(weights * (1 - (1 - density) * step / steps))


def protected(weights: Mapping[str, Tensor], used: Mapping[str, Tensor], contested: float) -> Mask:
    """PruneFL: the weights in use that no pruned one may replace: the largest of every layer.

    >>> used = {"w": torch.tensor([True, True, True, False])}
    >>> protected({"w": torch.tensor([1.0, -3.0, 2.0, 0.0])}, used, contested=0.5)
    {'w': tensor([False,  True, False, False])}
    """
    safe: Mask = {}
    for name, mask in used.items():
        # Rounded down: never more than may stay.
        count = math.floor((1 - contested) * int(mask.sum()))
        largest = best(weights[name].abs().reshape(-1), count, among=mask.reshape(-1))
        safe[name] = largest.view(mask.shape)
    return safe


@dataclass(frozen=True)
class SquaredGradient:
    """What :class:`~fedgrove.core.Measure` sums: a batch's squared gradient, times its examples."""

    objective: Objective
    passes: ClassVar[int] = GRADIENT_PASSES

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """By prunable weight, without dropout; also where a weight is pruned."""
        gradient = Gradient(self.objective)(net, params, batch, carry)
        # That is the gradient of the mean times n: its square over n is n times the mean's square.
        # A batch of padding alone has a gradient of 0.
        examples = batch.weight.sum().clamp_min(1.0)
        return trees.map(lambda g: g * g / examples, gradient)


def send_importance(carry: Carry, client: Client) -> Outcome:
    """PruneFL: what was trained, and the mean of the squared gradients."""
    examples = len(client.data.train)
    importance = trees.map(lambda sums: sums / examples, carry["importance"])
    packets = {**send_sparse(carry, client).give, "importance": scores_packet(importance)}
    return Outcome(packets)


def expected_importance(task: Task, net: Net) -> ExpectedReport:
    """PruneFL: the model as it was sent, and a number for every prunable weight."""
    return ExpectedReport(
        {**expected_as_sent(task, net).packets, "importance": expected_scores(net)}
    )


@dataclass(frozen=True)
class RiskPerTime:
    r"""PruneFL (Jiang et al. 2022): the set :math:`M` that maximises :math:`\Delta(M) / T(M)`.

    :math:`\Delta(M) = \sum_{j \in M} g_j^2` approximates how much a round lowers the loss,
    :math:`T(M) = c_0 + |M| / d` how long it takes: :math:`g_j^2` -> ``importance``, :math:`c_0` ->
    ``fixed``, in units of what all :math:`d` weights add to the time of a round. Weights that stay
    anyway -> ``protected``; of the others the most important are added as long as the quotient
    grows. Differs from the paper: every weight takes the same time, whatever its layer.

    >>> g2 = torch.tensor([8.0, 1.0, 6.0, 3.0])
    >>> RiskPerTime(fixed=0.5)(g2, protected=torch.tensor([False, True, False, False]))
    3
    """

    fixed: float = 0.15
    """The time of a round without any weight, relative to the time that all weights add. (The
    authors' coefficients for FEMNIST: 6.2 seconds, and 6.5e-6 seconds for each of 6.6 million
    weights.)
    """

    def __post_init__(self) -> None:
        check(self.fixed > 0, "fixed", self.fixed, "above 0")

    def __call__(self, importance: Tensor, protected: Tensor) -> int:
        """The number of weights kept, of flat vectors over the network."""
        weights = importance.numel()
        staying = int(protected.sum())
        others = importance[~protected].double().sort(descending=True).values
        added = torch.cat([others.new_zeros(1), others.cumsum(0)])
        gain = importance[protected].double().sum() + added
        kept = staying + torch.arange(len(gain), dtype=torch.float64, device=gain.device)
        quotient = gain / (self.fixed + kept / weights)
        # It rises and then falls, since importances fall: the first largest is where adding stops.
        first_largest = int((quotient == quotient.max()).nonzero()[0])
        return staying + first_largest
