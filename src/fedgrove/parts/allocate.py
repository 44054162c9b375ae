"""How many weights each layer keeps: ``Allocation(scores, density) -> {layer: number}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import trees


@dataclass(frozen=True)
class Uniform:
    r"""The same density in all layers: layer :math:`l` keeps :math:`\mathrm{round}(\rho\, d_l)`.

    :math:`\rho` -> ``density``, :math:`d_l` the number of weights of layer :math:`l`.

    >>> Uniform()({"a": torch.ones(10), "b": torch.ones(3)}, 0.5)
    {'a': 5, 'b': 2}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> dict[str, int]:
        """The number of weights kept, per layer."""
        return {layer: round(density * score.numel()) for layer, score in scores.items()}


@dataclass(frozen=True)
class GlobalRank:
    r"""All weights ranked together: the :math:`\mathrm{round}(\rho\, d)` best of the network stay.

    :math:`\rho` -> ``density``, :math:`d` the number of weights of all layers. Of weights with
    equal scores the earlier layer's stay, within a layer those that come first: the number kept is
    exact.

    >>> GlobalRank()({"a": torch.tensor([5.0, 4.0]), "b": torch.tensor([3.0, 1.0])}, 0.75)
    {'a': 2, 'b': 1}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> dict[str, int]:
        """The number of weights kept, per layer."""
        all_scores = trees.flat(scores)
        kept = round(density * all_scores.numel())
        # A stable sort decides ties by position, which is what the docstring promises.
        best = torch.argsort(all_scores, descending=True, stable=True)[:kept]
        sizes = torch.tensor([score.numel() for score in scores.values()])
        # Sizes (2, 3) give layer numbers (0, 0, 1, 1, 1): the layer of each place in all_scores.
        layer_of_place = torch.repeat_interleave(sizes)
        # minlength keeps a count for the last layers even where none of their weights is kept.
        counts = torch.bincount(layer_of_place[best], minlength=len(scores))
        return dict(zip(scores, counts.tolist(), strict=True))
