"""How reports become a model: running sums, so that the server never holds more than one report."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..trees import Tree


class Mean:
    r"""The weighted mean :math:`\bar w = \sum_k n_k w_k / \sum_k n_k` of clients' trees.

    (FedAvg, McMahan et al. 2017, Alg. 1.) :math:`w_k` -> ``tree``, :math:`n_k` -> ``weight``. Sums
    are kept in double precision, so that the mean of one client, or of equal clients, is that
    client to the bit.

    >>> mean = Mean()
    >>> mean.add({"w": torch.tensor([1.0])}, weight=1)
    >>> mean.add({"w": torch.tensor([4.0])}, weight=2)
    >>> mean.value()["w"]
    tensor([3.])
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._sums: Tree = {}
        self._types: dict[str, torch.dtype] = {}

    def add(self, tree: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's tree to the sums."""
        is_first = not self._sums
        if not is_first and tree.keys() != self._sums.keys():
            raise ValueError(
                f"trees to average differ in names: {sorted(set(tree) ^ set(self._sums))}"
            )
        for name, leaf in tree.items():
            if is_first:
                self._types[name] = leaf.dtype
                self._sums[name] = leaf.double() * weight
            else:
                # Computed in double: an in-place operation takes the sum's dtype, not the leaf's.
                self._sums[name].add_(leaf, alpha=weight)
        self.weight += weight

    def value(self) -> Tree:
        """The mean so far, each leaf in the dtype it came in."""
        if self.weight <= 0:
            raise ValueError("a mean of nothing: no report was added, or all weights are 0")
        mean = {}
        for name, total in self._sums.items():
            mean[name] = (total / self.weight).to(self._types[name])
        return mean
