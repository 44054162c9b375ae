"""A client's choice among several models: the one with the lowest loss on its own training data (IFCA, SAFL)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core import Batch, Carry, Client, Outcome, Packet
from ..nets import Net
from ..trees import Tree


@dataclass(frozen=True)
class Losses:
    """What :class:`~fedgrove.core.Measure` sums: each model's loss over a batch; models are ``carry["model0"]``..."""

    models: int

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The summed cross-entropy of every model."""
        found = []
        for j in range(self.models):
            each = F.cross_entropy(
                net(carry[f"model{j}"], batch.x, train=False).logits, batch.y, reduction="none"
            )
            found.append((each * batch.weight).sum())
        return {"loss": torch.stack(found)}


def choose(carry: Carry, client: Client) -> Carry:
    r""":math:`\arg\min_j L_k(w^j)` becomes ``carry["model"]``; of equal ones the first."""
    j = int(carry["losses"]["loss"].argmin())
    return {**carry, "model": carry[f"model{j}"], "choice": {"group": torch.tensor(j)}}


def send_choice(carry: Carry, client: Client) -> Outcome:
    """What was trained, and which model it was."""
    return Outcome({"model": Packet(carry["local"])}, {"group": float(carry["choice"]["group"])})
