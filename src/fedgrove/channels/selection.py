"""Selecting which channels to keep: scores per channel, rankings, and votes of clients.

A score gives one number per channel, larger is better, for every group of
:func:`fedgrove.channels.find_groups.find_groups`; a selection turns scores into ``Channels`` (True
is kept), which :func:`fedgrove.channels.find_groups.make_channel_mask` turns into a mask. No
selection ever empties a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import trees
from ..errors import UnfitError, check, spell_option
from ..renamed import find_old_names
from ..trees import Tree
from .groups import ChannelGroup, Channels, Role

# ---- scores --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gamma:
    r"""The scale of the norms after a channel (network slimming, Liu et al. 2017).

    :math:`s_c = \frac{1}{|B|}\sum_{b \in B} |\gamma_{b,c}|`; :math:`B` -> the norm layers of a
    group; a residual sum ties several to each other, otherwise there is one. Groups without a norm
    get no score, and so keep all channels.
    """

    def __call__(self, params: Mapping[str, Tensor], groups: Sequence[ChannelGroup]) -> Tree:
        """Return the score of every channel that is normalised."""
        scores: Tree = {}
        for group in groups:
            norms = group.places_with("scale")
            if norms:
                total = _sum_per_channel(params, group, "scale", torch.abs)
                scores[group.name] = total / len(norms)
        if not scores:
            raise UnfitError(
                "it has no norm layers after its channels; score them by FilterL1 or FilterL2 "
                f"instead ({spell_option('set', 'score=FilterL1')})."
            )
        return scores


@dataclass(frozen=True)
class FilterL1:
    r"""The size of the filters of a channel: :math:`s_c = \lVert w_c \rVert_1` (Li et al. 2017).

    :math:`w_c` -> all weights whose output is channel c; biases are not counted.
    """

    def __call__(self, params: Mapping[str, Tensor], groups: Sequence[ChannelGroup]) -> Tree:
        """Return the score of every channel."""
        return _score_filters(params, groups, torch.abs)


@dataclass(frozen=True)
class FilterL2:
    r"""The length of the filters that make a channel: :math:`s_c = \lVert w_c \rVert_2`.

    Otherwise as :class:`FilterL1`.
    """

    def __call__(self, params: Mapping[str, Tensor], groups: Sequence[ChannelGroup]) -> Tree:
        """Return the score of every channel."""
        return trees.map(torch.sqrt, _score_filters(params, groups, torch.square))


def _score_filters(
    params: Mapping[str, Tensor], groups: Sequence[ChannelGroup], f: Callable[[Tensor], Tensor]
) -> Tree:
    """Sum ``f`` of every filter weight, per channel of every group."""
    return {group.name: _sum_per_channel(params, group, "filter", f) for group in groups}


def _sum_per_channel(
    params: Mapping[str, Tensor],
    group: ChannelGroup,
    role: Role,
    f: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sum ``f`` of every entry that has this role, per channel."""
    total: Tensor | None = None
    for place in group.places_with(role):
        entries = f(params[place.tensor]).movedim(place.dim, 0)
        per_entry = entries.reshape(len(place.channel), -1).sum(1)
        if total is None:
            total = per_entry.new_zeros(group.size)
        if place.is_all(group.size):
            total += per_entry
            continue
        channel = place.index.to(per_entry.device)
        # Entries of no channel (-1) do not count.
        belongs = channel >= 0
        total.index_add_(0, channel[belongs], per_entry[belongs])
    assert total is not None, f"group {group.name} has no {role}"
    return total


# ---- selections ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slim:
    r"""Network slimming: of all :math:`C` channels, ranked together, the best
    :math:`\mathrm{round}(\rho\, C)` stay (Liu et al. 2017; NetSlim of SAFL).

    The best channel of every group stays whatever its rank, so no fewer than one per group. Of
    equal scores those of larger ``ties`` stay, if these are given, then the channels that come
    first in their groups, measured by the share of the group before them: otherwise ties would
    empty the last layers first. So the number is exact.

    >>> Slim()({"a": torch.tensor([5.0, 4.0]), "b": torch.tensor([1.0, 2.0])}, 0.5)
    {'a': tensor([ True, False]), 'b': tensor([False,  True])}
    """

    def __call__(
        self,
        scores: Mapping[str, Tensor],
        density: float,
        ties: Mapping[str, Tensor] | None = None,
    ) -> Channels:
        """Return the channels kept, per group."""
        check(0 <= density <= 1, "density", density, "in [0, 1]")
        sizes = list(map(len, scores.values()))
        order = _ranked(scores, ties or {})
        # owner[i]: the number of the group that channel i, counted over the whole net, is in.
        owner = torch.repeat_interleave(torch.tensor(sizes))
        best_of_group = []
        for i in range(len(sizes)):
            best_of_group.append(int(order[owner[order] == i][0]))
        is_best = torch.isin(order, torch.tensor(best_of_group, dtype=torch.long))
        # The best of each group is kept first, so they reduce the room for all others.
        others = order[~is_best]
        room = max(0, round(density * len(order)) - len(best_of_group))
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[best_of_group] = True
        kept[others[:room]] = True
        return dict(zip(scores, torch.split(kept, sizes), strict=True))


def _ranked(scores: Mapping[str, Tensor], ties: Mapping[str, Tensor]) -> Tensor:
    """Return all channels, best first.

    Of equal ones those of larger ``ties`` come first, then those first in their groups, then in the
    net. A group without ties has 0.
    """
    place = []
    tie = []
    score = []
    for name, values in scores.items():
        place.append(torch.arange(len(values), dtype=torch.float64) / len(values))
        tie.append(ties.get(name, torch.zeros(len(values))).detach().double().cpu())
        score.append(values.detach().double().cpu())
    # Stable sorts, the last key first: the order of ties is unchanged among equal scores, and the
    # order of places among equal ties.
    order = torch.argsort(torch.cat(place), stable=True)
    for key in (torch.cat(tie), torch.cat(score)):
        order = order[torch.argsort(key[order], descending=True, stable=True)]
    return order


@dataclass(frozen=True)
class Even:
    r"""The same density everywhere.

    A group keeps its :math:`\max(1, \mathrm{round}(\rho\, C_g))` best channels; of equal ones the
    first stay.

    >>> Even()({"a": torch.tensor([5.0, 4.0, 3.0, 2.0]), "b": torch.tensor([1.0, 2.0])}, 0.5)
    {'a': tensor([ True,  True, False, False]), 'b': tensor([False,  True])}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> Channels:
        """Return the channels kept, per group."""
        check(0 <= density <= 1, "density", density, "in [0, 1]")
        channels: Channels = {}
        for name, score in scores.items():
            channels[name] = _keep_best(score, max(1, round(density * len(score))))
        return channels


def _keep_best(score: Tensor, count: int) -> Tensor:
    """Keep the ``count`` best channels of a group; of equal ones the first."""
    best = torch.argsort(score.detach().cpu(), descending=True, stable=True)[:count]
    kept = torch.zeros(len(score), dtype=torch.bool)
    kept[best] = True
    return kept


def select_best_in_steps(scores: Mapping[str, Tensor], density: float, multiple: int) -> Channels:
    """Keep the best channels of every group, a share of ``density`` in steps of ``multiple``.

    A group narrower than twice ``multiple`` is not rounded. Of equal channels the first stay, so
    that what a smaller density keeps lies within what a larger one keeps.

    Args:
        scores: By group: how good each channel is.
        density: The share of channels to keep.
        multiple: Widths are multiples of this number where a group is wide enough.

    >>> kept = select_best_in_steps({"a": torch.arange(32.0), "b": torch.arange(6.0)}, 0.4, 8)
    >>> [int(k.sum()) for k in kept.values()]
    [16, 2]
    """
    channels: Channels = {}
    for name, score in scores.items():
        count = max(1, round(density * len(score)))
        if len(score) >= 2 * multiple:
            steps = round(density * len(score) / multiple)
            count = min(len(score), max(multiple, multiple * steps))
        channels[name] = _keep_best(score, count)
    return channels


def select_first(groups: Sequence[ChannelGroup], share: float) -> Channels:
    """Keep the first channels of every group, at least one.

    Each smaller sub-model lies within the larger (HeteroFL).
    """
    # With equal scores Even keeps the first ones.
    return Even()({group.name: torch.zeros(group.size) for group in groups}, share)


def select_window(groups: Sequence[ChannelGroup], share: float, round: int) -> Channels:
    """Keep a window of channels that moves by one each round, and wraps around (FedRolex).

    >>> select_window([ChannelGroup("a", 4, ())], 0.5, round=3)
    {'a': tensor([ True, False, False,  True])}
    """
    window: Channels = {}
    for name, first in select_first(groups, share).items():
        window[name] = torch.roll(first, round % len(first))
    return window


def select_random(
    groups: Sequence[ChannelGroup], share: float, generator: torch.Generator
) -> Channels:
    """Keep random channels, a share of every group (FedDrop)."""
    # The best of random scores are a random selection.
    scores = {}
    for group in groups:
        scores[group.name] = torch.rand(group.size, generator=generator)
    return Even()(scores, share)


# ---- what clients agree on -----------------------------------------------------------------------


class Overlap:
    r"""Overlap counting: how often each channel survives, :math:`x_c = \sum_k [c \in M_k]`; those
    above the threshold that meets the density stay (SAFL, heterogeneous model fusion).

    :math:`M_k` -> ``channels``. The threshold is :class:`Slim`'s: one for the whole net, an exact
    number, at least one channel per group. Channels tied at it are decided by the mean of their
    ``scores`` over the clients that have them, :math:`\sum_k [c \in M_k]\, s_{kc} / x_c`, then by
    place; the paper does not say how.

    >>> overlap = Overlap()
    >>> overlap.add({"a": torch.tensor([True, True, False])}, {"a": torch.tensor([0.2, 0.9, 0.0])})
    >>> overlap.add({"a": torch.tensor([False, True, True])}, {"a": torch.tensor([0.0, 0.9, 0.4])})
    >>> overlap.counts["a"], overlap.value(2 / 3)["a"]
    (tensor([1, 2, 1]), tensor([False,  True,  True]))
    """

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def add(
        self, channels: Mapping[str, Tensor], scores: Mapping[str, Tensor] | None = None
    ) -> None:
        """Count one client's channels; ``scores`` may leave out groups that have none."""
        if not self.counts:
            for name, kept in channels.items():
                self.counts[name] = torch.zeros_like(kept, dtype=torch.long)
                self._sums[name] = torch.zeros_like(kept, dtype=torch.double)
        if channels.keys() != self.counts.keys():
            odd = sorted(set(channels) ^ set(self.counts))
            raise ValueError(f"channels to count differ in groups: {odd}")
        for name, kept in channels.items():
            self.counts[name] = self.counts[name] + kept.long()
            if scores is not None and name in scores:
                # The score of a missing channel need not be 0: it is replaced, not multiplied.
                score = scores[name].detach().double().cpu().masked_fill(~kept, 0.0)
                self._sums[name] = self._sums[name] + score

    def value(self, density: float) -> Channels:
        """Return the channels that enough clients kept, by overlap counting."""
        if not self.counts:
            raise ValueError("nothing was counted: no client's channels were added")
        means = {}
        for name, count in self.counts.items():
            # In single precision, so that rounding in the last place cannot decide between equals.
            means[name] = (self._sums[name] / count.clamp(min=1)).float()
        return Slim()(self.counts, density, ties=means)


__getattr__ = find_old_names(__name__)
