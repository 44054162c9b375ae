"""Masks: a client's own, which removes channels first and then weights, and one for all by vote.

A hybrid rule is called with a client's trained weights, their scores and the rates of its layers.
It returns the client's mask, which lies inside the mask it trained under. ``kept_share`` is what it
keeps of the prunable weights of a whole network at these rates: its nominal density.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import trees
from ...channels.groups import (
    ChannelGroup,
    Channels,
    drop_removed,
    expand_channels,
    find_channels_with_filters,
)
from ...channels.selection import FilterL2
from ...errors import check
from ...nets.layout import Layout
from ...parts.mask import best
from ...trees import Mask
from .rates import mean_rate

# ---- one mask for all, by vote -------------------------------------------------------------------


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
        """FedLayerPrune: a vote on the weights that this mask still has."""
        return Votes(self.threshold, mask)


class Votes:
    """The votes counted so far."""

    def __init__(self, threshold: float, mask: Mapping[str, Tensor]) -> None:
        self._threshold = threshold
        self._mask = dict(mask)
        # In double precision: weights are numbers of examples, and shares are compared with tau.
        self._for = trees.map(lambda kept: torch.zeros_like(kept, dtype=torch.float64), mask)
        self._all = 0.0

    def add(self, mask: Mapping[str, Tensor] | None, weight: float) -> None:
        """FedLayerPrune: count one client's vote on the mask.

        The client keeps all of a layer that its mask does not name.
        """
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
        """FedLayerPrune: the weights that enough clients keep, within the previous mask."""
        if not self._all:
            return self._mask
        agreed: Mask = {}
        for name, before in self._mask.items():
            # Below every share: what was pruned before cannot be voted back, only regrown.
            share = trees.where(before, self._for[name] / self._all, -1.0)
            kept = share > self._threshold + ROUNDING
            if not bool(kept.any()):
                # An empty layer would cut the network in two.
                kept = before & (share == share.max())
            agreed[name] = kept
        return agreed

    def anybody(self) -> Mask:
        """FedLayerPrune: the weights that at least one client keeps."""
        return trees.map(lambda votes: votes > 0, self._for)


# ---- a client's own mask: channels first, then weights -------------------------------------------


ShapesByName = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Hybrid:
    r"""FedLayerPrune's hybrid mask: channels by the length of their filters, then weights by score.

    A share of a layer's rate, ``channels``, is taken from its output channels: of :math:`C`
    channels :math:`\lfloor \text{channels} \cdot p_l\, C \rfloor` go, those with the shortest
    filters. What falls with them (biases, norms, the inputs of later layers) counts. Single weights
    of lowest score then make up the rest, so that layer :math:`l` keeps
    :math:`\mathrm{round}((1 - p_l)\, d_l)` weights; fewer where channels have taken more, or where
    a channel loses its last filter weight and falls with what later layers had kept of it.

    Only convolutions lose channels. Where a residual sum ties several of them to each other, the
    lowest of their rates holds.
    """

    channels: float = 0.5

    def __post_init__(self) -> None:
        check(0 <= self.channels <= 1, "channels", self.channels, "in [0, 1]")

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        scores: Mapping[str, Tensor],
        rates: Mapping[str, float],
        mask: Mask,
        groups: Sequence[ChannelGroup],
        layout: Layout,
    ) -> Mask:
        """A client's mask, inside ``mask``."""
        shares: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, rate in rates.items():
            shares[name] = self.channels * rate
            # Of all weights of the layer: those that channels take count towards its rate.
            counts[name] = keeps(rate, mask[name].numel())
        channels = keep_channels(weights, shares, mask, groups, layout)
        return keep_weights(scores, counts, channels, mask, groups, layout.shapes)

    def kept_share(
        self, rates: Mapping[str, float], groups: Sequence[ChannelGroup], layout: Layout
    ) -> float:
        """FedLayerPrune: as the rates say: single weights make up for what channels do not take."""
        return 1 - mean_rate(layout, rates)


@dataclass(frozen=True)
class LiteralHybrid:
    r"""FedLayerPrune's hybrid mask as its section 3.2.1 has it.

    The best :math:`(1 - p_l)\, C` channels stay, and of the weights inside them the best
    :math:`1 - p_l`. So a convolution keeps about :math:`(1 - p_l)^2`, less than its rate says, and
    less again where the layer before it has lost channels, whose inputs fall as well.
    """

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        scores: Mapping[str, Tensor],
        rates: Mapping[str, float],
        mask: Mask,
        groups: Sequence[ChannelGroup],
        layout: Layout,
    ) -> Mask:
        """A client's mask, inside ``mask``."""
        channels = keep_channels(weights, rates, mask, groups, layout)
        # Of all weights inside the channels, not of those that are left: a second round at the same
        # rate prunes nothing more.
        inside = expand_channels(groups, layout.shapes, channels)
        counts = {}
        for name, rate in rates.items():
            size = int(inside[name].sum()) if name in inside else mask[name].numel()
            counts[name] = keeps(rate, size)
        return keep_weights(scores, counts, channels, mask, groups, layout.shapes)

    def kept_share(
        self, rates: Mapping[str, float], groups: Sequence[ChannelGroup], layout: Layout
    ) -> float:
        """FedLayerPrune: of every layer, what its rate leaves of the weights inside channels."""
        kept = 0
        for name, size in count_inside_channels(rates, groups, layout).items():
            kept += keeps(rates[name], size)
        return kept / layout.count(rates)


def keeps(rate: float, size: int) -> int:
    """FedLayerPrune: how many of ``size`` weights stay at a pruned share; never none."""
    return max(1, round((1 - rate) * size))


# ---- channels ------------------------------------------------------------------------------------


def keep_channels(
    weights: Mapping[str, Tensor],
    rates: Mapping[str, float],
    mask: Mask,
    groups: Sequence[ChannelGroup],
    layout: Layout,
) -> Channels:
    """FedLayerPrune: the channels that stay at these rates: those with the longest filters.

    Channels that are gone already stay gone, and count. Every group keeps at least one.
    """
    losing = loses_channels(groups, layout)
    lengths = FilterL2()(weights, losing)
    channels: Channels = {}
    for group in losing:
        alive = find_channels_with_filters(group, mask)
        if not bool(alive.any()):
            continue
        count = count_kept_channels(group, rates)
        # In single precision, so that rounding in the last place cannot decide between equals.
        channels[group.name] = best(lengths[group.name].float(), count, among=alive)
    return channels


def count_kept_channels(group: ChannelGroup, rates: Mapping[str, float]) -> int:
    """FedLayerPrune: the number of a group's channels that stay at these rates; never none."""
    # Tied layers lose the same channels: by the lowest rate none loses more than its own.
    rate = min(rates[place.tensor] for place in group.places_with("filter"))
    return max(1, group.size - int(rate * group.size))


def count_inside_channels(
    rates: Mapping[str, float], groups: Sequence[ChannelGroup], layout: Layout
) -> dict[str, int]:
    """FedLayerPrune: the number of weights of each layer that are left with its channels.

    Filters of removed channels are gone, and so is what later layers read of these.
    """
    left = {name: list(layout.shapes[name]) for name in rates}
    for group in loses_channels(groups, layout):
        count = count_kept_channels(group, rates)
        for place in group.places_with("filter", "input"):
            # Whichever channels stay, the others are as many: here the last ones.
            left[place.tensor][place.dim] -= int((place.index >= count).sum())
    return {name: math.prod(dims) for name, dims in left.items()}


def loses_channels(groups: Sequence[ChannelGroup], layout: Layout) -> list[ChannelGroup]:
    """FedLayerPrune: the groups whose channels are made by convolutions alone."""
    convolutions: set[str] = set()
    for layer in layout.layers:
        if layer.kind == "conv":
            convolutions.update(layer.weights)
    found = []
    for group in groups:
        if convolutions.issuperset(place.tensor for place in group.places_with("filter")):
            found.append(group)
    return found


# ---- weights -------------------------------------------------------------------------------------


def keep_weights(
    scores: Mapping[str, Tensor],
    counts: Mapping[str, int],
    channels: Channels,
    mask: Mask,
    groups: Sequence[ChannelGroup],
    shapes: ShapesByName,
) -> Mask:
    """FedLayerPrune: the ``counts`` best weights of every layer, inside channels and mask."""
    allowed = drop_removed(trees.pick(mask, scores), groups, channels)
    kept: Mask = {}
    for name, score in scores.items():
        chosen = best(score.reshape(-1), counts[name], among=allowed[name].reshape(-1))
        kept[name] = chosen.view(score.shape)
    return without_empty_channels(kept, groups, shapes)


def without_empty_channels(
    weights: Mapping[str, Tensor], groups: Sequence[ChannelGroup], shapes: ShapesByName
) -> Mask:
    """FedLayerPrune: the mask without channels that have no filter weight left.

    A channel without filters would go on speaking through its bias and its norm; here it is gone,
    and with it what later layers read of it. A channel with a single weight is there, with its bias
    and norm. ``weights`` names the prunable weights; the result also names the vectors that fall
    with channels.
    """
    mask = dict(weights)
    before: dict[str, int] = {group.name: group.size for group in groups}
    while True:
        channels: Channels = {}
        left: dict[str, int] = {}
        for group in groups:
            alive = find_channels_with_filters(group, mask)
            count = trees.count_true(alive)
            # A group that would lose all its channels is left as it is.
            if count:
                channels[group.name] = alive
                left[group.name] = count
        # Where a channel is gone, the filters that read it lose weights, and may be empty now. If
        # none has become so, the mask is closed. None comes back: it is enough to count them.
        if left == before:
            vectors = {name: shape for name, shape in shapes.items() if name not in mask}
            return {**mask, **expand_channels(groups, vectors, channels)}
        mask = drop_removed(mask, groups, channels)
        before = left
