r"""How important each layer is, by its weights or by its gradient: other ways than imprinting.

Both give one score per layer, and :func:`weighed` makes of the scores weights that sum to 1,

.. math:: \omega_j = \mathrm{softmax}_j (s_j / \max_l s_l).

A score is 0 to 1 there, as what a layer adds to an accuracy mostly is, and goes through the same
softmax as imprinting's. So the most important layer has at most e times the weight of the least,
and the numbers of centroids are of imprinting's scale; plain shares :math:`s_j / \sum_l s_l` would
leave nearly nothing to a wide layer of small weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def by_magnitude(params: Mapping[str, Tensor], layers: Sequence[Sequence[str]]) -> list[float]:
    r"""The mean of :math:`|w|` over each layer; ``layers`` holds the names of each one's weights.

    >>> by_magnitude({"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([-1.0])}, [["a"], ["b"]])
    [2.0, 1.0]
    """
    scores = []
    for names in layers:
        weights = torch.cat([params[name].reshape(-1) for name in names])
        scores.append(float(weights.double().abs().mean()))
    return scores


def by_gradient(
    params: Mapping[str, Tensor], gradient: Mapping[str, Tensor], layers: Sequence[Sequence[str]]
) -> list[float]:
    r"""The mean of :math:`|w\,g|` of each layer: to first order, how much w matters to the loss.

    Unlike :math:`|g|` alone it does not change where one layer is scaled up and the next one down,
    which leaves a ReLU network as it is.

    >>> w = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([0.5])}
    >>> g = {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([-4.0])}
    >>> by_gradient(w, g, [["a"], ["b"]])
    [4.0, 2.0]
    """
    products = {name: params[name] * slope for name, slope in gradient.items()}
    return by_magnitude(products, layers)


def weighed(scores: Sequence[float]) -> list[float]:
    """Scores of 0 or more as weights that sum to 1; all alike where all are 0.

    >>> [round(omega, 4) for omega in weighed([2.0, 1.0])]
    [0.6225, 0.3775]
    """
    largest = max(scores)
    shares = torch.tensor(scores, dtype=torch.float64) / (largest or 1.0)
    omega: list[float] = torch.softmax(shares, 0).tolist()
    return omega
