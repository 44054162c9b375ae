"""How many weights each layer keeps: ``Allocation(scores, density) -> {layer: number}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .. import trees
from .mask import best


@dataclass(frozen=True)
class Uniform:
    r"""The same density in all layers: layer :math:`l` keeps :math:`\mathrm{round}(\rho\, d_l)`.

    :math:`\rho` -> ``density``, :math:`d_l` the number of weights of layer :math:`l`.

    >>> import torch
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

    >>> import torch
    >>> GlobalRank()({"a": torch.tensor([5.0, 4.0]), "b": torch.tensor([3.0, 1.0])}, 0.75)
    {'a': 2, 'b': 1}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> dict[str, int]:
        """The number of weights kept, per layer."""
        all_scores = trees.flatten(scores)
        kept = round(density * all_scores.numel())
        masks = trees.unflatten(best(all_scores, kept), scores)
        return {layer: int(mask.sum()) for layer, mask in masks.items()}


@dataclass(frozen=True)
class ERK:
    r"""Erdos-Renyi kernel (Evci et al. 2020; Mocanu et al. 2018): small layers stay denser.

    Layer :math:`l` keeps :math:`\epsilon \sum_i D_{li}` weights, its density is
    :math:`\epsilon \sum_i D_{li} / \prod_i D_{li}`, where :math:`D_l` are the dimensions of its
    weight (outputs, inputs, height and width of a kernel). One :math:`\epsilon` for the network
    meets the density; layers that would keep more than all are full, and :math:`\epsilon` is found
    for the rest. The number over all layers is exact: what rounding down leaves goes to the layers
    of largest remainder, of equal ones to the earlier.

    >>> import torch
    >>> ERK()({"a": torch.ones(4, 6), "b": torch.ones(10, 10), "c": torch.ones(2, 2)}, 0.5)
    {'a': 20, 'b': 40, 'c': 4}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> dict[str, int]:
        """The number of weights kept, per layer."""
        sizes: dict[str, int] = {}
        dimensions: dict[str, int] = {}
        for layer, score in scores.items():
            sizes[layer] = score.numel()
            dimensions[layer] = sum(score.shape)
        counts: dict[str, int] = {}
        left = round(density * sum(sizes.values()))
        free = list(sizes)
        # A full layer takes less than epsilon would give it. What is left raises epsilon for the
        # other layers, and further ones may be full then.
        while free:
            epsilon = left / sum(dimensions[layer] for layer in free)
            full = [layer for layer in free if epsilon * dimensions[layer] >= sizes[layer]]
            if not full:
                break
            for layer in full:
                counts[layer] = sizes[layer]
                left -= sizes[layer]
                free.remove(layer)
        shares: dict[str, float] = {}
        for layer in free:
            shares[layer] = epsilon * dimensions[layer]
            counts[layer] = math.floor(shares[layer])
            left -= counts[layer]
        # A stable sort: of equal remainders the earlier layer's comes first.
        by_remainder = sorted(free, key=lambda layer: counts[layer] - shares[layer])
        for layer in by_remainder[:left]:
            counts[layer] += 1
        # Full layers were counted first; callers expect the order of the network.
        return {layer: counts[layer] for layer in scores}
