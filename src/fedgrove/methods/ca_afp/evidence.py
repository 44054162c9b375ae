"""What clients report about a group's weights, and the running sums the server keeps of it.

A client measures its gradient at the model it was sent. Of the weights in use only the sign is sent
(one byte each before coding, about one bit after), of the pruned ones only the few with the largest
gradients. Leaves are called ``scores.*`` so that the ledger shows what evidence costs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ... import trees
from ...core import ExpectedPacket, Packet
from ...parts.gradient import settled
from ...parts.mask import best
from ...trees import Tree

Sums = dict[str, Tensor]
"""Of one group since its last pruning step, over all prunable weights: ``spread`` the sum of
squared distances from the mean of the round, over ``pooled`` reports; ``signs`` the sum of signs
over ``votes``; ``grow`` the summed gradient of all examples."""


def evidence_packet(gradient: Tensor, mask: Tensor, grow: int) -> Packet:
    """CA-AFP: the packet of evidence that a client sends: the signs of its gradient.

    Signs under the mask, and outside it the ``grow`` largest values in 16 bits.

    >>> g = torch.tensor([-3.0, 0.0, 2.0, 4.0])
    >>> packet = evidence_packet(g, mask=torch.tensor([True, True, False, False]), grow=1)
    >>> packet.values["scores.signs"]
    tensor([-1,  0], dtype=torch.int8)
    >>> packet.values["scores.grow"]
    tensor([0., 4.], dtype=torch.bfloat16)
    """
    gradient = settled(gradient)
    values: Tree = {"scores.signs": trees.select(gradient, mask).sign().to(torch.int8)}
    if grow:
        outside = trees.select(gradient, ~mask)
        # Zeros mark the rest: the codec writes few bytes for them, and no positions are needed.
        largest = trees.where(best(outside.abs(), grow), outside)
        values["scores.grow"] = largest.to(torch.bfloat16)
    return Packet(values)


def expected_evidence(weights: int, active: int, grow: int) -> ExpectedPacket:
    """CA-AFP: the form of the evidence if ``active`` of the weights are in use."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "scores.signs": (torch.int8, (active,))
    }
    if grow:
        tensors["scores.grow"] = (torch.bfloat16, (weights - active,))
    return ExpectedPacket(tensors)


class Gather:
    """The sums of one group in one round; :meth:`since` adds them to those of the rounds before.

    Variance is taken within a round, around that round's mean: models of different rounds differ
    because they have trained longer. So only rounds in which two or more clients of the group took
    part count.
    """

    def __init__(self, model: Tensor, mask: Tensor) -> None:
        # Looked up once for all reports: a search takes longer than to add them.
        self._inside = trees.find_true(mask)
        self._outside = trees.find_true(~mask)
        # Doubles: the variance is a small difference of two large sums.
        self._model = model.double()
        self._moved = torch.zeros_like(self._model)
        self._squares = torch.zeros_like(self._model)
        # As they are sent, side by side; since() puts the sums in their places.
        self._signs = self._model.new_zeros(len(self._inside))
        self._grow = self._model.new_zeros(len(self._outside))
        self._reports = 0
        self._votes = 0

    def add(self, trained: Tensor, evidence: Mapping[str, Tensor]) -> None:
        """CA-AFP: add one client's trained model and its evidence.

        Evidence that is absent, does not fit the mask or has other numbers than votes is skipped.
        """
        # Distances from the model sent have the same variance as the weights, and are smaller: less
        # is lost when the squared mean is subtracted in since().
        # In place, here and below: new memory takes longer than the arithmetic.
        moved = trained.to(torch.float64, copy=True).sub_(self._model)
        self._moved += moved
        self._squares += moved.square_()
        self._reports += 1
        signs = evidence.get("scores.signs")
        if signs is not None and signs.shape == self._signs.shape and _are_votes(signs):
            self._signs += signs
            self._votes += 1
        grow = evidence.get("scores.grow")
        if grow is not None and grow.shape == self._grow.shape:
            self._grow += grow

    def since(self, before: Mapping[str, Tensor]) -> Sums:
        """CA-AFP: these sums of evidence added to those ``before``, which may be empty."""
        spread = torch.zeros_like(self._squares)
        pooled = 0
        # One report is its own mean: it does not show how clients differ.
        if self._reports > 1:
            # sum (x - mean)^2 = sum x^2 - (sum x)^2 / n, which rounding may leave just below 0.
            spread = (self._squares - self._moved**2 / self._reports).clamp(min=0)
            pooled = self._reports
        now = {
            "spread": spread,
            "pooled": torch.tensor(float(pooled)),
            "signs": torch.zeros_like(spread).index_copy_(0, self._inside, self._signs),
            "votes": torch.tensor(float(self._votes)),
            "grow": torch.zeros_like(spread).index_copy_(0, self._outside, self._grow),
        }
        if not before:
            return now
        return trees.map(torch.add, now, before)


def _are_votes(signs: Tensor) -> bool:
    """Whether none is outside -1 to 1: no client counts more than once by sending larger numbers.

    >>> _are_votes(torch.tensor([1, -1], dtype=torch.int8)), _are_votes(torch.tensor([1.0, 1.5]))
    (True, False)
    >>> _are_votes(torch.tensor([0, 1], dtype=torch.uint8))
    True
    """
    if not len(signs):
        return True
    # Not by magnitudes: that of -128 is -128 in eight bits.
    least, most = torch.aminmax(signs)
    # As numbers of Python: an unsigned tensor has no -1 to compare with.
    return least.item() >= -1 and most.item() <= 1


def variance(sums: Mapping[str, Tensor]) -> Tensor | None:
    """CA-AFP: the variance of a group's clients around the mean of their round, or None.

    It is None if no round had two clients.
    """
    if not sums or sums["pooled"] < 2:
        return None
    return sums["spread"] / sums["pooled"]


def votes(sums: Mapping[str, Tensor]) -> tuple[Tensor | None, float]:
    """CA-AFP: the sum of gradient signs and how many voted; None with fewer than two votes."""
    if not sums:
        return None, 0.0
    n = float(sums["votes"])
    # A single vote always agrees with itself.
    if n < 2:
        return None, n
    return sums["signs"], n
