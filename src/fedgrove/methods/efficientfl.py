r"""EfficientFL: one sparse model, its mask found by magnitude after one dense round.

Updates are sent in 8 bits. (The baseline of CA-AFP's tables, after Wu, Song & Zeng, "Efficient
federated learning on resource-constrained edge devices based on model pruning", Complex &
Intelligent Systems 2023.)

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(w; D_k) from w, under M              -> Train
    q_k  = (w_k - w) on a grid of 2^b - 1 levels per layer         -> Uniform quantiser
    w    = (w + sum_k n_k q_k / sum_k n_k) M                       -> WeightedMean
    M    = all ones in round 0; then the density * d largest |w|   -> Magnitude, GlobalRank, top

With density 1 and bits 0 (no quantisation) this is FedAvg.

- Shared: a sparse model, pruned once by magnitude; 8-bit updates.
- A client uses: the shared sparse model.
- Bytes in the paper: 8 ρ d M T.
- Secure aggregation: yes; updates are averaged; the server chooses the mask. With noise or secure
  sums messages are no longer rounded: full size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .. import trees
from ..core import Carry, Client, Give, Outcome, Packet, Report, Setup, Stage, Task, Train
from ..errors import check
from ..nets import Net
from ..parts.allocate import GlobalRank, Uniform
from ..parts.common import CommonParts
from ..parts.mask import top, weights_to_prune
from ..parts.one_model import (
    SparseModel,
    add_mean_update,
    average,
    deliver_sparse,
    dense_bytes,
    expected_update,
    send_sparse,
)
from ..parts.quantise import UniformQuantiser
from ..parts.score import Magnitude


@dataclass(frozen=True)
class State(SparseModel):
    """The round, the model, its mask, and the names of what may be pruned."""

    prunable: tuple[str, ...]


@dataclass(frozen=True)
class EfficientFL(CommonParts):
    """One sparse model for all, pruned once by magnitude; clients send quantised updates."""

    density: float = 0.3
    """The share of prunable weights that is kept."""
    bits: int = 8
    """Bits per value of an update; 0: clients send the trained model itself."""
    score: Magnitude = Magnitude()
    """How weights are scored; those with the highest scores are kept."""
    allocation: GlobalRank | Uniform = GlobalRank()
    """How the kept weights are divided among layers."""

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        bits_are_valid = self.bits == 0 or 2 <= self.bits <= 16
        check(bits_are_valid, "bits", self.bits, "0 (no quantisation) or in 2..16")

    def init(self, setup: Setup) -> State:
        """Dense, for one round."""
        return State(0, setup.params, {}, weights_to_prune(setup.layout, self.density))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model, under its mask once it has one."""
        return deliver_sparse(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(client, self.deliver(state, client)) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean; after the first round the mask."""
        fold = add_mean_update if self.bits else average
        dense = fold(state, reports, self.mean)
        mask = state.mask
        # After one dense round: magnitudes of a random start are no evidence.
        mask_is_due = not mask and self.density < 1
        if mask_is_due:
            scores = self.score(trees.pick(dense.model, state.prunable))
            mask = top(scores, self.allocation(scores, self.density))
        return replace(dense, model=trees.apply_mask(dense.model, mask), mask=mask)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the mask, quantise, send."""
        give = (
            Give(self._send_quantised_update, expected_update) if self.bits else Give(send_sparse)
        )
        return {"train": (Train(self.objective, self.local), give), "use": ()}[verb]

    def _send_quantised_update(self, carry: Carry, client: Client) -> Outcome:
        """The update on its grid, under the mask."""
        update = trees.map(torch.sub, carry["local"], carry["model"])
        # To the nearest level: nothing is drawn.
        quantised = UniformQuantiser(self.bits, stochastic=False)(update)
        return Outcome({"update": Packet(quantised, carry.get("model.mask"))})

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The kept share of all parameters in 32 bits, as CA-AFP's table counts it.

        Neither the dense round nor the 8 bits count.
        """
        return round(self.density * dense_bytes(net.layout.size, cohort, rounds))
