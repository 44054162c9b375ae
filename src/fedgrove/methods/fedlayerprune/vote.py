"""How clients agree on one mask: a vote on every weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import trees
from ...errors import check
from ...trees import Mask

ROUNDING = 1e-9
"""Shares of the vote nearer to the threshold than this are equal to it: 3 of 10 is not above .3,
whatever binary fractions make of it."""


@dataclass(frozen=True)
class Vote:
    r"""FedLayerPrune, Eq. 12: a weight stays if more than a share of the clients keep it.

    :math:`m_i = [\sum_k \lambda_k m_{k,i} > \tau]` with :math:`\lambda_k = n_k / \sum_j n_j`.
    :math:`\tau` -> ``threshold``, :math:`n_k` -> ``weight``, :math:`m_k` -> ``mask``. At 0 a weight
    stays if anybody keeps it; at 1 none could, so 1 is refused.

    Differs from the paper: no layer is emptied. Where no weight of a layer reaches the threshold,
    those with the most votes stay.

    >>> votes = Vote(0.3).start({"w": torch.ones(3).bool()})
    >>> votes.add({"w": torch.tensor([True, True, False])}, 3)
    >>> votes.add({"w": torch.tensor([False, True, False])}, 7)
    >>> votes.value()["w"]
    tensor([False,  True, False])
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        allowed = "in [0, 1): at 1 no weight could have more than all votes"
        check(0 <= self.threshold < 1, "threshold", self.threshold, allowed)

    def start(self, mask: Mapping[str, Tensor]) -> Votes:
        """A vote on the weights that this mask still has."""
        return Votes(self.threshold, mask)


class Votes:
    """The votes counted so far."""

    def __init__(self, threshold: float, mask: Mapping[str, Tensor]) -> None:
        self._threshold = threshold
        self._mask = dict(mask)
        self._for = {
            name: torch.zeros_like(kept, dtype=torch.float64) for name, kept in mask.items()
        }
        self._all = 0.0

    def add(self, mask: Mapping[str, Tensor] | None, weight: float) -> None:
        """Count one client's vote; it keeps all of a layer that its mask does not name."""
        self._all += weight
        for name, votes in self._for.items():
            kept = None if mask is None else mask.get(name)
            if kept is None:
                votes += weight
            else:
                # As bytes, which become doubles three times as fast as booleans. A product with 0
                # or 1 is exact, also within a sum.
                votes.add_(kept.view(torch.uint8), alpha=weight)

    def value(self) -> Mask:
        """The weights that enough clients keep, and that the mask before the vote had."""
        if not self._all:
            return self._mask
        agreed: Mask = {}
        for name, before in self._mask.items():
            share = trees.where(before, self._for[name] / self._all, -1.0)
            kept = share > self._threshold + ROUNDING
            if not bool(kept.any()):
                # An empty layer would cut the network in two.
                kept = before & (share == share.max())
            agreed[name] = kept
        return agreed

    def anybody(self) -> Mask:
        """The weights that at least one client keeps."""
        return {name: votes > 0 for name, votes in self._for.items()}
