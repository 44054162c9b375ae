"""Quantisers: what a method decides to lose before it sends.

Codecs lose nothing, so all that is lossy is here, inside the method. A quantiser takes a tree and gives one with fewer
distinct values or more zeros; the codec finds those and writes few bytes. Only floating-point leaves change.
:func:`feedback` keeps what was left out, for the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InputError, check, unknown
from ..trees import Tree

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
WIDTHS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Quantiser(Protocol):
    """A lossy decision on a tree; ``draw`` is where its randomness comes from, if it has any."""

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree that will be sent."""
        ...


def feedback(
    quantiser: Quantiser,
    tree: Mapping[str, Tensor],
    left: Mapping[str, Tensor] | None,
    draw: torch.Generator | None = None,
) -> tuple[Tree, Tree]:
    r"""Quantise with error feedback: what is sent, and what is left out and must come back as ``left`` next time.

    :math:`q_t = Q(x_t + e_t),\; e_{t+1} = x_t + e_t - q_t` (Seide et al. 2014; Karimireddy et al. 2019, Alg. 2), so
    that :math:`\sum_t q_t + e_T = \sum_t x_t`. x -> ``tree``, e -> ``left`` (None: nothing yet).

    >>> sent, left = feedback(TopK(0.5), {"w": torch.tensor([3.0, 1.0])}, None)
    >>> sent["w"], left["w"]
    (tensor([3., 0.]), tensor([0., 1.]))
    """
    whole = {k: v + left[k] if left is not None and k in left else v for k, v in tree.items()}
    sent = quantiser(whole, draw)
    rest = {k: v - sent[k].to(v.dtype) for k, v in whole.items() if v.is_floating_point()}
    return sent, rest


@dataclass(frozen=True)
class Half:
    """Sixteen-bit floats, rounded to nearest; the leaves change their dtype.

    Relative error at most 2^-11 (float16, in its normal range) or 2^-8 (bfloat16).
    """

    kind: str = "float16"

    def __post_init__(self) -> None:
        if self.kind not in WIDTHS:
            raise unknown("sixteen-bit float", self.kind, WIDTHS)

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree in sixteen bits."""
        return _floats(tree, lambda x: x.to(WIDTHS[self.kind]))


@dataclass(frozen=True)
class Uniform:
    r"""A symmetric grid of :math:`2^b - 1` levels per layer, 0 among them.

    :math:`q = s \lfloor x / s + u \rfloor,\; s = \max|x| / (2^{b-1} - 1)`, with u uniform in [0, 1) (stochastic
    rounding: unbiased, error under s; Alistarh et al. 2017) or u = 1/2 (nearest: error at most s/2).

    >>> Uniform(bits=2, stochastic=False)({"w": torch.tensor([1.0, 0.4, -0.6])})["w"]
    tensor([ 1.,  0., -1.])
    """

    bits: int = 8
    stochastic: bool = True

    def __post_init__(self) -> None:
        check(2 <= self.bits <= 16, "bits", self.bits, "in 2..16")

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree on its grids."""
        return _floats(tree, lambda x: self._layer(x, draw))

    def _layer(self, x: Tensor, draw: torch.Generator | None) -> Tensor:
        levels = (1 << (self.bits - 1)) - 1
        step = x.abs().max().double() / levels
        if step == 0:
            return torch.zeros_like(x)
        u = _uniform(x, draw) if self.stochastic else 0.5
        # In double precision: a rounding of x / s above its exact value would leave the grid's end or bias the draw.
        return (torch.floor(x.double() / step + u).clamp(-levels, levels) * step).to(x.dtype)


@dataclass(frozen=True)
class TopK:
    """The share ``density`` of each layer with the largest magnitudes, at least one; the rest is 0.

    Ties go to the first. Among all trees of that density this is the nearest: ||q - x||^2 <= (1 - density) ||x||^2.
    """

    density: float = 0.1

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree with the small values set to 0."""
        return _floats(
            tree, lambda x: torch.where(largest(x, max(1, round(self.density * x.numel()))), x, 0.0)
        )


@dataclass(frozen=True)
class Sign:
    r"""The sign of each value times the layer's mean magnitude: :math:`q = \frac{\|x\|_1}{d}\,\mathrm{sign}(x)`.

    EF-signSGD (Karimireddy et al. 2019); biased, so use it with :func:`feedback`. The sign of 0 is 0.
    """

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree of signs."""
        return _floats(tree, lambda x: x.sign() * x.double().abs().mean().to(x.dtype))


@dataclass(frozen=True)
class Ternary:
    r"""Each value becomes -m, 0 or m, unbiased: :math:`q = m\,\mathrm{sign}(x)\,b,\; P(b=1) = |x|/m,\; m = \max|x|`.

    TernGrad (Wen et al. 2017), without its clipping.
    """

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree of three values per layer."""
        return _floats(tree, lambda x: self._layer(x, draw))

    def _layer(self, x: Tensor, draw: torch.Generator | None) -> Tensor:
        most = x.abs().max()
        return torch.where(
            _uniform(x, draw) * most.double() < x.abs().double(), x.sign() * most, 0.0
        )


@dataclass(frozen=True)
class Centroids:
    """Each layer's values replaced by the nearest of at most ``k`` centroids, 0 one of them: see :func:`cluster`."""

    k: int = 16
    zero: bool = True

    def __post_init__(self) -> None:
        check(2 <= self.k <= 256, "k", self.k, "in 2..256")

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree of centroids."""
        return _floats(tree, lambda x: cluster(x, self.k, self.zero).values)


# --- one-dimensional k-means ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clustering:
    """Centroids and each value's nearest one; with a zero centroid that is number 0, and what it takes is pruned."""

    centroids: Tensor
    index: Tensor

    @property
    def values(self) -> Tensor:
        """Each value's centroid."""
        return self.centroids[self.index]


def cluster(x: Tensor, k: int, zero: bool = True, bins: int = 1024) -> Clustering:
    r"""At most ``k`` centroids that minimise :math:`\sum_i \min_c (x_i - \mu_c)^2`; with ``zero``, :math:`\mu_0 = 0`.

    Exact dynamic programming over a histogram of ``bins`` equal bins, each with its count, sum and sum of squares;
    over the values themselves when at most ``bins`` are distinct. Fewer than ``k`` centroids come back when fewer
    are of use. Nothing is random: the same values always give the same centroids.

    >>> found = cluster(torch.tensor([-2.0, -0.1, 0.1, 3.0, 5.0]), k=3)
    >>> found.centroids, found.index
    (tensor([ 0., -2.,  4.]), tensor([1, 0, 0, 2, 2]))
    """
    check(k >= 1 + zero, "k", k, "at least 2 with a zero centroid, at least 1 without")
    if not x.numel():
        return Clustering(torch.zeros(1, dtype=x.dtype), torch.zeros(x.shape, dtype=torch.int64))
    if not bool(torch.isfinite(x).all()):
        raise InputError("values to cluster hold NaN or infinity; drop the update that has them.")
    free = _centroids(_histogram(x.detach().double().cpu().reshape(-1).numpy(), bins), k, zero)
    order = torch.tensor(
        sorted({*torch.tensor(free).to(x.dtype).tolist(), *([0.0] if zero else [])}), dtype=x.dtype
    )
    edges = (order[1:].double() + order[:-1].double()) / 2
    index = torch.bucketize(x.detach().double().cpu(), edges)
    return _zero_first(order, index) if zero else Clustering(order, index)


def _zero_first(order: Tensor, index: Tensor) -> Clustering:
    """Make the zero centroid number 0; the others follow in rising order."""
    at = int(torch.nonzero(order == 0)[0, 0])
    places = torch.tensor([at, *(i for i in range(len(order)) if i != at)])
    return Clustering(order[places], torch.argsort(places)[index])


def _histogram(x: Floats, bins: int) -> Floats:
    """Count, sum and sum of squares of each bin that holds something, in rising order: shape (3, bins)."""
    distinct = np.unique(x) if len(x) <= 1 << 14 else np.empty(0)
    if 0 < len(distinct) <= bins:
        place: Places = np.searchsorted(distinct, x)
    else:
        low, high = float(x.min()), float(x.max())
        scaled = (x - low) / (high - low) * bins if high > low else np.zeros_like(x)
        place = np.minimum(scaled, bins - 1).astype(np.int64)
    sums = np.stack(
        [np.bincount(place).astype(np.float64), np.bincount(place, x), np.bincount(place, x * x)]
    )
    return sums[:, sums[0] > 0]


@dataclass(frozen=True)
class _Step:
    """One interval more: where it begins for each end, without the zero interval, with it before, with it after."""

    plain: Places
    longer: Places
    closing: Places
    closes: npt.NDArray[np.bool_]


def _centroids(sums: Floats, k: int, zero: bool) -> list[float]:
    """The free centroids of the best partition of the bins into at most ``k`` intervals, one of them about 0."""
    total = np.concatenate([np.zeros((3, 1)), sums.cumsum(axis=1)], axis=1)
    count, first, second = (t[:, None] - t[None, :] for t in total)  # [b, a]: over bins a..b-1
    about_mean = np.where(
        count > 0, np.maximum(second - first**2 / np.where(count > 0, count, 1), 0), np.inf
    )
    about_zero = np.where(count >= 0, second, np.inf)
    np.fill_diagonal(about_mean, 0.0)  # an empty interval costs nothing
    # plain[b]: bins 0..b-1 in j intervals about their means; with_zero[b]: one interval more, about 0.
    plain = np.where(np.arange(total.shape[1]) == 0, 0.0, np.inf)
    with_zero, steps = about_zero[:, 0], list[_Step]()
    for _ in range(k - zero):
        longer, after_zero = _best(with_zero, about_mean)
        plain, after_plain = _best(plain, about_mean)
        closing, zero_after = _best(plain, about_zero)
        steps.append(_Step(after_plain, after_zero, zero_after, closing <= longer))
        with_zero = np.minimum(longer, closing)
    return _means(steps, total, zero)


def _best(cost: Floats, interval: Floats) -> tuple[Floats, Places]:
    """min over a of cost[a] + interval[b, a], and where."""
    sums = cost[None, :] + interval
    where = sums.argmin(axis=1)
    return sums[np.arange(len(cost)), where], where


def _means(steps: list[_Step], total: Floats, zero: bool) -> list[float]:
    """The means of the intervals of the best partition, walked from the last to the first."""
    end, means, seek = total.shape[1] - 1, list[float](), zero
    for step in reversed(steps):
        if seek and step.closes[end]:
            end, seek = int(step.closing[end]), False
        begin = int((step.longer if seek else step.plain)[end])
        if begin < end:
            means.append(
                float((total[1, end] - total[1, begin]) / (total[0, end] - total[0, begin]))
            )
        end = begin
    return means


# --- shared --------------------------------------------------------------------------------------------------------


def largest(x: Tensor, n: int) -> Tensor:
    """Where the ``n`` largest magnitudes are; of equal ones the first."""
    size = x.detach().abs().reshape(-1)
    least = torch.kthvalue(size, size.numel() - n + 1).values
    above = size > least
    ties = (size == least).nonzero()[: n - int(above.sum()), 0]
    above[ties] = True
    return above.reshape(x.shape)


def _floats(tree: Mapping[str, Tensor], f: Callable[[Tensor], Tensor]) -> Tree:
    return {k: f(v) if v.is_floating_point() and v.numel() else v for k, v in tree.items()}


def _uniform(x: Tensor, draw: torch.Generator | None) -> Tensor:
    if draw is None:
        raise InputError(
            "a random quantiser was given no generator; pass draw=seeds.torch_rng(seed, round, client)."
        )
    return torch.rand(x.shape, generator=draw, dtype=torch.float64)
