"""How many weights each layer keeps: ``Allocation(scores, density) -> {layer: number}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Uniform:
    r"""The same density everywhere: layer :math:`l` keeps :math:`\mathrm{round}(\rho\, d_l)` of :math:`d_l` weights.

    >>> Uniform()({"a": torch.ones(10), "b": torch.ones(3)}, 0.5)
    {'a': 5, 'b': 2}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> dict[str, int]:
        """The number of weights kept, per layer."""
        return {k: round(density * v.numel()) for k, v in scores.items()}


@dataclass(frozen=True)
class GlobalRank:
    r"""All weights ranked together: the :math:`\mathrm{round}(\rho\, d)` best of the network stay, wherever they are.

    Weights of equal score stay in the order of layers, then of places, so the number is exact.

    >>> GlobalRank()({"a": torch.tensor([5.0, 4.0]), "b": torch.tensor([3.0, 1.0])}, 0.75)
    {'a': 2, 'b': 1}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> dict[str, int]:
        """The number of weights kept, per layer."""
        every = torch.cat([v.reshape(-1) for v in scores.values()])
        best = torch.argsort(every, descending=True, stable=True)[: round(density * every.numel())]
        owner = torch.repeat_interleave(torch.tensor([v.numel() for v in scores.values()]))
        counts = torch.bincount(owner[best], minlength=len(scores))
        return dict(zip(scores, counts.tolist(), strict=True))
