"""Masks that remove whole channels first and then single weights inside those that stay.

A rule is called with a client's trained weights, their scores and the rates of its layers. It gives
the client's mask, which lies inside the mask it trained under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

Shapes = Mapping[str, tuple[int, ...]]


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
        shares = {name: self.channels * rate for name, rate in rates.items()}
        channels = keep_channels(weights, shares, mask, groups, layout)
        counts = {name: keeps(rate, mask[name].numel()) for name, rate in rates.items()}
        return keep_weights(scores, counts, channels, mask, groups, layout.shapes)


@dataclass(frozen=True)
class LiteralHybrid:
    r"""FedLayerPrune's hybrid mask as its section 3.2.1 has it.

    The best :math:`(1 - p_l)\, C` channels stay, and of the weights inside them the best
    :math:`1 - p_l`. So a layer keeps about :math:`(1 - p_l)^2`, less than its rate says.
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


def keeps(rate: float, size: int) -> int:
    """How many of ``size`` weights stay at a pruned share; never none."""
    return max(1, round((1 - rate) * size))


# ---- channels ------------------------------------------------------------------------------------


def keep_channels(
    weights: Mapping[str, Tensor],
    rates: Mapping[str, float],
    mask: Mask,
    groups: Sequence[ChannelGroup],
    layout: Layout,
) -> Channels:
    """The channels of convolutions that stay at these rates: those with the longest filters.

    Channels that are gone already stay gone, and count. Every group keeps at least one.
    """
    losing = loses_channels(groups, layout)
    lengths = FilterL2()(weights, losing)
    channels: Channels = {}
    for group in losing:
        alive = find_channels_with_filters(group, mask)
        if not bool(alive.any()):
            continue
        filters = [place.tensor for place in group.places_with("filter")]
        rate = min(rates[name] for name in filters)
        count = max(1, group.size - int(rate * group.size))
        # In single precision, so that rounding in the last place cannot decide between equals.
        channels[group.name] = best(lengths[group.name].float(), count, among=alive)
    return channels


def loses_channels(groups: Sequence[ChannelGroup], layout: Layout) -> list[ChannelGroup]:
    """The groups whose channels are made by convolutions alone."""
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
    shapes: Shapes,
) -> Mask:
    """Of the weights inside these channels and the mask, the ``counts`` best of every layer."""
    allowed = drop_removed(trees.pick(mask, scores), groups, channels)
    kept: Mask = {}
    for name, score in scores.items():
        chosen = best(score.reshape(-1), counts[name], among=allowed[name].reshape(-1))
        kept[name] = chosen.view(score.shape)
    return without_empty_channels(kept, groups, shapes)


def without_empty_channels(
    weights: Mapping[str, Tensor], groups: Sequence[ChannelGroup], shapes: Shapes
) -> Mask:
    """The mask of weights, and of all that falls with channels which have no filter weight left.

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
