r"""FedDST: sparse from the first round to the last, under a mask that clients readjust (Bibikar,
Vikalo, Wang & Chen, "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet
Learning Better", AAAI 2022).

Round :math:`r`, cohort :math:`S_r`; layer l keeps :math:`c_l` weights, and M begins as those of
largest initial magnitude::

    c_l     = the layer's share of density * d, denser where it is small          -> ERK
    w_k     = E epochs of min CE(w; D_k) from w, under M                          -> Train

Every ``every`` rounds, before round ``until``, a client readjusts its mask in between::

    w_k     = E - after epochs of min CE(w; D_k) from w, under M                  -> Train
    a_r     = churn / 2 (1 + cos(pi r / until))                                   -> cosine
    M_k     = M without the a_r c_l smallest weights of each layer                -> prune
    M_k     = M_k with the a_r c_l largest |dL_k/dw| outside it, which start at 0 -> regrow
    w_k     = after more epochs, under M_k                                        -> Train

The server keeps the number of weights of each layer::

    w_j     = sum_k n_k m_kj w_kj / sum_k n_k m_kj over clients with j            -> WeightedMean
    M       = the c_l largest |w_j| of each layer, among those that anybody has   -> top

A client uses the shared sparse model. With density 1 this is FedAvg.

- Shared: a sparse model; every few rounds clients replace its smallest weights with others.
- A client uses: the shared sparse model.
- Bytes in the paper: 8 d_ρ M T + d_w/8 M (2 A + 1).
- Secure aggregation: yes; clients choose masks. The server needs only a sum of values and a sum of
  masks; messages are then dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .. import trees
from ..core import (
    Carry,
    Client,
    Edit,
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
from ..parts.allocate import ERK, GlobalRank, Uniform
from ..parts.common import CommonParts
from ..parts.gradient import Gradient, random_batches, settled
from ..parts.local import LocalTraining
from ..parts.mask import prune, regrow, top, weights_to_prune
from ..parts.one_model import (
    SparseModel,
    deliver_sparse,
    dense_bytes,
    send_sparse,
    sent_with_own_mask,
)
from ..parts.score import Magnitude
from ..trees import Mask, Tree


@dataclass(frozen=True)
class State(SparseModel):
    """The round, the one model and its mask, and the round from which the mask stays."""

    until: int


@dataclass(frozen=True)
class FedDST(CommonParts):
    """One sparse model for all; clients swap its smallest weights for those of large gradients."""

    density: float = 0.2
    """The share of prunable weights that is kept in every round."""
    churn: float = 0.05
    """The share of each layer's weights that a client replaces in the first readjustment."""
    every: int = 10
    """Rounds between readjustments; the first one is in the second round (in the first round if
    this is 1)."""
    until: int | None = None
    """From this round on the mask does not change; None: from half of the rounds on."""
    after: int = 1
    """Epochs of a round that are trained after a readjustment, so that new weights do not stay
    0."""
    allocation: ERK | Uniform | GlobalRank = ERK()
    """How the kept weights are divided among layers."""
    score: Magnitude = Magnitude()
    """How weights are scored; those with the highest scores are kept."""

    sends_later = "choose the mask of 'model' from their data"

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(0 <= self.churn <= 1, "churn", self.churn, "in [0, 1]")
        check(self.every >= 1, "every", self.every, "1 or more rounds")
        check(self.until is None or self.until >= 0, "until", self.until, "0 or more, or none")
        check(self.after >= 1, "after", self.after, "1 or more epochs")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The initial model, pruned by magnitude."""
        prunable = weights_to_prune(setup.layout, self.density)
        scores = self.score(trees.pick(setup.params, prunable))
        mask = top(scores, self.allocation(scores, self.density))
        return State(0, trees.apply_mask(setup.params, mask), mask, self._until(setup.rounds))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The sparse model, the same for every client."""
        return deliver_sparse(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, and in some rounds readjusts its masks."""
        if not self._readjusts_in(state.round, state.until):
            return [Task(k, self.deliver(state, k)) for k in cohort]
        settings = {"share": cosine(self.churn, state.round, state.until)}
        return [Task(k, self.deliver(state, k), settings, "train:readjust") for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean over the clients that have each weight; of these the largest of every layer
        stay."""
        mean = self.mean.start(state.model)
        in_use = trees.map(torch.zeros_like, state.mask)
        for report in reports:
            packet = report.give["model"]
            mask = packet.mask or {}
            mean.add(packet.values, report.examples, mask)
            for name in in_use:
                # A client that sends no mask has all weights.
                in_use[name] = in_use[name] | mask.get(name, True)
        model = mean.value()
        mask = state.mask
        a_client_answered = any(bool(leaf.any()) for leaf in in_use.values())
        if a_client_answered:
            mask = self._largest(model, in_use, state.mask)
        return replace(state, round=state.round + 1, model=trees.apply_mask(model, mask), mask=mask)

    def _largest(self, model: Tree, in_use: Mask, before: Mask) -> Mask:
        """The number of weights of each layer stays: the largest of those that any client has."""
        scores = self.score(trees.pick(model, in_use))
        # Below every magnitude: the mean has left what no client has as it was.
        scores = trees.map(lambda score, has: torch.where(has, score, -1.0), scores, in_use)
        return top(scores, {name: int(leaf.sum()) for name, leaf in before.items()})

    def _until(self, rounds: int) -> int:
        return rounds // 2 if self.until is None else self.until

    def _readjusts_in(self, round: int, until: int) -> bool:
        """Whether clients readjust their masks in a round, counted from 0."""
        is_due = (round - 1) % self.every == 0
        return self.density < 1 and round < until and is_due

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the mask, or train, readjust the mask, and train on."""
        return {
            "train": (Train(self.objective, self.local), Give(send_sparse)),
            "train:readjust": self._readjusting(),
            "use": (),
        }[verb]

    def _readjusting(self) -> tuple[Stage, ...]:
        local = self.local or LocalTraining()
        after = min(self.after, local.epochs)
        before = local.epochs - after
        first: Stage = Edit(untrained)
        if before:
            first = Train(self.objective, replace(local, epochs=before), end="first")
        one_batch = random_batches(local, 1)
        then = Train(
            self.objective, replace(local, epochs=after), start="first", mask="readjusted.mask"
        )
        return (
            first,
            Measure("gradient", Gradient(self.objective), one_batch, of="first"),
            Edit(readjust),
            then,
            Give(send_readjusted, sent_with_own_mask),
        )

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Values that are kept in 32 bits both ways, and masks of one bit a weight.

        A mask goes up with every readjustment, and down before the first round and after each
        readjustment.
        """
        weights = net.layout.count(net.layout.prunable)
        kept = round(self.density * weights)
        values = dense_bytes(net.layout.size - weights + kept, cohort, rounds)
        if self.density == 1:
            return values
        until = self._until(rounds)
        readjustments = [r for r in range(rounds) if self._readjusts_in(r, until)]
        new_masks = 1 + len(readjustments)
        if readjustments and readjustments[-1] == rounds - 1:
            # After a readjustment in the last round there is none to begin with its mask.
            new_masks -= 1
        return values + round(weights / 8 * cohort * (len(readjustments) + new_masks))


def cosine(first: float, round: int, end: int) -> float:
    r"""FedDST: the share that is swapped: :math:`\frac{\alpha}{2} (1 + \cos(\pi r / R_{end}))`.

    :math:`\alpha` -> ``first``, :math:`r` -> ``round``, :math:`R_{end}` -> ``end``.

    >>> cosine(0.4, 0, 8), round(cosine(0.4, 4, 8), 12), cosine(0.4, 8, 8)
    (0.4, 0.2, 0.0)
    """
    return first / 2 * (1 + math.cos(math.pi * round / end))


def untrained(carry: Carry, client: Client) -> Carry:
    """FedDST: no epochs before the readjustment."""
    return {**carry, "first": carry["model"]}


def readjust(carry: Carry, client: Client) -> Carry:
    """FedDST: the mask with each layer's smallest weights swapped for large gradients.

    Weights that were just dropped may come back, as in RigL (Evci et al. 2020).
    """
    share = float(carry["settings"]["share"])
    mask: Mask = {}
    for name, kept in carry["model.mask"].items():
        weights = carry["first"][name].reshape(-1)
        # Rounding must not decide which of the weights without a gradient come back.
        gradient = settled(carry["gradient"][name].reshape(-1))
        before = kept.reshape(-1)
        count = round(share * int(before.sum()))
        left = prune(before, weights.abs(), count)
        none = torch.zeros_like(left)
        mask[name] = regrow(left, gradient, count, barred=none).view(kept.shape)
    return {**carry, "readjusted.mask": mask}


def send_readjusted(carry: Carry, client: Client) -> Outcome:
    """FedDST: what was trained, under the client's own mask."""
    return Outcome({"model": Packet(carry["local"], carry["readjusted.mask"])})
