"""How much a weight matters to a group of clients: CA-AFP's three signals, and their blend.

They are functions of vectors: a group's evidence is kept as sums over all prunable weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import check


def relative(w: Tensor) -> Tensor:
    r"""Mag (CA-AFP, Eq. 9): :math:`|w_j| / \max_u |w_u|`; all 0 where every weight is.

    >>> relative(torch.tensor([-2.0, 1.0]))
    tensor([1.0000, 0.5000])
    """
    # max() of no numbers raises; a network with nothing to prune has no scores either.
    if not w.numel():
        return w.abs()
    largest = w.abs().max()
    return w.abs() / torch.where(largest > 0, largest, 1.0)


def coherence(variance: Tensor) -> Tensor:
    r"""Coh (CA-AFP, Eq. 10): :math:`1 / (1 + \mathrm{Var}_k\, w_j^{(k)})`, 1 where all agree.

    >>> coherence(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 0.5000])
    """
    return 1 / (1 + variance)


def consistency(signs: Tensor, votes: float) -> Tensor:
    r"""Con (CA-AFP, Eq. 11): :math:`|\frac1n \sum_k \mathrm{sign}(\partial L_k / \partial w_j)|`.

    The sum -> ``signs``, n -> ``votes``.

    >>> consistency(torch.tensor([3.0, -1.0]), 3)
    tensor([1.0000, 0.3333])
    """
    return signs.abs() / votes


@dataclass(frozen=True)
class Blend:
    r"""CA-AFP, Eq. 8: :math:`\alpha\,\mathrm{Mag} + \beta\,\mathrm{Coh} + \gamma\,\mathrm{Con}`.

    The three weights sum to 1. Where fewer than two clients took part there is nothing to agree on:
    ``variance`` or ``signs`` is None and its term is 1.

    >>> w = torch.tensor([-2.0, 1.0])
    >>> Blend(0.5, 0.25, 0.25)(w, torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]), votes=2)
    tensor([0.8750, 0.5000])
    """

    alpha: float = 0.5
    beta: float = 0.25
    gamma: float = 0.25

    def __post_init__(self) -> None:
        given = (self.alpha, self.beta, self.gamma)
        check(
            min(given) >= 0 and math.isclose(sum(given), 1),
            "weights",
            given,
            "three numbers of 0 or more, sum 1",
        )

    def __call__(
        self, w: Tensor, variance: Tensor | None, signs: Tensor | None, votes: float
    ) -> Tensor:
        """The score of every weight."""
        coh = torch.ones_like(w)
        if variance is not None:
            coh = coherence(variance)
        con = torch.ones_like(w)
        if signs is not None:
            con = consistency(signs, votes)
        return self.alpha * relative(w) + self.beta * coh + self.gamma * con
