r"""Averages that withstand clients who send wrong values, by accident or on purpose.

Each is a rule like :class:`fedgrove.parts.aggregate.WeightedMean` and takes its place in the field
``mean`` of any method. All of them need every report of an exchange at once: until the average is
taken they keep the clients' trees, which takes memory of cohort x model.

With masks, every coordinate is decided by the clients that have it, and keeps its previous value
where no client has it. Lengths and distances are taken over what both sides have, and scaled to the
whole model:

.. math:: d(a, b)^2 = \frac{D}{|C|} \sum_{j \in C} (a_j - b_j)^2

with D the coordinates of the model and C those that both have. A client with few channels is then
neither near to everybody nor short.

Only floating-point parameters make a distance. A BatchNorm's running statistics and whole numbers
are on other scales and would drown them; but if they were only carried along, a liar could send
honest weights with a variance of 1e30. They are combined by the coordinate-wise median in all
these rules.

Values must be finite, which :class:`fedgrove.runs.gate.Gate` sees to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import trees
from ..errors import check
from ..renamed import find_old_names
from ..trees import Tree
from .aggregate import Average, WeightedMean, known, previous_of

STATISTICS = ("running_mean", "running_var")
"""What torch calls the buffers of norm layers that move in training."""
ROUNDING = 1e-9
"""0.29 * 100 is 28.999999999999996, and still 29 clients."""


class Sent(NamedTuple):
    """One client's tree, its weight, and which coordinates it has (None: all)."""

    tree: Mapping[str, Tensor]
    weight: float
    mask: Mapping[str, Tensor] | None


Combine = Callable[[Mapping[str, Tensor], Sequence[Sent]], Tree]
"""The previous tree and at least one client's -> the next tree."""


class CollectedTrees:
    """The trees of an exchange, kept until the average is taken."""

    def __init__(self, previous: Mapping[str, Tensor] | None, combine: Combine) -> None:
        self._previous = previous
        self._combine = combine
        self._sent: list[Sent] = []

    def add(
        self, tree: Mapping[str, Tensor], weight: float, mask: Mapping[str, Tensor] | None = None
    ) -> None:
        """Keep one client's tree for a robust average."""
        self._previous = previous_of(self._previous, tree, weight)
        if weight:
            self._sent.append(Sent(tree, weight, mask))

    def value(self) -> Tree:
        """Return the robust average of the trees that were added."""
        previous = known(self._previous)
        if not self._sent:
            return dict(previous)
        return self._combine(previous, self._sent)


# ---- the rules -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Median:
    r"""The coordinate-wise median :math:`w_j = \mathrm{med}_k\, w_{kj}` (Yin et al. 2018, Alg. 1).

    Of an even number of clients, the mean of the two in the middle. Clients have equal weight,
    whatever their weight. As long as fewer than half of the clients that have a coordinate lie, it
    stays between the honest values.

    >>> average = Median().start()
    >>> for w in (1.0, 2.0, 1e30):
    ...     average.add({"w": torch.tensor([w])}, weight=1)
    >>> average.value()["w"]
    tensor([2.])
    """

    def start(self, previous: Mapping[str, Tensor] | None = None) -> Average:
        """A median before any client is added."""
        return CollectedTrees(previous, medians)


@dataclass(frozen=True)
class TrimmedMean:
    r"""The coordinate-wise mean without the largest and the smallest (Yin et al. 2018, Alg. 1).

    Of c clients that have a coordinate, :math:`\lfloor \beta c \rfloor` are cut on each side and
    the mean is of the rest: :math:`\beta` -> ``share``, below 1/2, so that somebody is left.
    Clients have equal weight, whatever their weight. If no more lie than are cut on a side, it
    stays between the honest values. Where :math:`c < 1/\beta` no client is cut and one liar is
    enough: use a larger share then, or :class:`Median`.

    >>> average = TrimmedMean(0.25).start()
    >>> for w in (1.0, 2.0, 4.0, 1e30):
    ...     average.add({"w": torch.tensor([w])}, weight=1)
    >>> average.value()["w"]
    tensor([3.])
    """

    share: float = 0.2
    """The share of clients that is cut on each side."""

    def __post_init__(self) -> None:
        check(0 <= self.share < 0.5, "share", self.share, "in [0, 0.5)")

    def start(self, previous: Mapping[str, Tensor] | None = None) -> Average:
        """A trimmed mean before any client is added."""
        return CollectedTrees(previous, self._combine)

    def _combine(self, previous: Mapping[str, Tensor], sent: Sequence[Sent]) -> Tree:
        return leaf_by_leaf(previous, sent, self._trimmed)

    def _trimmed(self, values: Tensor, weights: Tensor) -> Tensor:
        has_it = weights > 0
        # In double: a share of whole numbers would be taken in single precision.
        count = has_it.sum(0).double()
        cut = (self.share * count + ROUNDING).floor()
        # Infinite where somebody has no value: these come last and no rank below `count` is theirs.
        ordered = values.masked_fill(~has_it, torch.inf).sort(0).values
        rank = torch.arange(len(values), device=values.device)
        rank = rank.view(-1, *[1] * (values.dim() - 1))
        stays = (rank >= cut) & (rank < count - cut)
        # Where no client has the coordinate, 0/1: the previous value takes its place.
        return ordered.masked_fill(~stays, 0.0).sum(0) / (count - 2 * cut).clamp_min(1)


@dataclass(frozen=True)
class ClippedMean:
    r"""The weighted mean of updates whose length is clipped (Sun et al. 2019, Section 4).

    :math:`w = p + \sum_k n_k \min(1, B/|w_k - p|)(w_k - p) \big/ \sum_k n_k`: p -> ``previous``,
    B -> ``bound``, by default the median of the clients' lengths. Updates that are no longer than B
    count as in the weighted mean; if all are so, this is the weighted mean to the bit. Where all
    clients have all parameters, no step is longer than B, however many lie; and as long as fewer
    than half of them lie, the default B is no longer than the longest honest update. It bounds how
    far a liar pulls and does not silence him: a small pull in every round remains.

    >>> average = ClippedMean(bound=1.0).start({"w": torch.tensor([0.0])})
    >>> for w in (0.5, 1e30):
    ...     average.add({"w": torch.tensor([w])}, weight=1)
    >>> average.value()["w"]
    tensor([0.7500])
    """

    bound: float | None = None
    """The longest update, scaled to the whole model; None: the median of the clients'."""

    def __post_init__(self) -> None:
        check(self.bound is None or self.bound > 0, "bound", self.bound, "above 0, or none")

    def start(self, previous: Mapping[str, Tensor] | None = None) -> Average:
        """A clipped mean before any client is added."""
        return CollectedTrees(previous, self._combine)

    def _combine(self, previous: Mapping[str, Tensor], sent: Sequence[Sent]) -> Tree:
        lengths = distances_to(previous, sent)
        bound = self.bound
        if bound is None:
            bound = float(median(lengths, torch.ones_like(lengths)))
        mean = WeightedMean().start(parameters(previous))
        for client, length in zip(sent, lengths.tolist(), strict=True):
            tree = parameters(client.tree)
            if length > bound:
                tree = shortened(tree, previous, bound / length)
            mean.add(tree, client.weight, client.mask)
        return in_order(previous, mean.value(), medians(statistics(previous), sent))


@dataclass(frozen=True)
class MultiKrum:
    r"""The mean of the clients that are nearest to others (Blanchard et al. 2017, Section 4).

    Of n clients, :math:`f = \lfloor` ``liars`` :math:`n \rfloor` are taken to lie. A client's score
    is the sum of its squared distances to the nearest :math:`n - f - 2` others; the ``keep``
    clients of lowest score are averaged, and all that score as low as the last of them. Clients
    have equal weight, whatever their weight. If no more than f lie, whoever is kept is near to an
    honest client, at most :math:`\sqrt{n - f}` times as far as honest clients are from each other.

    Differs from the paper: that requires :math:`n \ge 2f + 3`. In smaller groups the nearest f
    others are counted, so that f liars side by side are still far from an honest client. Where
    :math:`n <` 1 / ``liars``, f is 0. Clients that have no parameter in common are infinitely far
    apart. A parameter that only clients have who were not kept stays at its previous value.

    >>> average = MultiKrum(liars=0.25).start()
    >>> for w in (1.0, 2.0, 3.0, 1e30):
    ...     average.add({"w": torch.tensor([w])}, weight=1)
    >>> average.value()["w"]
    tensor([2.])
    """

    liars: float = 0.2
    """The share of clients that may lie."""
    keep: int | None = None
    """How many clients are averaged, at most n - f; None: n - f; 1: Krum."""

    def __post_init__(self) -> None:
        check(0 <= self.liars < 0.5, "liars", self.liars, "a share in [0, 0.5)")
        check(self.keep is None or self.keep >= 1, "keep", self.keep, "1 or more, or none")

    def start(self, previous: Mapping[str, Tensor] | None = None) -> Average:
        """A mean before any client is added."""
        return CollectedTrees(previous, self._combine)

    def _combine(self, previous: Mapping[str, Tensor], sent: Sequence[Sent]) -> Tree:
        mean = WeightedMean().start(parameters(previous))
        for i in self._chosen(squared_distances(previous, sent)):
            mean.add(parameters(sent[i].tree), 1, sent[i].mask)
        return in_order(previous, mean.value(), medians(statistics(previous), sent))

    def _chosen(self, distances: Tensor) -> list[int]:
        """The clients that are kept; ``distances`` are squared, infinite to oneself."""
        n = len(distances)
        f = math.floor(self.liars * n + ROUNDING)
        # The paper's number, or f in a group that is too small for its condition.
        neighbours = max(n - f - 2, f)
        scores = distances.sort(1).values[:, :neighbours].sum(1)
        keep = n - f
        if self.keep is not None:
            keep = min(self.keep, keep)
        last = scores.sort().values[keep - 1]
        # Rounding, and so the order of clients, must not decide between equals.
        as_low = scores <= last * (1 + ROUNDING)
        chosen: list[int] = as_low.nonzero().flatten().tolist()
        return chosen


@dataclass(frozen=True)
class GeometricMedian:
    r"""The point of least distance to all clients (RFA: Pillutla, Kakade & Harchaoui 2019, Alg. 1).

    :math:`\min_v \sum_k n_k |v - w_k|` by Weiszfeld's iteration, smoothed:
    :math:`v \leftarrow \sum_k \beta_k w_k / \sum_k \beta_k` with
    :math:`\beta_k = n_k / \max(\nu, |v - w_k|)`; :math:`n_k` -> ``weight``, :math:`\nu` ->
    ``smooth``. As long as liars have less than half of the weight, it stays at a bounded distance
    from the honest clients.

    Differs from the paper: it begins at the coordinate-wise weighted median instead of the mean,
    so that even the first steps are bounded, and :math:`\nu` is a share of the clients' median
    distance, so that the length of a model does not matter. With masks, a client's distance is over
    what it has and counts by the share of the model that this is.

    >>> average = GeometricMedian().start()
    >>> for w in (1.0, 2.0, 1e30):
    ...     average.add({"w": torch.tensor([w])}, weight=1)
    >>> average.value()["w"]
    tensor([2.])
    """

    iterations: int = 100
    """The most steps."""
    tolerance: float = 1e-6
    """Ends once a step is shorter than this share of the clients' median distance."""
    smooth: float = 1e-4
    """Clients nearer than this share of the median distance count as if they were so far."""

    def __post_init__(self) -> None:
        check(self.iterations >= 1, "iterations", self.iterations, "1 or more")
        check(self.tolerance >= 0, "tolerance", self.tolerance, "0 or more")
        check(self.smooth > 0, "smooth", self.smooth, "above 0")

    def start(self, previous: Mapping[str, Tensor] | None = None) -> Average:
        """A geometric median before any client is added."""
        return CollectedTrees(previous, self._combine)

    def _combine(self, previous: Mapping[str, Tensor], sent: Sequence[Sent]) -> Tree:
        begin = medians(previous, sent, weighted=True)
        # In double precision from step to step, and rounded once.
        centre = trees.map(Tensor.double, parameters(begin))
        weights = weights_of(sent)
        for _ in range(self.iterations):
            distances = distances_to(centre, sent)
            typical = float(median(distances, weights))
            if typical == 0:
                # Half of the weight is here, so nothing pulls harder: a step would only round.
                break
            mean = WeightedMean().start(centre)
            for client, far in zip(sent, distances.tolist(), strict=True):
                weight = client.weight / max(self.smooth * typical, far)
                mean.add(parameters(client.tree), weight, client.mask)
            next_centre = mean.value()
            moved = distance(Sent(next_centre, 1, None), centre)
            centre = next_centre
            if moved <= self.tolerance * typical:
                break
        rounded: Tree = {}
        for name, leaf in centre.items():
            rounded[name] = leaf.to(previous[name].dtype)
        return in_order(previous, rounded, statistics(begin))


# ---- coordinate by coordinate --------------------------------------------------------------------


def medians(previous: Mapping[str, Tensor], sent: Sequence[Sent], weighted: bool = False) -> Tree:
    """Robust averages: the median of every coordinate over the clients that have it."""
    return leaf_by_leaf(previous, sent, median, weighted)


def leaf_by_leaf(
    previous: Mapping[str, Tensor],
    sent: Sequence[Sent],
    combine: Callable[[Tensor, Tensor], Tensor],
    weighted: bool = False,
) -> Tree:
    """Robust averages: every leaf from all clients' values and weights (0 if a client has none)."""
    result: Tree = {}
    for name, old in previous.items():
        values, has_it = stacked(sent, name, old)
        weights = has_it.double()
        if weighted:
            by_client = weights_of(sent).to(old.device)
            weights = weights * by_client.view(-1, *[1] * old.dim())
        found = combine(values, weights).to(old.dtype)
        result[name] = torch.where(has_it.any(0), found, old)
    return result


def stacked(sent: Sequence[Sent], name: str, old: Tensor) -> tuple[Tensor, Tensor]:
    """Robust averages: a leaf of all clients in double precision, and which clients have it."""
    values = []
    has_it = []
    for client in sent:
        kept = kept_of(client, name, old)
        leaf = client.tree.get(name, old)
        # What a mask hides need not be 0, nor even finite.
        values.append(leaf.double().masked_fill(~kept, 0.0))
        has_it.append(kept)
    return torch.stack(values), torch.stack(has_it)


def kept_of(client: Sent, name: str, like: Tensor) -> Tensor:
    """Robust averages: which coordinates of a leaf a client has."""
    if name not in client.tree:
        return torch.zeros_like(like, dtype=torch.bool)
    if client.mask is None or name not in client.mask:
        return torch.ones_like(like, dtype=torch.bool)
    return client.mask[name]


def median(values: Tensor, weights: Tensor) -> Tensor:
    """Robust averages: the weighted median along the first dimension.

    If the weights divide exactly in halves, the mean of the two values next to the cut.

    >>> median(torch.tensor([4.0, 1.0, 3.0]), torch.tensor([1.0, 1.0, 2.0]))
    tensor(3.)
    """
    ordered, order = values.sort(0)
    below = weights.gather(0, order).cumsum(0)
    half = below[-1] / 2
    last = len(values) - 1
    lower = (below < half).sum(0, keepdim=True).clamp_max(last)
    upper = (below <= half).sum(0, keepdim=True).clamp_max(last)
    middle = (ordered.gather(0, lower) + ordered.gather(0, upper)) / 2
    return middle.squeeze(0)


# ---- lengths and distances -----------------------------------------------------------------------


def parameters(tree: Mapping[str, Tensor]) -> Tree:
    """Robust averages: the leaves that distances between clients are made of."""
    return {name: leaf for name, leaf in tree.items() if is_parameter(name, leaf)}


def statistics(tree: Mapping[str, Tensor]) -> Tree:
    """Robust averages: all leaves that are not parameters: running statistics, whole numbers."""
    return {name: leaf for name, leaf in tree.items() if not is_parameter(name, leaf)}


def is_parameter(name: str, leaf: Tensor) -> bool:
    """Robust averages: whether a leaf is trained, unlike running statistics and whole numbers."""
    return leaf.is_floating_point() and name.rpartition(".")[2] not in STATISTICS


def distance(client: Sent, centre: Mapping[str, Tensor]) -> float:
    """Robust averages: how far a client is from a point, scaled to the whole model."""
    squares = 0.0
    shared = 0
    whole = 0
    for name, point in parameters(centre).items():
        whole += point.numel()
        kept = kept_of(client, name, point)
        shared += int(kept.sum())
        difference = client.tree.get(name, point).double() - point.double()
        squares += float(difference.masked_fill(~kept, 0.0).square().sum())
    if not shared:
        # Such a client adds no parameter to a mean: there is nothing to clip or to weigh.
        return 0.0
    return math.sqrt(squares * whole / shared)


def distances_to(centre: Mapping[str, Tensor], sent: Sequence[Sent]) -> Tensor:
    """Robust averages: the distance of each client from a point."""
    return torch.tensor([distance(client, centre) for client in sent]).double()


def weights_of(sent: Sequence[Sent]) -> Tensor:
    """Robust averages: the weight of each client."""
    return torch.tensor([client.weight for client in sent]).double()


def squared_distances(previous: Mapping[str, Tensor], sent: Sequence[Sent]) -> Tensor:
    """Robust averages: squared distances between clients, scaled to the whole model.

    Infinite between a client and itself, and where two have nothing in common.
    """
    n = len(sent)
    squares = torch.zeros(n, n, dtype=torch.float64)
    shared = torch.zeros(n, n, dtype=torch.float64)
    whole = 0
    for name, old in parameters(previous).items():
        whole += old.numel()
        values, has_it = stacked(sent, name, old)
        values = values.flatten(1) if old.dim() else values.unsqueeze(1)
        has_it = has_it.flatten(1) if old.dim() else has_it.unsqueeze(1)
        # Differences, not products: |a|^2 + |b|^2 - 2ab would lose two near points that are far
        # from 0.
        for i in range(n - 1):
            both = has_it[i + 1 :] & has_it[i]
            differences = (values[i + 1 :] - values[i]).masked_fill(~both, 0.0)
            squares[i, i + 1 :] += differences.square().sum(1)
            shared[i, i + 1 :] += both.sum(1)
    scaled = torch.where(shared > 0, squares * whole / shared.clamp_min(1), torch.inf)
    # Only pairs i < j are filled in; all others have nothing in common yet.
    return torch.minimum(scaled, scaled.T)


def shortened(tree: Mapping[str, Tensor], previous: Mapping[str, Tensor], scale: float) -> Tree:
    """Robust averages: a client's tree moved towards the previous one, by ``scale``."""
    result: Tree = {}
    for name, leaf in tree.items():
        old = previous[name].double()
        result[name] = old + scale * (leaf.double() - old)
    return result


def in_order(like: Mapping[str, Tensor], *parts: Mapping[str, Tensor]) -> Tree:
    """Robust averages: leaves of several trees as one, in the order of ``like``."""
    leaves: Tree = {}
    for part in parts:
        leaves.update(part)
    return trees.pick(leaves, like)


__getattr__ = find_old_names(__name__)
