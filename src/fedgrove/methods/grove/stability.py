r"""Groups when the evidence supports them: a division must predict what clients do later.

Of every client two vectors are known, from its 1st, 3rd, 5th, ... and its 2nd, 4th, ... reports. A
division is made from one half and tried on the other: noise, which is different in the two, cannot
speak for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...errors import check
from ...parts.group import Agglomerative, renumbered

NEARLY = 0.9
"""Fewer groups are taken where they predict this share of what more groups do."""
SURE = 2.0
"""A client must be more like itself than like others by this many standard deviations."""
MOST_STEPS = 20
"""The most rounds of moving clients to the group that is nearest to them."""


class Found(NamedTuple):
    """A division: the group of each row, and how much of what is lasting its groups share."""

    labels: list[int]
    shared: float


@dataclass(frozen=True)
class HeldOutGroups:
    r"""The number of groups that best predict what a client does later, or one.

    :math:`a_k, b_k` -> what client k does unlike all others, from either half of its reports, of
    length 1. A division of the :math:`a` predicts of client k the mean :math:`m_k` of the other
    members of its group, which is tried on the other half:

    .. math::

        \mathrm{predicted} = \frac{\sum_k b_k \cdot m_k}{(\sum_k |m_k|^2)^{1/2}}, \qquad
        \mathrm{shared} = \frac{\sum_k b_k \cdot m_k}{\sum_k b_k \cdot a_k}

    More groups do not predict more by themselves: a mean of few is noisier. Of 2 to ``most``
    groups the fewest are taken that predict nine tenths of the best. ``shared`` is how much of
    what is lasting in a client its group has too. Below ``least`` each client is unlike the rest
    in its own way, and all stay in one group. Both are means over the two ways to choose halves.
    Before that, clients must be more like themselves than like others at all (:func:`certainty`).
    """

    most: int = 6
    least: float = 0.4
    linkage: Agglomerative = Agglomerative()

    def __post_init__(self) -> None:
        check(self.most >= 1, "most", self.most, "1 or more groups")
        check(0 <= self.least <= 1, "least", self.least, "in [0, 1]")

    def __call__(self, first: Tensor, second: Tensor) -> Found:
        """The group of each row; all are in group 0 where nothing better was found."""
        first = normalize(first.double())
        second = normalize(second.double())
        count = len(first)
        # Where nothing lasts, what is shared is noise over noise.
        if certainty(first, second) < SURE:
            return Found([0] * count, 0.0)
        predicted = {}
        shared = {}
        # A group of one predicts nothing.
        numbers = range(2, min(self.most, count // 2) + 1)
        # Distances and merges of a half are the same for all numbers of groups.
        of_first = self.linkage.several(first, numbers)
        of_second = self.linkage.several(second, numbers)
        for number, one_start, other_start in zip(numbers, of_first, of_second, strict=True):
            one = self.tried(first, second, number, one_start)
            other = self.tried(second, first, number, other_start)
            predicted[number] = (one[0] + other[0]) / 2
            shared[number] = (one[1] + other[1]) / 2
        best = max(predicted.values(), default=0.0)
        if best <= 0:
            return Found([0] * count, 0.0)
        # The fewest: more groups leave fewer clients to average in each.
        number = min(n for n, value in predicted.items() if value >= NEARLY * best)
        if shared[number] < self.least:
            return Found([0] * count, shared[number])
        return Found(self.divide(first + second, number), shared[number])

    def tried(
        self, made_of: Tensor, tried_on: Tensor, number: int, start: Sequence[int] | None = None
    ) -> tuple[float, float]:
        """Grove: how well groups of one half of the evidence predict the other half."""
        labels = torch.tensor(self.divide(made_of, number, start))
        expected = others_mean(made_of, labels)
        agreement = float((tried_on * expected).sum())
        length = float(expected.norm())
        lasting = float((made_of * tried_on).sum())
        if length == 0 or lasting <= 0:
            # Nothing is expected, or nothing that clients do is lasting.
            return 0.0, 0.0
        return agreement / length, agreement / lasting

    def divide(self, vectors: Tensor, number: int, start: Sequence[int] | None = None) -> list[int]:
        """Grove: at most ``number`` groups, every row nearest to the others of its group.

        ``start`` is what the linkage gives for this number, where that is known.
        """
        if start is None:
            start = self.linkage(vectors, number)
        labels = torch.tensor(start)
        directions = normalize(vectors)
        # All rows move at once, so that some may go back and forth: the steps are limited.
        for _ in range(MOST_STEPS):
            moved = _one_at_a_time(labels, nearest_others(vectors, labels, directions))
            if torch.equal(moved, labels):
                break
            labels = moved
        return renumbered(labels.tolist())


def certainty(first: Tensor, second: Tensor) -> float:
    r"""Grove: by how many standard deviations rows are more like themselves than by chance.

    .. math:: z = \frac{\sum_k g_{kk} - n \bar g}{(\sum_{ij} d_{ij}^2 / (n - 1))^{1/2}}

    with :math:`g_{ij} = a_i \cdot b_j`, and :math:`d` the same less the means of its row and
    column, plus that of all: mean and variance are those over all ways to exchange the rows of
    ``second``, so nothing need be known of the noise. With two groups and nothing else it is at
    most :math:`(n - 1)^{1/2}`: few clients cannot be sure.

    >>> rows = torch.eye(4)
    >>> certainty(rows, rows), certainty(rows, rows.roll(1, 0))
    (3.0, -1.0)
    """
    count = len(first)
    if count < 2:
        return 0.0
    alike = first.double() @ second.double().T
    centred = alike - alike.mean(0) - alike.mean(1, keepdim=True) + alike.mean()
    deviation = float((centred.square().sum() / (count - 1)).sqrt())
    if deviation == 0:
        return 0.0
    return float(alike.diagonal().sum() - count * alike.mean()) / deviation


def _one_at_a_time(labels: Tensor, moved: Tensor) -> Tensor:
    """The next labels; of rows that are alone only the first moves.

    Two that are alone and near each other would change places for ever.

    >>> _one_at_a_time(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 2, 1]))
    tensor([0, 0, 2, 2])
    """
    sizes = torch.bincount(labels)
    alone = (sizes[labels] == 1).nonzero().flatten()
    later = alone[1:]
    moved = moved.clone()
    moved[later] = labels[later]
    return moved


def others_mean(vectors: Tensor, labels: Tensor) -> Tensor:
    """Grove: of each row, the mean of the other rows with its label; zeros where there is no other.

    >>> rows = torch.tensor([[1.0], [3.0], [7.0]])
    >>> others_mean(rows, torch.tensor([0, 0, 1])).flatten()
    tensor([3., 1., 0.])
    """
    means = torch.zeros_like(vectors)
    for label in sorted(set(labels.tolist())):
        members = labels == label
        size = int(members.sum())
        if size == 1:
            continue
        # One sum for all members, instead of one for each that leaves itself out.
        total = vectors[members].sum(0)
        means[members] = (total - vectors[members]) / (size - 1)
    return means


def nearest_others(vectors: Tensor, labels: Tensor, directions: Tensor | None = None) -> Tensor:
    """Grove: the label whose rows, without the row itself, point most in a row's own direction.

    A row that is alone with its label takes another. ``directions`` are the rows at length 1, where
    they are known.

    >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> nearest_others(rows, torch.tensor([0, 0, 0, 1]))
    tensor([0, 0, 1, 0])
    """
    names = torch.tensor(sorted(set(labels.tolist())))
    number = torch.searchsorted(names, labels)
    members = number == torch.arange(len(names)).unsqueeze(1)
    # All labels at once: (labels, rows, numbers). Rows are short, and are compared many times.
    totals = (vectors * members.unsqueeze(2).to(vectors.dtype)).sum(1)
    if directions is None:
        directions = normalize(vectors)
    cosines = (directions * normalize(totals).unsqueeze(1)).sum(2)
    # Without the row itself, or every row would be nearest to the label it has.
    others = totals[number] - vectors
    cosines[number, torch.arange(len(vectors))] = (directions * normalize(others)).sum(1)
    nearest: Tensor = names[cosines.argmax(0)]
    return nearest
