"""How many weights a model keeps, found from what they are worth and the time they take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import check


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
    """What a round takes without any weight, beside what all of them add. (The authors'
    coefficients for FEMNIST: 6.2 seconds, beside 6.5e-6 seconds for each of 6.6 million weights.)
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
