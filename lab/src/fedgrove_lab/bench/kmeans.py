"""Exact one-dimensional k-means: the reference for AdFedWCP's own, and centroids for the wire.

:mod:`fedgrove.methods.adfedwcp.kmeans` solves the same programme on fewer bins for many clients at
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedgrove.errors import InputError, check
from fedgrove.parts.quantise import map_scope
from fedgrove.trees import Tree

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Centroids:
    """Each layer's values replaced by the nearest of at most ``k`` centroids: see :func:`cluster`.

    With ``zero`` one of them is 0.
    """

    k: int = 16
    zero: bool = True

    def __post_init__(self) -> None:
        check(2 <= self.k <= 256, "k", self.k, "in 2..256")

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree of centroids."""
        return map_scope(tree, "layer", lambda x: cluster(x, self.k, self.zero).values)


@dataclass(frozen=True)
class Clustering:
    """Centroids, and the number of each value's nearest one.

    A zero centroid is number 0, and what it takes is pruned.
    """

    centroids: Tensor
    index: Tensor

    @property
    def values(self) -> Tensor:
        """Each value's centroid."""
        return self.centroids[self.index]


def cluster(x: Tensor, k: int, zero: bool = True, bins: int = 1024) -> Clustering:
    r"""At most ``k`` centroids that minimise :math:`\sum_i \min_c (x_i - \mu_c)^2`.

    With ``zero``, :math:`\mu_0 = 0`. Exact dynamic programming over a histogram of ``bins`` equal
    bins, each with its count, sum and sum of squares; over the values themselves when at most
    ``bins`` are distinct. Fewer than ``k`` centroids come back when fewer are of use. Nothing is
    random: the same values always give the same centroids.

    >>> clustering = cluster(torch.tensor([-2.0, -0.1, 0.1, 3.0, 5.0]), k=3)
    >>> clustering.centroids, clustering.index
    (tensor([ 0., -2.,  4.]), tensor([1, 0, 0, 2, 2]))
    """
    check(k >= 1 + zero, "k", k, "at least 2 with a zero centroid, at least 1 without")
    if not x.numel():
        return Clustering(torch.zeros(1, dtype=x.dtype), torch.zeros(x.shape, dtype=torch.int64))
    if not bool(torch.isfinite(x).all()):
        raise InputError(
            "values to cluster contain NaN or infinity; drop the update that has them."
        )
    values = x.detach().double().cpu()
    free = _free_centroids(_histogram(values.reshape(-1).numpy(), bins), k, zero)
    # A set, after rounding to the dtype of x: centroids that have become equal are one. Adding 0
    # makes 0.0 of a -0.0, which would otherwise stand for both in the set.
    distinct = set((torch.tensor(free).to(x.dtype) + 0.0).tolist())
    if zero:
        distinct.add(0.0)
    centroids = torch.tensor(sorted(distinct), dtype=x.dtype)
    # The nearest of sorted centroids changes half way between neighbours. In double precision, or
    # the midpoint of two close centroids would be rounded onto one of them.
    midpoints = (centroids[1:].double() + centroids[:-1].double()) / 2
    index = torch.bucketize(values, midpoints)
    if not zero:
        return Clustering(centroids, index)
    # The zero centroid becomes number 0; the others follow in rising order.
    zero_at = int(torch.nonzero(centroids == 0)[0, 0])
    order = list(range(len(centroids)))
    order.remove(zero_at)
    order.insert(0, zero_at)
    old_of_new = torch.tensor(order)
    # The inverse of a permutation is the order that would sort it.
    new_of_old = torch.argsort(old_of_new)
    return Clustering(centroids[old_of_new], new_of_old[index])


def _histogram(x: Floats, bins: int) -> Floats:
    """Count, sum and sum of squares of each bin that holds something, in rising order.

    The shape is (3, bins that hold something).
    """
    # Looking for distinct values sorts them, which many values are not worth.
    distinct = np.unique(x) if len(x) <= 1 << 14 else np.empty(0)
    if 0 < len(distinct) <= bins:
        place: Places = np.searchsorted(distinct, x)
    else:
        low = float(x.min())
        high = float(x.max())
        scaled = np.zeros_like(x)
        if high > low:
            scaled = (x - low) / (high - low) * bins
        # The largest value lies on the upper edge of the last bin, and belongs to it.
        place = np.minimum(scaled, bins - 1).astype(np.int64)
    count = np.bincount(place).astype(np.float64)
    sums = np.stack([count, np.bincount(place, x), np.bincount(place, x * x)])
    return sums[:, count > 0]


@dataclass(frozen=True)
class _Step:
    """One more interval in the dynamic programme: for each end b, where the last interval begins.

    Three partitions are followed: ``plain`` has no zero interval; ``longer`` has one already, and a
    new interval about its mean after it; ``closing`` has the zero interval as its last. Where
    ``closes``, the last of these is the better one of the two with a zero interval.
    """

    plain: Places
    longer: Places
    closing: Places
    closes: npt.NDArray[np.bool_]


def _free_centroids(sums: Floats, k: int, zero: bool) -> list[float]:
    """The centroids other than 0 of the best partition of the bins into at most ``k`` intervals.

    With ``zero`` one of the intervals has its centroid at 0, the others at their means.
    """
    total = np.concatenate([np.zeros((3, 1)), sums.cumsum(axis=1)], axis=1)
    # Entry [b, a] is over bins a..b-1: the difference of two cumulative sums. Where a > b there is
    # no such interval; its count is negative and it costs infinity.
    count, first, second = (t[:, None] - t[None, :] for t in total)
    # The cost of an interval about its mean: sum x^2 - (sum x)^2 / n, which rounding may leave
    # below 0. The inner where only avoids a division by 0.
    about_mean = np.where(
        count > 0, np.maximum(second - first**2 / np.where(count > 0, count, 1), 0), np.inf
    )
    # About 0 it is sum x^2.
    about_zero = np.where(count >= 0, second, np.inf)
    # An empty interval costs nothing: this is how fewer than k intervals are allowed.
    np.fill_diagonal(about_mean, 0.0)
    # After j steps plain[b] is the least cost of bins 0..b-1 in j intervals about their means, and
    # with_zero[b] of those and one interval more, about 0. Before the first step no interval is
    # there, which covers no bin; the zero interval alone may cover any number.
    plain = np.where(np.arange(total.shape[1]) == 0, 0.0, np.inf)
    with_zero = about_zero[:, 0]
    steps: list[_Step] = []
    for _ in range(k - zero):
        longer, after_zero = _extended(with_zero, about_mean)
        plain, after_plain = _extended(plain, about_mean)
        # From the plain partitions as they are now: the zero interval comes on top of j intervals.
        closing, zero_after = _extended(plain, about_zero)
        steps.append(_Step(after_plain, after_zero, zero_after, closing <= longer))
        with_zero = np.minimum(longer, closing)
    return _means(steps, total, zero)


def _extended(cost: Floats, interval: Floats) -> tuple[Floats, Places]:
    """For each end b the least of cost[a] + interval[b, a] over all beginnings a, and that a."""
    sums = cost[None, :] + interval
    where = sums.argmin(axis=1)
    return sums[np.arange(len(cost)), where], where


def _means(steps: list[_Step], total: Floats, zero: bool) -> list[float]:
    """The means of the intervals of the best partition, walked from the last to the first."""
    means: list[float] = []
    end = total.shape[1] - 1
    # Whether the zero interval is still to come, further to the left.
    zero_ahead = zero
    for step in reversed(steps):
        if zero_ahead and step.closes[end]:
            # The zero interval ends here. It has no mean to report; what lies before it is plain.
            end = int(step.closing[end])
            zero_ahead = False
        begins = step.longer if zero_ahead else step.plain
        begin = int(begins[end])
        # An empty interval is one that was not needed.
        if begin < end:
            count = total[0, end] - total[0, begin]
            means.append(float((total[1, end] - total[1, begin]) / count))
        end = begin
    return means
