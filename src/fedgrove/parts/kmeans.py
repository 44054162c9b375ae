r"""One-dimensional k-means with a centroid at 0, for many clients at once.

:func:`fedgrove.parts.quantise.cluster` solves one layer on the CPU in numpy, exactly on a histogram
of 1,024 bins. Here the same dynamic programme is written in torch without a branch on data, so that
an engine can run it for all clients of a round on its device (``torch.func.vmap``), each with its
own number of centroids. The histogram has fewer bins, and a few of Lloyd's steps on the values
themselves make up for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BINS = 256
LLOYD_STEPS = 4


class Table(NamedTuple):
    """For j = 1.. intervals about their means: where the last one begins, by where it ends."""

    plain: Tensor
    """Of partitions without the zero interval."""
    longer: Tensor
    """Of partitions that have it, further to the left."""
    closing: Tensor
    """The zero interval's own beginning, where it is the last."""
    closes: Tensor
    """Where the zero interval is better as the last than further to the left."""


def cluster(x: Tensor, k: Tensor, k_max: int, bins: int = BINS) -> Tensor:
    r"""Each value's nearest of at most ``k`` centroids, of which one is +0.0.

    The centroids minimise :math:`\sum_i \min_c (x_i - \mu_c)^2` with :math:`\mu_0 = 0` over the
    histogram, and then by Lloyd's steps over the values. ``k`` is a whole number from 2 to
    ``k_max``.

    >>> cluster(torch.tensor([-2.0, -0.1, 0.1, 3.0, 5.0]), torch.tensor(3), k_max=8)
    tensor([-2.,  0.,  0.,  4.,  4.])
    """
    values = x.reshape(-1).double()
    centroids = _best_centroids(_histogram(values, bins), k, k_max)
    for _ in range(LLOYD_STEPS):
        centroids = _lloyd(values, centroids)
    nearest = _nearest(values, centroids)
    # A centroid that rounds to -0.0 would cost a bit in every weight: adding 0 makes it +0.0.
    return (nearest.to(x.dtype) + 0.0).reshape(x.shape)


def operations(size: int, k: int, bins: int = BINS) -> int:
    """About how many multiplications, additions and comparisons :func:`cluster` takes.

    The programme's share does not depend on the number of values:

    >>> operations(0, 32), operations(1_000_000, 32) - operations(0, 32)
    (6406753, 38000000)
    """
    table = (bins + 1) ** 2
    # Each of k - 1 steps adds and takes a minimum three times; before, about four per interval.
    programme = (3 * (k - 1) + 4) * table
    # Each value is searched for among k centroids and added, in each of Lloyd's steps and at last.
    search = math.ceil(math.log2(k)) + 2
    return programme + size * (3 + (LLOYD_STEPS + 1) * search)


def _histogram(x: Tensor, bins: int) -> Tensor:
    """Count, sum and sum of squares of equal bins, cumulative from the left: (3, bins + 1)."""
    low = x.min()
    width = (x.max() - low).clamp(min=1e-300)
    place = ((x - low) / width * bins).long().clamp(0, bins - 1)
    moments = torch.stack([torch.ones_like(x), x, x * x])
    sums = torch.zeros(3, bins, dtype=x.dtype, device=x.device)
    sums = sums.scatter_add(1, place.expand(3, -1), moments)
    return torch.nn.functional.pad(sums.cumsum(1), (1, 0))


def _best_centroids(total: Tensor, k: Tensor, k_max: int) -> Tensor:
    """``k_max`` centroids, the first of them 0; those that are not used repeat it."""
    # Entry [b, a] is over bins a..b-1, as in quantise.cluster; where a > b there is none.
    count, first, second = total[:, :, None] - total[:, None, :]
    exists = torch.ones_like(count).tril(-1) > 0
    about_mean = (second - first**2 / count.clamp(min=1)).clamp(min=0)
    about_mean = torch.where(exists, about_mean, torch.inf)
    # An empty interval costs nothing: this is how fewer than k intervals are allowed.
    empty = torch.eye(count.shape[0], dtype=torch.bool, device=count.device)
    about_mean = torch.where(empty, 0.0, about_mean)
    about_zero = torch.where(exists | empty, second, torch.inf)
    table = _fill(about_mean, about_zero, k_max - 1)
    return _walk_back(table, total, k)


def _fill(about_mean: Tensor, about_zero: Tensor, steps: int) -> Table:
    """The dynamic programme of quantise.cluster, one more interval in every step."""
    ends = torch.arange(about_mean.shape[0], device=about_mean.device)
    plain = torch.where(ends == 0, 0.0, torch.inf).to(about_mean.dtype)
    with_zero = about_zero[:, 0]
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        longer, after_zero = (with_zero + about_mean).min(1)
        plain, after_plain = (plain + about_mean).min(1)
        closing, zero_after = (plain + about_zero).min(1)
        rows.append((after_plain, after_zero, zero_after, closing <= longer))
        with_zero = torch.minimum(longer, closing)
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return Table(*columns)


def _walk_back(table: Table, total: Tensor, k: Tensor) -> Tensor:
    """The means of the best partition into ``k - 1`` intervals and the zero one, from the right."""
    steps = table.plain.shape[0]
    end = torch.full((), total.shape[1] - 1, dtype=torch.long, device=total.device)
    zero_ahead = torch.ones((), dtype=torch.bool, device=total.device)
    centroids = [torch.zeros((), dtype=total.dtype, device=total.device)]
    for j in range(steps - 1, -1, -1):
        # With k centroids one is 0: k - 1 steps are walked, the others are passed over.
        in_use = j < k - 1
        closes = in_use & zero_ahead & _at(table.closes[j], end)
        end = torch.where(closes, _at(table.closing[j], end), end)
        zero_ahead = zero_ahead & ~closes
        begin = torch.where(zero_ahead, _at(table.longer[j], end), _at(table.plain[j], end))
        begin = torch.where(in_use, begin, end)
        count = _at(total[0], end) - _at(total[0], begin)
        mean = (_at(total[1], end) - _at(total[1], begin)) / count.clamp(min=1)
        # An empty interval is one that was not needed: it repeats 0.
        centroids.append(torch.where(count > 0, mean, 0.0))
        end = begin
    return torch.stack(centroids)


def _at(row: Tensor, place: Tensor) -> Tensor:
    """``row[place]`` for a place that is itself a tensor, under vmap too."""
    return row.gather(0, place.reshape(1))[0]


def _nearest_place(x: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The centroids in rising order, and the number of each value's nearest one."""
    ordered = centroids.sort().values
    # The nearest of sorted centroids changes half way between neighbours.
    midpoints = (ordered[1:] + ordered[:-1]) / 2
    return ordered, torch.searchsorted(midpoints, x)


def _nearest(x: Tensor, centroids: Tensor) -> Tensor:
    ordered, place = _nearest_place(x, centroids)
    return ordered.gather(0, place)


def _lloyd(x: Tensor, centroids: Tensor) -> Tensor:
    """Every centroid but 0 moves to the mean of the values that are nearest to it."""
    ordered, place = _nearest_place(x, centroids)
    count = torch.zeros_like(ordered).scatter_add(0, place, torch.ones_like(x))
    sums = torch.zeros_like(ordered).scatter_add(0, place, x)
    moved = torch.where(count > 0, sums / count.clamp(min=1), ordered)
    return torch.where(ordered == 0, 0.0, moved)
