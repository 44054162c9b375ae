"""Averaging models of different shapes: every parameter over the clients that have it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..trees import Tree


class OverlapMean:
    r"""The mean over those who have a parameter (Hermes, Li et al. 2021; stage 2 of SAFL).

    :math:`\bar w_j = \sum_k n_k m_{kj} w_{kj} \big/ \sum_k n_k m_{kj}`; where nobody has it, the
    previous value. :math:`w_k` -> ``tree``, :math:`m_k` -> ``mask`` (a leaf it does not name is
    whole), :math:`n_k` -> ``weight``. A parameter that only one client has keeps that client's
    value, to the bit. Sums are kept in double precision.

    >>> mean = OverlapMean()
    >>> mean.add({"w": torch.tensor([2.0, 0.0, 0.0])}, {"w": torch.tensor([True, False, False])}, 1)
    >>> mean.add({"w": torch.tensor([8.0, 3.0, 0.0])}, {"w": torch.tensor([True, True, False])}, 2)
    >>> mean.value({"w": torch.tensor([7.0, 7.0, 7.0])})["w"]
    tensor([6., 3., 7.])
    """

    def __init__(self) -> None:
        self._sums: Tree = {}
        self._weights: Tree = {}

    def add(
        self, tree: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, weight: float
    ) -> None:
        """Add one client's tree to the sums; a client may leave tensors out."""
        if not weight >= 0:
            raise ValueError(f"a client's weight is {weight}; it must be 0 or more")
        for name, leaf in tree.items():
            if name not in self._sums:
                zeros = torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device)
                self._sums[name] = zeros
                self._weights[name] = zeros.clone()
            if not weight:
                continue
            kept = None if mask is None else mask.get(name)
            if kept is None:
                self._sums[name].add_(leaf.double(), alpha=float(weight))
                self._weights[name].add_(1.0, alpha=float(weight))
            else:
                # Masked values need not be 0, nor even finite: replace them, do not multiply.
                self._sums[name].add_(leaf.double().masked_fill(~kept, 0.0), alpha=float(weight))
                self._weights[name].add_(kept.double(), alpha=float(weight))

    def value(self, previous: Mapping[str, Tensor]) -> Tree:
        """The mean so far, with the names, order and types of ``previous``."""
        unexpected = self._sums.keys() - previous.keys()
        if unexpected:
            raise ValueError(
                f"clients sent tensors that the previous model lacks: {sorted(unexpected)}"
            )
        mean: Tree = {}
        for name, old in previous.items():
            if name not in self._sums:
                mean[name] = old
                continue
            weight = self._weights[name]
            somebody_has_it = weight > 0
            # Where nobody has it, divide by 1 instead of 0 and take the previous value.
            quotient = self._sums[name] / torch.where(somebody_has_it, weight, 1.0)
            mean[name] = torch.where(somebody_has_it, quotient.to(old.dtype), old)
        return mean
