"""How much of each layer a device goes without: importances, and ratios that follow them.

A *layer* here is a group of channels that are removed together: one convolution, or those that a
residual sum ties to each other. Pruning ratios do not fall where importance falls. The paper's
program (Eq. 1) accepts any feasible point, also equal ratios; here it is determined: of all
feasible points the one nearest to ratios that go with 1 / importance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from ...channels.groups import ChannelGroup
from ...channels.selection import FilterL1
from ...errors import check, unknown

IMPORTANCES = ("mean", "sum")
"""Per weight, or of the whole layer: the sum ranks layers mostly by their size."""
CONV_DIMENSIONS = 3
"""A convolution's weight has this many dimensions or more; a linear layer's has two."""
LEAST_IMPORTANCE = 1e-6
"""Of the largest one: a layer of zeros counts as this important, so that 1 / I is finite."""
HALVINGS = 200
"""Bisection stops when its interval cannot be halved any more, or after this many steps."""


def candidates(
    groups: Sequence[ChannelGroup], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ChannelGroup, ...]:
    """The layers that FedAPTA prunes: the convolutional ones.

    In a net without convolutions all hidden layers, so that an MLP can be cut too. Frozen layers
    are in no group, and so never among them.
    """
    convolutional = []
    for group in groups:
        filters = group.places_with("filter")
        if any(len(shapes[place.tensor]) >= CONV_DIMENSIONS for place in filters):
            convolutional.append(group)
    return tuple(convolutional or groups)


def weight_counts(
    groups: Sequence[ChannelGroup], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """FedAPTA: :math:`N_k`, how many weights make the channels of each layer.

    Biases and norms do not count.

    A weight counts with the channel that it makes, not with the one that it reads.

    >>> from fedgrove.channels.groups import Place
    >>> conv = ChannelGroup("conv", 4, (Place("conv.weight", 0, (0, 1, 2, 3), "filter"),))
    >>> weight_counts([conv], {"conv.weight": (4, 2, 3, 3)})
    {'conv': 72}
    """
    counts = {}
    for group in groups:
        total = 0
        for place in group.places_with("filter"):
            shape = shapes[place.tensor]
            weights = math.prod(shape)
            # Entries along the dimension that are not this group's channels are marked by -1.
            entries = sum(channel >= 0 for channel in place.channel)
            total += weights * entries // shape[place.dim]
        counts[group.name] = total
    return counts


def layer_importance(
    params: Mapping[str, Tensor], groups: Sequence[ChannelGroup], importance: str = "mean"
) -> dict[str, float]:
    r"""FedAPTA: a layer's :math:`I_k = \lVert w_k \rVert_1`, divided by :math:`N_k` for "mean".

    (FedAPTA, Alg. 2, line 3.) :math:`w_k` -> the weights that make the channels of layer k.
    """
    if importance not in IMPORTANCES:
        raise unknown("importance", importance, IMPORTANCES)
    shapes = {name: tuple(leaf.shape) for name, leaf in params.items()}
    counts = weight_counts(groups, shapes)
    importances = {}
    for name, scores in FilterL1()(params, groups).items():
        norm = float(scores.double().sum())
        if importance == "mean":
            norm /= counts[name]
        importances[name] = norm
    return importances


def monotone_ratios(
    importances: Sequence[float],
    sizes: Sequence[int],
    caps: Sequence[float],
    ratio: float,
    least: float = 0.0,
) -> list[float]:
    r"""FedAPTA: the pruning ratio of each layer; important layers lose less.

    :math:`\min_\rho \sum_k (\rho_k - s/I_k)^2` subject to :math:`\sum_k N_k \rho_k = \rho \sum_k
    N_k`, :math:`l \rho \le \rho_k \le c_k`, and :math:`\rho_j \le \rho_k` wherever layer j is
    more important than layer k (FedAPTA, Eq. 1, whose objective is 0, and so is its :math:`l`).
    :math:`I` -> ``importances``, :math:`N` -> ``sizes``, :math:`c` -> ``caps``, :math:`\rho` ->
    ``ratio``, :math:`l` -> ``least``; :math:`s` is such that the target :math:`s/I` itself meets
    the budget. Equally important layers are taken in order.

    With a multiplier :math:`\lambda` for the budget the rest is an isotonic regression of
    :math:`s/I_k - \lambda N_k`, solved exactly; :math:`\lambda` is found by bisection, since the
    weights pruned never rise with it. The ratio may be no larger than the smallest cap: then equal
    ratios are feasible, whatever the order and ``least``, which at 1 leaves nothing else.

    >>> monotone_ratios([2.0, 1.0], sizes=[10, 10], caps=[0.95, 0.95], ratio=0.3)
    [0.2, 0.4]
    >>> monotone_ratios([2.0, 1.0], sizes=[10, 10], caps=[0.95, 0.95], ratio=0.3, least=0.8)
    [0.24, 0.36]
    """
    count = len(importances)
    check(count > 0, "layers", count, "1 or more")
    check(min(sizes) > 0, "sizes", tuple(sizes), "weights in every layer")
    check(min(importances) >= 0, "importances", tuple(importances), "0 or more each")
    allowed = f"from 0 to {min(caps):g}, the smallest cap"
    check(0 <= ratio <= min(caps), "ratio", ratio, allowed)
    check(0 <= least <= 1, "least", least, "in [0, 1]")
    floor = least * ratio
    # sorted() is stable: of equal ones the first comes first.
    order = sorted(range(count), key=lambda k: -importances[k])
    total = sum(sizes)
    weights = []
    ordered_importances = []
    limits = []
    for place, k in enumerate(order):
        # In shares of all weights, so that multipliers are of the size of ratios.
        weights.append(sizes[k] / total)
        ordered_importances.append(importances[k])
        # Ratios do not fall along the order, so a cap limits all layers before it as well.
        limits.append(min(caps[later] for later in order[place:]))
    targets = _targets(ordered_importances, weights, ratio)

    def ratios_at(multiplier: float) -> list[float]:
        moved = []
        for target, weight in zip(targets, weights, strict=True):
            moved.append(target - multiplier * weight)
        return bounded_isotonic(moved, limits, floor)

    def pruned_at(multiplier: float) -> float:
        return _weighted_sum(weights, ratios_at(multiplier))

    # At `low` every layer is at its limit, at `high` every layer is at the floor.
    lightest = min(weights)
    low = (min(targets) - 1) / lightest - 1
    high = max(targets) / lightest + 1
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if pruned_at(middle) > ratio:
            low = middle
        else:
            high = middle
    # The upper end of the interval: it never prunes more than the budget.
    in_order = ratios_at(high)
    ratios = [0.0] * count
    for place, k in enumerate(order):
        # Bisection may leave a last bit where a layer should lose nothing.
        ratios[k] = round(in_order[place], 12)
    return ratios


def _targets(importances: Sequence[float], weights: Sequence[float], ratio: float) -> list[float]:
    """Ratios that go with 1 / importance, and meet the budget."""
    largest = max(importances)
    inverse = []
    for importance in importances:
        if largest == 0:
            inverse.append(1.0)
        else:
            inverse.append(1 / max(importance / largest, LEAST_IMPORTANCE))
    scale = ratio / _weighted_sum(weights, inverse)
    return [scale * i for i in inverse]


def _weighted_sum(weights: Sequence[float], values: Sequence[float]) -> float:
    # fsum rounds once, at the end: the sum does not depend on the order of the layers.
    return math.fsum(w * value for w, value in zip(weights, values, strict=True))


def bounded_isotonic(
    values: Sequence[float], limits: Sequence[float], floor: float = 0.0
) -> list[float]:
    r"""FedAPTA: the non-decreasing sequence nearest to ``values``, between ``floor`` and limits.

    :math:`\min_x \sum_k (x_k - v_k)^2` with :math:`x_k \le x_{k+1}` and :math:`f \le x_k \le l_k`;
    limits do not fall, and none is below the floor. Neighbours that are out of order are pooled,
    and a pool takes its mean, brought into the bounds that its members share
    (pool-adjacent-violators; exact for any convex terms, Best, Chakravarti & Ubhaya 2000).

    >>> bounded_isotonic([0.3, 0.1, 0.9], [0.5, 0.5, 0.8])
    [0.2, 0.2, 0.8]
    """
    # A pool: the sum of its values, how many there are, its least limit, what it takes.
    pools: list[tuple[float, int, float, float]] = []
    for value, limit in zip(values, limits, strict=True):
        pool = (value, 1, limit, min(max(value, floor), limit))
        while pools and pools[-1][3] > pool[3]:
            total, number, least, _ = pools.pop()
            total += pool[0]
            number += pool[1]
            least = min(least, pool[2])
            pool = (total, number, least, min(max(total / number, floor), least))
        pools.append(pool)
    result: list[float] = []
    for _, number, _, taken in pools:
        result += [taken] * number
    return result


def whole_channels(
    ratios: Sequence[float], channels: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    """FedAPTA: how many whole channels each layer loses, to meet the budget as nearly as possible.

    All layers round down; then those with the largest remainder lose one channel more, each if that
    brings the pruned weights nearer to their number. So no layer is a whole channel away from its
    ratio, and the pruned weights are off by at most half of the largest layer's channel.

    >>> whole_channels([0.25, 0.25], channels=[6, 6], sizes=[60, 60])
    [2, 1]
    """
    per_channel = []
    fallen = []
    remainders = []
    for ratio, count, size in zip(ratios, channels, sizes, strict=True):
        # A ratio that stands for whole channels must not lose one to rounding.
        exact = round(ratio * count, 9)
        per_channel.append(size / count)
        fallen.append(math.floor(exact))
        remainders.append(exact - math.floor(exact))
    missing = _weighted_sum(remainders, per_channel)
    # sorted() is stable: of equal remainders the earlier layer's comes first.
    by_remainder = sorted(range(len(fallen)), key=lambda k: -remainders[k])
    for k in by_remainder:
        one_more_is_nearer = missing > per_channel[k] / 2
        if remainders[k] > 0 and one_more_is_nearer:
            fallen[k] += 1
            missing -= per_channel[k]
    return fallen
