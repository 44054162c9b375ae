"""A client's choice among several models (IFCA, SAFL).

It takes the one with the lowest loss on its own training data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core import Batch, Carry, Client, Outcome, Packet
from ..nets import Net
from ..trees import Tree


@dataclass(frozen=True)
class Losses:
    """What :class:`~fedgrove.core.Measure` sums: each model's loss over a batch.

    The models are ``carry["model0"]``, ``carry["model1"]``, ...; ``models`` is their number.
    """

    models: int

    @property
    def passes(self) -> int:
        """Each model runs once."""
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
    r""":math:`\arg\min_j L_k(w^j)` becomes ``carry["model"]``; of equal ones the first."""
    j = int(carry["losses"]["loss"].argmin())
    return {**carry, "model": carry[f"model{j}"], "choice": {"group": torch.tensor(j)}}


def send_choice(carry: Carry, client: Client) -> Outcome:
    """Send the trained model, and which model it was."""
    return Outcome({"model": Packet(carry["local"])}, {"group": float(carry["choice"]["group"])})
