r"""FixedPrune: FedAvg with magnitude pruning to one fixed density in every layer, every round.

(The baseline of FedLayerPrune's tables.)

Round :math:`t`, cohort :math:`S_t`, density :math:`\rho`; prune keeps the largest :math:`\rho` of
each layer::

    w_k  = prune(E epochs of min CE(w; D_k) from w)    -> Train, Magnitude, Uniform, top
    w    = prune(sum_k n_k w_k / sum_k n_k)            -> average, then the same

Clients train without a mask, so that a pruned weight may regrow; messages are sparse in both
directions. Biases and norm layers are never pruned. The first broadcast is the pruned initial
model. With ``static`` its mask never changes, and clients train under it; nothing is pruned again.
With density 1 this is FedAvg.

- Shared: a sparse model, pruned again in every round.
- A client uses: the shared sparse model.
- Bytes in the paper: 8 ρ d M T.
- Secure aggregation: yes; clients choose masks; the plain mean does not use them. With
  ``static=true`` the server chooses the mask and noise can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .. import trees
from ..core import (
    Carry,
    Client,
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
from ..nets import Net
from ..parts.allocate import ERK, GlobalRank, Uniform
from ..parts.common import CommonParts
from ..parts.mask import top, weights_to_prune
from ..parts.one_model import (
    SparseModel,
    average,
    deliver_sparse,
    dense_bytes,
    send_sparse,
    sent_with_own_mask,
)
from ..parts.score import Magnitude
from ..trees import Tree


@dataclass(frozen=True)
class FixedPrune(CommonParts):
    """One sparse model for all, pruned by magnitude to the same density every round."""

    density: float = 0.3
    """The share of prunable weights that is kept."""
    static: bool = False
    """Whether the mask of the pruned initial model is kept for all rounds, and clients train under
    it."""
    score: Magnitude = Magnitude()
    """How weights are scored; those with the highest scores are kept."""
    allocation: Uniform | GlobalRank | ERK = Uniform()
    """How the kept weights are divided among layers."""

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")

    def prune(self, model: Tree, prunable: Iterable[str]) -> Packet:
        """FixedPrune: the model with the largest weights of each layer, and the mask of these."""
        scores = self.score(trees.pick(model, prunable))
        mask = top(scores, self.allocation(scores, self.density))
        return Packet(trees.apply_mask(model, mask), mask)

    def init(self, setup: Setup) -> SparseModel:
        """The pruned initial model."""
        packet = self.prune(setup.params, weights_to_prune(setup.layout, self.density))
        return SparseModel(0, packet.values, packet.mask or {})

    def deliver(self, state: SparseModel, client: int) -> Mapping[str, Packet]:
        """The sparse model, the same for every client."""
        return deliver_sparse(state)

    def plan(self, state: SparseModel, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(client, self.deliver(state, client)) for client in cohort]

    def fold(self, state: SparseModel, reports: Iterable[Report]) -> SparseModel:
        """The weighted mean, pruned again or under the mask that stays."""
        dense = average(state, reports, self.mean)
        if self.static:
            return replace(dense, model=trees.apply_mask(dense.model, state.mask))
        # The mask names all that is prunable: it never gains or loses a layer.
        packet = self.prune(dense.model, state.mask)
        return replace(dense, model=packet.values, mask=packet.mask or {})

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train without a mask, prune, send; or train under the mask that stays."""
        if self.static:
            train = Train(self.objective, self.local)
            give = Give(send_sparse)
        else:
            # mask="" takes no mask from the carry, although the model came with one.
            train = Train(self.objective, self.local, mask="")
            give = Give(self._send_pruned, sent_with_own_mask)
        return {"train": (train, give), "use": ()}[verb]

    def _send_pruned(self, carry: Carry, client: Client) -> Outcome:
        """What was trained, pruned."""
        return Outcome({"model": self.prune(carry["local"], client.layout.prunable)})

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The kept share of all parameters, biases included; masks are not counted."""
        return round(self.density * dense_bytes(net.layout.size, cohort, rounds))
