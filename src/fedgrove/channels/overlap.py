"""Averaging models of different shapes: every parameter over the clients that have it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..trees import Tree


class OverlapMean:
    r"""The mean over those who have a parameter (Hermes, Li et al. 2021; stage 2 of SAFL).

    :math:`\bar w_j = \sum_k n_k m_{kj} w_{kj} \big/ \sum_k n_k m_{kj}`; where nobody has it, the previous value.
    :math:`w_k` -> ``tree``, :math:`m_k` -> ``mask`` (a leaf it does not name is whole), :math:`n_k` -> ``weight``. A
    parameter that only one client has stays his, to the bit. Sums are kept in double precision.

    >>> mean = OverlapMean()
    >>> mean.add({"w": torch.tensor([2.0, 0.0, 0.0])}, {"w": torch.tensor([True, False, False])}, weight=1)
    >>> mean.add({"w": torch.tensor([8.0, 3.0, 0.0])}, {"w": torch.tensor([True, True, False])}, weight=2)
    >>> mean.value({"w": torch.tensor([7.0, 7.0, 7.0])})["w"]
    tensor([6., 3., 7.])
    """

    def __init__(self) -> None:
        self._sums: Tree = {}
        self._weights: Tree = {}

    def add(
        self, tree: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None, weight: float
    ) -> None:
        """Take one client's tree into the sums; a client may leave tensors out."""
        if not weight >= 0:
            raise ValueError(f"a client's weight is {weight}; it must be 0 or more")
        for k, v in tree.items():
            if k not in self._sums:
                zeros = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
                self._sums[k], self._weights[k] = zeros, zeros.clone()
            if weight:
                here = None if mask is None else mask.get(k)
                # What a mask hides need not be 0, nor even finite.
                term = v.double() if here is None else v.double().masked_fill(~here, 0.0)
                self._sums[k].add_(term, alpha=float(weight))
                self._weights[k].add_(1.0 if here is None else here.double(), alpha=float(weight))

    def value(self, previous: Mapping[str, Tensor]) -> Tree:
        """The mean so far, with the names, order and types of ``previous``."""
        if strange := self._sums.keys() - previous.keys():
            raise ValueError(
                f"clients sent tensors that the previous model lacks: {sorted(strange)}"
            )
        return {k: self._mean(k, v) if k in self._sums else v for k, v in previous.items()}

    def _mean(self, name: str, previous: Tensor) -> Tensor:
        weight = self._weights[name]
        mean = (self._sums[name] / torch.where(weight > 0, weight, 1.0)).to(previous.dtype)
        return torch.where(weight > 0, mean, previous)
