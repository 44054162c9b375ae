r"""One-dimensional k-means with a centroid at 0, for many clients at once.

A dynamic programme over a histogram, written in torch without a branch on data, so that an engine
can run it for all clients of a round on its device (``torch.func.vmap``), each with its own number
of centroids. The histogram is coarse, and a few of Lloyd's steps on the values themselves make up
for it. ``fedgrove_lab.bench.kmeans`` has the exact solution, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BINS = 256
LLOYD_STEPS = 4


class Table(NamedTuple):
    """For j = 1.. intervals about their means: where the last one begins, by where it ends.

    All (layers, j, ends).
    """

    plain: Tensor
    """Of partitions without the zero interval."""
    longer: Tensor
    """Of partitions that have it, further to the left."""
    closing: Tensor
    """The zero interval's own beginning, where it is the last."""
    closes: Tensor
    """Where the zero interval is better as the last than further to the left."""


class Line(NamedTuple):
    """A layer's values in order.

    Those near a centroid lie side by side, and their sum is a difference of two cumulative ones: a
    step of Lloyd's looks at the centroids only.
    """

    values: Tensor
    sums: Tensor
    """Of the values before each place, and of all."""


class Solved(NamedTuple):
    """The programme of some layers, for any number of centroids up to one."""

    total: Tensor
    """(layers, 3, bins + 1): the histograms, cumulative from the left."""
    table: Table
    lines: list[Line]


def cluster(x: Tensor, k: Tensor, k_max: int, bins: int = BINS) -> Tensor:
    r"""AdFedWCP: k-means of a layer: each value becomes one of ``k`` centroids, one of them +0.0.

    The centroids minimise :math:`\sum_i \min_c (x_i - \mu_c)^2` with :math:`\mu_0 = 0` over the
    histogram, and then by Lloyd's steps over the values. ``k`` is a whole number from 2 to
    ``k_max``.

    >>> cluster(torch.tensor([-2.0, -0.1, 0.1, 3.0, 5.0]), torch.tensor(3), k_max=8)
    tensor([-2.,  0.,  0.,  4.,  4.])
    """
    return cluster_layers([x], k.reshape(1), k_max, bins)[0]


def cluster_layers(
    layers: Sequence[Tensor], k: Tensor, k_max: int, bins: int = BINS
) -> list[Tensor]:
    """AdFedWCP: k-means of several layers, layer i with ``k[i]`` centroids."""
    return with_centroids(layers, solve(layers, k_max, bins), k)


def solve(layers: Sequence[Tensor], k_max: int, bins: int = BINS) -> Solved:
    """AdFedWCP: solve the k-means of several layers at once, for up to ``k_max`` centroids.

    Their histograms are of one size, so the layers stack.
    """
    histograms = []
    lines = []
    for x in layers:
        # In double precision: costs are differences of large sums of squares.
        values = x.reshape(-1).double()
        histograms.append(_histogram(values, bins))
        lines.append(_in_order(values))
    total = torch.stack(histograms)
    # One centroid is always 0: k_max - 1 are free.
    return Solved(total, _fill(total, k_max - 1), lines)


def with_centroids(layers: Sequence[Tensor], solved: Solved, k: Tensor) -> list[Tensor]:
    """AdFedWCP: the layers that :func:`solve` was given, with ``k[i]`` centroids in layer i."""
    centroids = _lloyd(solved.lines, _walk_back(solved, k)).sort().values
    clustered = []
    for x, own, between in zip(layers, centroids, _midpoints(centroids), strict=True):
        nearest = own.gather(0, torch.searchsorted(between.clone(), x.reshape(-1).double()))
        # A centroid that rounds to -0.0 would cost a bit in every weight: adding 0 makes it +0.0.
        clustered.append((nearest.to(x.dtype) + 0.0).reshape(x.shape))
    return clustered


def operations(size: int, k: int, bins: int = BINS) -> int:
    """AdFedWCP: about how many multiplications, additions and comparisons :func:`cluster` takes.

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
    # Where all values are equal the range is 0; they are then all in the first bin.
    width = (x.max() - low).clamp(min=1e-300)
    place = ((x - low) / width * bins).long().clamp(0, bins - 1)
    moments = torch.stack([torch.ones_like(x), x, x * x])
    sums = torch.zeros(3, bins, dtype=x.dtype, device=x.device)
    sums = sums.scatter_add(1, place.expand(3, -1), moments)
    return torch.nn.functional.pad(sums.cumsum(1), (1, 0))


def _fill(total: Tensor, steps: int) -> Table:
    """The dynamic programme, one more interval in every step."""
    # Entry [b, a] of a layer is over bins a..b-1; where a > b there is none.
    count, first, second = (total[..., :, None] - total[..., None, :]).unbind(1)
    exists = torch.ones_like(count).tril(-1) > 0
    about_mean = (second - first**2 / count.clamp(min=1)).clamp(min=0)
    about_mean = torch.where(exists, about_mean, torch.inf)
    # An empty interval costs nothing: this is how fewer than k intervals are allowed.
    empty = torch.eye(count.shape[-1], dtype=torch.bool, device=count.device)
    about_mean = torch.where(empty, 0.0, about_mean)
    about_zero = torch.where(exists | empty, second, torch.inf)

    ends = torch.arange(count.shape[-1], device=count.device)
    plain = torch.where(ends == 0, 0.0, torch.inf).to(total.dtype).expand_as(second[..., 0])
    with_zero = about_zero[..., 0]
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        # Few and large operations: on a device their number is what takes the time.
        longer, after_zero = (with_zero[..., None, :] + about_mean).min(-1)
        plain, after_plain = (plain[..., None, :] + about_mean).min(-1)
        closing, zero_after = (plain[..., None, :] + about_zero).min(-1)
        rows.append((after_plain, after_zero, zero_after, closing, longer))
        with_zero = torch.minimum(longer, closing)
    columns = [torch.stack(column, 1) for column in zip(*rows, strict=True)]
    after_plain, after_zero, zero_after, closing, longer = columns
    return Table(after_plain, after_zero, zero_after, closing <= longer)


def _walk_back(solved: Solved, k: Tensor) -> Tensor:
    """The means of the best partitions into ``k - 1`` intervals and the zero one: (layers, k_max).

    The first centroid is 0; those that are not used repeat it. What each step would do from any
    place is looked up for all steps at once, and only the way itself is walked one by one.
    """
    total, table = solved.total, solved.table
    steps, ends = table.plain.shape[1:]
    # A place is an end, or `ends` more while the zero interval is yet to come, further to the left.
    end = torch.arange(ends, device=total.device).expand_as(table.plain)
    closed_end = torch.where(table.closes, table.closing, end)
    after_closing = table.plain.gather(2, table.closing)
    after_zero = torch.where(table.closes, after_closing, table.longer + ends)
    next_place = torch.cat([table.plain, after_zero], 2)
    interval_end = torch.cat([end, closed_end], 2)
    # With k centroids one is 0: k - 1 steps are walked, the others stay where they are.
    number = torch.arange(steps, device=total.device)
    in_use = (number < k[:, None] - 1)[..., None]
    same_place = torch.arange(2 * ends, device=total.device)
    next_place = torch.where(in_use, next_place, same_place)
    interval_end = torch.where(in_use, interval_end, same_place % ends)

    place = torch.full_like(next_place[:, 0, :1], 2 * ends - 1)
    way = [place]
    for j in range(steps - 1, -1, -1):
        place = next_place[:, j].gather(1, place)
        way.append(place)
    walked = torch.cat(way, 1)
    begin = walked[:, 1:] % ends
    stop = interval_end.flip(1).gather(2, walked[:, :-1, None])[..., 0]

    def within(sums: Tensor) -> Tensor:
        return sums.gather(1, stop) - sums.gather(1, begin)

    count = within(total[:, 0])
    mean = within(total[:, 1]) / count.clamp(min=1)
    # An empty interval is one that was not needed: it repeats 0.
    means = torch.where(count > 0, mean, 0.0)
    return torch.cat([torch.zeros_like(means[:, :1]), means], 1)


def _in_order(x: Tensor) -> Line:
    """AdFedWCP: sort the weights to cluster, with their cumulative sums."""
    values = x.sort().values
    return Line(values, torch.nn.functional.pad(values.cumsum(0), (1, 0)))


def _midpoints(ordered: Tensor) -> Tensor:
    """The nearest of sorted centroids changes half way between neighbours."""
    return (ordered[:, 1:] + ordered[:, :-1]) / 2


def _lloyd(lines: Sequence[Line], centroids: Tensor) -> Tensor:
    """Every centroid but 0 moves to the mean of the values that are nearest to it; some times.

    Layers differ in size and are looked up one by one; all else is done for all of them at once.
    """
    first = torch.zeros(len(lines), 1, dtype=torch.long, device=centroids.device)
    last = torch.stack([one + len(line.values) for one, line in zip(first, lines, strict=True)])
    for _ in range(LLOYD_STEPS):
        ordered = centroids.sort().values
        places = []
        for line, between in zip(lines, _midpoints(ordered), strict=True):
            # A copy: under vmap a row is spread in memory, which a search warns of.
            places.append(torch.searchsorted(line.values, between.clone(), right=True))
        bounds = torch.cat([first, torch.stack(places), last], 1)
        sums = []
        for line, own in zip(lines, bounds, strict=True):
            sums.append(line.sums.gather(0, own))
        count = bounds.diff()
        mean = torch.stack(sums).diff() / count.clamp(min=1)
        # A centroid that is nearest to no value stays where it is.
        moved = torch.where(count > 0, mean, ordered)
        centroids = torch.where(ordered == 0, 0.0, moved)
    return centroids
