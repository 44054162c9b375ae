"""Which channels stay: scores per channel, one ranking over all groups or one per group, and what clients agree on.

A score gives, for every group of :attr:`fedgrove.nets.layout.Layout.groups`, one number per channel, larger is more; a
choice turns scores into ``Channels`` (True is kept), which ``layout.expand`` turns into a mask. No choice ever empties
a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError, check
from ..trees import Tree
from .groups import ChannelGroup, Channels, Role

# ---- scores ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gamma:
    r"""The scale of the norms behind a channel: :math:`s_c = \frac{1}{|B|}\sum_{b \in B} |\gamma_{b,c}|`.

    (Network slimming, Liu et al. 2017.) :math:`B` -> the norm layers of a group; a residual sum ties several to each
    other, otherwise there is one. Groups without a norm get no score, and so stay whole.
    """

    def __call__(self, params: Mapping[str, Tensor], groups: Sequence[ChannelGroup]) -> Tree:
        """The score of every channel that is normalised."""
        scored = [g for g in groups if g.within("scale")]
        if not scored:
            raise InputError(
                "this net has no norm layers behind its channels; score them by FilterL1 or FilterL2 instead."
            )
        return {
            g.name: _summed(params, g, "scale", torch.abs) / len(g.within("scale")) for g in scored
        }


@dataclass(frozen=True)
class FilterL1:
    r"""The size of the filters that make a channel: :math:`s_c = \lVert w_c \rVert_1` (Li et al. 2017).

    :math:`w_c` -> all weights whose output is channel c; biases are not counted.
    """

    def __call__(self, params: Mapping[str, Tensor], groups: Sequence[ChannelGroup]) -> Tree:
        """The score of every channel."""
        return {g.name: _summed(params, g, "filter", torch.abs) for g in groups}


@dataclass(frozen=True)
class FilterL2:
    r"""The length of the filters that make a channel: :math:`s_c = \lVert w_c \rVert_2`; else as :class:`FilterL1`."""

    def __call__(self, params: Mapping[str, Tensor], groups: Sequence[ChannelGroup]) -> Tree:
        """The score of every channel."""
        return {g.name: _summed(params, g, "filter", torch.square).sqrt() for g in groups}


def _summed(
    params: Mapping[str, Tensor], group: ChannelGroup, role: Role, f: Callable[[Tensor], Tensor]
) -> Tensor:
    """``f`` of every entry that has this role, summed per channel."""
    total: Tensor | None = None
    for place in group.within(role):
        each = f(params[place.tensor]).movedim(place.dim, 0).reshape(len(place.channel), -1).sum(1)
        total = each.new_zeros(group.size) if total is None else total
        channel = place.index.to(each.device)
        total.index_add_(0, channel[channel >= 0], each[channel >= 0])
    assert total is not None, f"group {group.name} has no {role}"
    return total


# ---- choices --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slim:
    r"""Network slimming: all channels ranked together, the :math:`\mathrm{round}(\rho\, C)` best of all :math:`C` stay
    (Liu et al. 2017; NetSlim of SAFL).

    The best channel of every group stays whatever its rank, so no fewer than one per group. Of equal scores the
    channels that come first in their groups stay, measured by the share of the group before them: else ties would
    empty the last layers first. So the number is exact.

    >>> Slim()({"a": torch.tensor([5.0, 4.0]), "b": torch.tensor([1.0, 2.0])}, 0.5)
    {'a': tensor([ True, False]), 'b': tensor([False,  True])}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> Channels:
        """The channels kept, per group."""
        check(0 <= density <= 1, "density", density, "in [0, 1]")
        order = _ranked(scores)
        owner = torch.repeat_interleave(torch.tensor([len(s) for s in scores.values()]))
        first = [int(order[owner[order] == i][0]) for i in range(len(scores))]
        rest = order[~torch.isin(order, torch.tensor(first, dtype=torch.long))]
        room = max(0, round(density * len(order)) - len(first))
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[first] = True
        kept[rest[:room]] = True
        return dict(zip(scores, torch.split(kept, [len(s) for s in scores.values()]), strict=True))


def _ranked(scores: Mapping[str, Tensor]) -> Tensor:
    """All channels, best first; of equal ones those that come first in their groups, then in the net."""
    place = torch.cat([torch.arange(len(s), dtype=torch.float64) / len(s) for s in scores.values()])
    every = torch.cat([s.detach().double().cpu() for s in scores.values()])
    early = torch.argsort(place, stable=True)
    return early[torch.argsort(every[early], descending=True, stable=True)]


@dataclass(frozen=True)
class Even:
    r"""The same density everywhere: a group keeps its :math:`\max(1, \mathrm{round}(\rho\, C_g))` best channels.

    Of equal ones the first stay.

    >>> Even()({"a": torch.tensor([5.0, 4.0, 3.0, 2.0]), "b": torch.tensor([1.0, 2.0])}, 0.5)
    {'a': tensor([ True,  True, False, False]), 'b': tensor([False,  True])}
    """

    def __call__(self, scores: Mapping[str, Tensor], density: float) -> Channels:
        """The channels kept, per group."""
        check(0 <= density <= 1, "density", density, "in [0, 1]")
        return {name: _best(s, max(1, round(density * len(s)))) for name, s in scores.items()}


def _best(score: Tensor, n: int) -> Tensor:
    kept = torch.zeros(len(score), dtype=torch.bool)
    kept[torch.argsort(score.detach().cpu(), descending=True, stable=True)[:n]] = True
    return kept


def nested(groups: Sequence[ChannelGroup], share: float) -> Channels:
    """The first channels of every group, at least one: each smaller sub-model lies within the larger (HeteroFL)."""
    return Even()({g.name: torch.zeros(g.size) for g in groups}, share)


# ---- what clients agree on ------------------------------------------------------------------------------------------


class Overlap:
    r"""Overlap counting: how often each channel survives, :math:`x_c = \sum_k [c \in M_k]`; those above the
    threshold that meets the density stay (SAFL, heterogeneous model fusion).

    :math:`M_k` -> ``channels``. The threshold is :class:`Slim`'s: one for the whole net, an exact number, at least one
    channel per group, ties by place.

    >>> overlap = Overlap()
    >>> overlap.add({"a": torch.tensor([True, True, False, False])})
    >>> overlap.add({"a": torch.tensor([False, True, False, True])})
    >>> overlap.counts["a"], overlap.value(0.25)["a"]
    (tensor([1, 2, 0, 1]), tensor([False,  True, False, False]))
    """

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}

    def add(self, channels: Mapping[str, Tensor]) -> None:
        """Count one client's channels."""
        if self.counts and channels.keys() != self.counts.keys():
            raise ValueError(
                f"channels to count differ in groups: {sorted(set(channels) ^ set(self.counts))}"
            )
        for name, kept in channels.items():
            self.counts[name] = (
                self.counts[name] + kept.long() if name in self.counts else kept.long()
            )

    def value(self, density: float) -> Channels:
        """The channels that enough clients kept."""
        if not self.counts:
            raise ValueError("nothing was counted: no client's channels were added")
        return Slim()(self.counts, density)
