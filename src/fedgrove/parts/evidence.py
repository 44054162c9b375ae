"""What clients tell about a group's weights, and the running sums a server keeps of it.

A client measures its gradient at the model it was sent. Of the weights in use only the sign travels (one byte each
before coding, about one bit after), of the pruned ones only the few with the largest gradients; leaves are called
``scores.*`` so that the ledger shows what evidence costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from .. import trees
from ..core import Batch, Carry, Packet
from ..nets import Net
from ..trees import Tree
from .mask import best
from .objective import Objective

Sums = dict[str, Tensor]
"""Of one group since its last pruning step, over all prunable weights: ``spread`` the sum of squared distances from
the mean of the round, over ``pooled`` reports; ``signs`` the sum of signs over ``votes``; ``grow`` the summed
gradient of all examples."""


@dataclass(frozen=True)
class Gradient:
    """What :class:`~fedgrove.core.Measure` sums: the gradient of the objective over a batch, times its examples."""

    objective: Objective

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """By prunable weight, without dropout."""

        def loss(weights: Tree) -> Tensor:
            tree = {**params, **weights}
            out = net(tree, batch.x, train=False)
            return (
                self.objective(out, trees.pick(tree, net.layout.params), batch, carry)[0]
                * batch.weight.sum()
            )

        found: Tree = grad(loss)(trees.pick(params, net.layout.prunable))
        return found


def settled(gradient: Tensor) -> Tensor:
    """The gradient with what is only rounding set to 0: less than 16 units in the last place of its largest entry.

    A weight that never left the reference (behind a dead unit, say) is pulled by nothing but rounding: its vote, and
    whether it regrows, would differ from machine to machine.

    >>> settled(torch.tensor([1.0, 1e-9]))
    tensor([1., 0.])
    """
    noise = 16 * torch.finfo(gradient.dtype).eps * gradient.abs().max()
    return torch.where(gradient.abs() > noise, gradient, 0.0)


def evidence_packet(gradient: Tensor, mask: Tensor, grow: int) -> Packet:
    """What a client sends of its gradient: signs under the mask, and outside it the ``grow`` largest in 16 bits.

    >>> g, m = torch.tensor([-3.0, 0.0, 2.0, 4.0]), torch.tensor([True, True, False, False])
    >>> evidence_packet(g, m, 1).values
    {'scores.signs': tensor([-1,  0], dtype=torch.int8), 'scores.grow': tensor([0., 4.], dtype=torch.bfloat16)}
    """
    gradient = settled(gradient)
    values: Tree = {"scores.signs": gradient[mask].sign().to(torch.int8)}
    if grow:
        outside = gradient[~mask]
        values["scores.grow"] = torch.where(best(outside.abs(), grow), outside, 0.0).to(
            torch.bfloat16
        )
    return Packet(values)


class Gather:
    """The sums of one group in one round; :meth:`since` adds them to those of the rounds before.

    Variance is taken within a round, around that round's mean: models of different rounds differ because they have
    trained longer. So only rounds in which two or more clients of the group took part count.
    """

    def __init__(self, model: Tensor, mask: Tensor) -> None:
        self._model, self._mask = model.double(), mask
        self._moved, self._squares = torch.zeros_like(self._model), torch.zeros_like(self._model)
        self._signs, self._grow = torch.zeros_like(self._model), torch.zeros_like(self._model)
        self._reports, self._votes = 0, 0

    def add(self, trained: Tensor, told: Mapping[str, Tensor]) -> None:
        """Take in one client's trained model and what it told; votes that do not fit the mask, or are none, are not."""
        moved = trained.double() - self._model
        self._moved += moved
        self._squares += moved * moved
        self._reports += 1
        active = int(self._mask.sum())
        signs, grow = told.get("scores.signs"), told.get("scores.grow")
        if signs is not None and signs.shape == (active,) and bool((signs.abs() <= 1).all()):
            self._signs[self._mask] += signs.double()
            self._votes += 1
        if grow is not None and grow.shape == (len(self._mask) - active,):
            self._grow[~self._mask] += grow.double()

    def since(self, before: Mapping[str, Tensor]) -> Sums:
        """These sums and those before."""
        n = self._reports
        around = (
            (self._squares - self._moved**2 / n).clamp(min=0)
            if n > 1
            else torch.zeros_like(self._squares)
        )
        now = {
            "spread": around,
            "pooled": torch.tensor(float(n if n > 1 else 0)),
            "signs": self._signs,
            "votes": torch.tensor(float(self._votes)),
            "grow": self._grow,
        }
        return trees.map(torch.add, now, before) if before else now


def variance(sums: Mapping[str, Tensor]) -> Tensor | None:
    """The clients' variance about their rounds' means; None where no two clients met."""
    return sums["spread"] / sums["pooled"] if sums and sums["pooled"] >= 2 else None


def votes(sums: Mapping[str, Tensor]) -> tuple[Tensor | None, float]:
    """The sum of signs and how many voted; None with fewer than two votes."""
    n = float(sums["votes"]) if sums else 0.0
    return (sums["signs"] if n >= 2 else None), n
