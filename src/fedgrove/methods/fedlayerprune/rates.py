r"""How much of each layer is pruned: ``rates(layout, p, evidence) -> {weight: pruned share}``.

FedLayerPrune writes :math:`p_l = \min(p_{base}\, \alpha_l\, \beta_t,\ p_{max})` (section 3.3).
Here :math:`p = p_{base}\,\beta_t` -> ``p``, and a part gives
:math:`p\,\alpha_l`; :func:`capped` is the minimum. What clients measure of layers (their strengths,
what pruning them costs) reaches the server as one number per layer: ``evidence``, None before
anybody has measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...core import Batch, Carry, ClientInfo
from ...errors import UnfitError, check, spell_option
from ...nets import Net
from ...nets.layout import Layout
from ...parts.allocate import ERK, Uniform
from ...parts.gradient import loss_at
from ...parts.objective import Objective
from ...trees import Tree
from .fisher import GradientVariance, HessianTrace

Rates = dict[str, float]
"""Pruned shares by weight tensor, in order of execution."""
LayerEvidence = Mapping[str, float]
"""One number per weight tensor, measured by clients."""


class LayerRates(Protocol):
    """How much of each layer is pruned: a frozen dataclass."""

    @property
    def measures(self) -> LayerMeasure | None:
        """FedLayerPrune: what clients measure for these layer rates, if anything."""

    def __call__(self, layout: Layout, p: float, evidence: LayerEvidence | None = None) -> Rates:
        """The pruned share of every prunable weight tensor, not yet capped."""


class LayerMeasure(Protocol):
    """What a client measures of its layers on one mini-batch: a frozen dataclass."""

    def of(self, objective: Objective) -> Callable[[Net, Tree, Batch, Carry], Tree]:
        """FedLayerPrune: the pure function that a client's Measure stage sums."""

    def value(self, measured: Tree) -> dict[str, float]:
        """FedLayerPrune: one number of 0 or more per weight tensor."""


# ---- the paper's ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class KindAndDepth:
    r"""FedLayerPrune, section 3.2.1: :math:`\alpha_l` by the layer's kind, times a factor by depth.

    Convolutions -> ``conv``, linear layers -> ``linear``; norm layers are never pruned weight by
    weight. Layers whose middle lies in the first third of the depth are shallow, those in the last
    third deep (the paper does not say which are; thirds are ours). With a ``strength`` (Eq. 8)
    :math:`\alpha_l` becomes :math:`\alpha_l / (\varepsilon + L\gamma_l)`.

    Differs from the paper: it divides by :math:`\varepsilon + \gamma_l`. As the :math:`\gamma_l` of
    L layers sum to 1, that would multiply every rate by about L. And the rates are scaled to the
    mean they have without strengths, or a large layer of little strength would lose nearly all.

    >>> from torch import nn
    >>> layout = Layout.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)), (2,))
    >>> {k: round(p, 3) for k, p in KindAndDepth()(layout, 0.2).items()}
    {'0.weight': 0.154, '1.weight': 0.22, '2.weight': 0.264}
    """

    conv: float = 0.6
    linear: float = 1.1
    shallow: float = 0.7
    deep: float = 1.2
    strength: GradientVariance | HessianTrace | None = None
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        for name in ("conv", "linear", "shallow", "deep"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        check(self.epsilon > 0, "epsilon", self.epsilon, "above 0")

    @property
    def measures(self) -> LayerMeasure | None:
        """FedLayerPrune: clients measure the strength, if one is set."""
        return self.strength

    def __call__(self, layout: Layout, p: float, evidence: LayerEvidence | None = None) -> Rates:
        """The pruned share of every layer."""
        alphas = self.sensitivities(layout)
        rates = {name: p * alpha for name, alpha in alphas.items()}
        if self.strength is None or evidence is None:
            return rates
        measured: Rates = {}
        for name, rate in rates.items():
            measured[name] = rate / (self.epsilon + len(rates) * share_of(name, evidence))
        # As much is pruned as without the strengths, only elsewhere. (The bound is for rates of 0,
        # whose mean is 0 as well.)
        scale = mean_rate(layout, rates) / max(mean_rate(layout, measured), 1e-30)
        return {name: scale * rate for name, rate in measured.items()}

    def sensitivities(self, layout: Layout) -> dict[str, float]:
        """FedLayerPrune: the coefficient of every prunable weight tensor."""
        by_kind = {"conv": self.conv, "linear": self.linear}
        layers = [layer for layer in layout.layers if layer.weights]
        alphas: dict[str, float] = {}
        for i, layer in enumerate(layers):
            if layer.kind not in by_kind:
                raise UnfitError(
                    f"its layer '{layer.name}' is neither a convolution nor linear, and "
                    "KindAndDepth has a sensitivity for these two kinds only. Treat all layers "
                    f"equally ({spell_option('set', 'rates=Alike')}) or measure them "
                    f"({spell_option('set', 'rates=LearnedSensitivity')})."
                )
            alpha = by_kind[layer.kind]
            # The middle of layer i, of layers of equal length that lie between 0 and 1.
            depth = (i + 0.5) / len(layers)
            if depth < 1 / 3:
                alpha *= self.shallow
            elif depth > 2 / 3:
                alpha *= self.deep
            for name in layer.weights:
                # A weight that two layers share is the first one's.
                alphas.setdefault(name, alpha)
        return alphas


def share_of(name: str, evidence: LayerEvidence) -> float:
    r"""FedLayerPrune, Eq. 8: :math:`\gamma_l = s_l / \sum_j s_j`; equal shares where all are 0.

    >>> share_of("a", {"a": 3.0, "b": 1.0}), share_of("a", {"a": 0.0, "b": 0.0})
    (0.75, 0.5)
    """
    total = sum(evidence.values())
    if total <= 0:
        return 1 / len(evidence)
    return evidence[name] / total


# ---- other rates ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alike:
    """All layers alike: alpha = 1, what is left of FedLayerPrune without layer adaptation."""

    @property
    def measures(self) -> LayerMeasure | None:
        """FedLayerPrune: clients measure nothing for equal layer rates."""
        return None

    def __call__(self, layout: Layout, p: float, evidence: LayerEvidence | None = None) -> Rates:
        """One share for all layers."""
        return dict.fromkeys(layout.prunable, p)


@dataclass(frozen=True)
class Allocated:
    """What an allocation leaves out where it keeps ``1 - p`` of all weights: ERK, or uniform."""

    allocation: ERK | Uniform = ERK()

    @property
    def measures(self) -> LayerMeasure | None:
        """FedLayerPrune: clients measure nothing for allocated layer rates."""
        return None

    def __call__(self, layout: Layout, p: float, evidence: LayerEvidence | None = None) -> Rates:
        """The pruned share of every layer."""
        shapes = layout.shapes
        # An allocation by shape reads nothing else of the scores: on "meta" they take no memory.
        scores = {name: torch.empty(shapes[name], device="meta") for name in layout.prunable}
        kept = self.allocation(scores, min(max(1 - p, 0.0), 1.0))
        return {name: 1 - kept[name] / scores[name].numel() for name in scores}


@dataclass(frozen=True)
class LearnedSensitivity:
    r"""Sensitivities measured, not set (ours; the paper names it as future work).

    A client prunes one layer after the other by magnitude, each alone and by ``probe`` of its
    weights in use, and reports how much its loss on one mini-batch grows, :math:`\Delta_l`. If the
    loss grows with the square of the pruned share, :math:`\Delta_l (p_l / probe)^2`, its sum over
    layers at a given mean rate :math:`p` is least for

    .. math:: p_l = c\, d_l / \Delta_l, \qquad \sum_l d_l\, p_l = p \sum_l d_l

    with :math:`d_l` weights in layer :math:`l`; no layer above ``most``, and what such layers do
    not take the others do. Layers that cost next to nothing (less than a hundredth of the most
    sensitive one per weight) count as that hundredth. Before anybody has measured, all layers are
    alike.
    """

    probe: float = 0.5
    most: float = 0.9

    def __post_init__(self) -> None:
        check(0 < self.probe < 1, "probe", self.probe, "in (0, 1)")
        check(0 < self.most <= 1, "most", self.most, "in (0, 1]")

    @property
    def measures(self) -> LayerMeasure | None:
        """FedLayerPrune: clients measure how much the loss grows, layer by layer."""
        return LossIncrease(self.probe)

    def __call__(self, layout: Layout, p: float, evidence: LayerEvidence | None = None) -> Rates:
        """The pruned share of every layer."""
        names = layout.prunable
        if evidence is None:
            return dict.fromkeys(names, p)
        sizes: dict[str, int] = {}
        cost: dict[str, float] = {}
        for name in names:
            sizes[name] = layout.count([name])
            cost[name] = evidence[name] / sizes[name]
        largest = max(cost.values())
        # Nothing costs anything: no layer is more sensitive than another.
        if largest < 1e-30:
            return dict.fromkeys(names, p)
        wanted = {name: 1 / max(cost[name] / largest, 0.01) for name in names}
        return self._filled(wanted, sizes, min(p, self.most))

    def _filled(self, wanted: Rates, sizes: Mapping[str, int], p: float) -> Rates:
        """Rates in these proportions, none above ``most``, with mean ``p`` over all weights."""
        rates: Rates = {}
        open_names = list(wanted)
        left = p * sum(sizes.values())
        while open_names:
            scale = left / sum(sizes[name] * wanted[name] for name in open_names)
            over = [name for name in open_names if scale * wanted[name] > self.most]
            if not over:
                for name in open_names:
                    rates[name] = scale * wanted[name]
                break
            # Layers that would go above stay at the limit; the others share what is left.
            for name in over:
                rates[name] = self.most
                left -= self.most * sizes[name]
                open_names.remove(name)
        # In the order of the network: layers at the limit were filled in first.
        return {name: rates[name] for name in wanted}


@dataclass(frozen=True)
class LossIncrease:
    """By how much a client's loss on a mini-batch grows if one layer is pruned by ``probe``."""

    probe: float

    def of(self, objective: Objective) -> Callable[[Net, Tree, Batch, Carry], Tree]:
        """FedLayerPrune: the loss of the whole network, under "", and with each layer pruned."""
        return _Losses(objective, self.probe)

    def value(self, measured: Tree) -> dict[str, float]:
        """FedLayerPrune: the increase by layer; 0 where pruning made the loss smaller."""
        before = float(measured[""])
        increases: dict[str, float] = {}
        for name, after in measured.items():
            if name:
                increases[name] = max(0.0, float(after) - before)
        return increases


@dataclass(frozen=True)
class _Losses:
    objective: Objective
    probe: float

    def passes(self, net: Net) -> int:
        """FedLayerPrune: a pass of the whole network, and one for each pruned layer."""
        return 1 + len(net.layout.prunable)

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        loss = loss_at(self.objective, net, params, batch, carry)
        found = {"": loss({})}
        for name in net.layout.prunable:
            found[name] = loss({name: self._pruned(params[name])})
        return found

    def _pruned(self, weight: Tensor) -> Tensor:
        """The weight without a share of those in use, the smallest.

        Of those in use: a layer that is pruned already would otherwise lose only zeros, and seem to
        cost nothing.
        """
        # Not best(), which selects in numpy: here an engine may run many clients at once.
        ordered = weight.flatten().abs().sort().values
        zeros = (ordered == 0).sum()
        # Tensors all the way: no branch on data, or clients could not be measured at once.
        taken = (self.probe * (ordered.numel() - zeros)).round().clamp(min=1).long()
        last = (zeros + taken - 1).clamp(max=ordered.numel() - 1)
        # Whoever equals the threshold goes with it; ties make the probe a little larger.
        threshold = ordered.gather(0, last.reshape(1))
        return torch.where(weight.abs() > threshold, weight, 0.0)


# ---- the rate of a round -------------------------------------------------------------------------


def capped(rates: Mapping[str, float], p_max: float) -> Rates:
    r"""FedLayerPrune's :math:`p_l(t) = \min(p_{base}\,\alpha_l\,\beta_t,\ p_{max})`.

    >>> capped({"a": 0.3, "b": 0.7}, 0.6)
    {'a': 0.3, 'b': 0.6}
    """
    return {name: min(rate, p_max) for name, rate in rates.items()}


def mean_rate(layout: Layout, rates: Mapping[str, float]) -> float:
    """FedLayerPrune: the pruned share of all prunable weights."""
    shapes = layout.shapes
    pruned = 0.0
    weights = 0
    for name, rate in rates.items():
        size = math.prod(shapes[name])
        pruned += rate * size
        weights += size
    return pruned / weights


def base_for(
    density: float,
    kept_at: Callable[[float], float],
    schedule: Piecewise,
    rounds: int,
    p_max: float,
) -> float:
    """FedLayerPrune: the p_base with which a client keeps ``density``, averaged over the rounds.

    Args:
        density: The kept share of the prunable weights. One that the cap does not allow is refused.
        kept_at: That share in a round where p_base times beta is what it is called with.
        schedule: How the rates grow.
        rounds: The number of rounds.
        p_max: The cap, for the refusal.
    """

    # Most rounds share their factor with others: the level parts of the schedule.
    factors = Counter(schedule(t, rounds) for t in range(rounds))

    def kept(p_base: float) -> float:
        total = 0.0
        for factor, count in factors.items():
            total += count * kept_at(p_base * factor)
        return total / rounds

    # So high a base that every layer which is pruned at all is at the cap in every round.
    highest = 1e6
    least = kept(highest)
    check(
        density >= least - 1e-9,
        "density",
        density,
        f"{least:.3g} or more with p_max {p_max:g}: no layer loses more than that",
    )
    low = 0.0
    high = highest
    # Bisection: what is kept falls as the base rises. 60 halvings leave 1e-12 of 1e6.
    for _ in range(60):
        middle = (low + high) / 2
        if kept(middle) > density:
            low = middle
        else:
            high = middle
    return high


def proportion_of(info: ClientInfo, typical: ClientInfo, least: float = 0.25) -> float:
    r"""FedLayerPrune: a device compared with the typical one: :math:`\min(1, b_k / b, s_k / s)`.

    :math:`b` bandwidths, :math:`s` speeds; never below ``least``.

    >>> typical = ClientInfo(examples=1, bandwidth=40.0, speed=1.0)
    >>> proportion_of(ClientInfo(examples=1, bandwidth=20.0, speed=2.0), typical)
    0.5
    """
    proportion = min(1.0, info.bandwidth / typical.bandwidth, info.speed / typical.speed)
    return max(proportion, least)


def rate_of_device(p: float, proportion: float) -> float:
    r"""FedLayerPrune: a rate for one device (ours; the paper names it as future work).

    A weaker device keeps less in proportion: :math:`1 - p_k = (1 - p)\,\text{proportion}`. A rate
    of 1 or more, which only the cap of a layer holds back, stays as it is.

    >>> rate_of_device(0.5, 0.5)
    0.75
    """
    if p >= 1:
        return p
    return 1 - (1 - p) * proportion


@dataclass(frozen=True)
class Piecewise:
    r"""FedLayerPrune's factor of all layers' rates (Eq. 7): level, a ramp, level again.

    :math:`\beta_t = 1` while :math:`t/T < a`; :math:`1 + h\,(t/T - a)/(b - a)` up to :math:`b`;
    :math:`1 + h` behind it. :math:`t` -> rounds completed, :math:`T` -> ``rounds``, :math:`a` ->
    ``begin``, :math:`b` -> ``end``, :math:`h` -> ``rise``. Without a rise it is always 1.

    >>> [Piecewise()(t, 100) for t in (0, 30, 55, 80, 99)]
    [1.0, 1.0, 1.25, 1.5, 1.5]
    """

    begin: float = 0.3
    end: float = 0.8
    rise: float = 0.5

    def __post_init__(self) -> None:
        given = (self.begin, self.end)
        in_order = 0 <= self.begin < self.end <= 1
        check(in_order, "begin and end of the schedule", given, "0 <= begin < end <= 1")
        check(self.rise >= 0, "rise", self.rise, "0 or more")

    def __call__(self, t: int, rounds: int) -> float:
        """The factor in the round after ``t`` completed ones."""
        progress = t / rounds
        along_the_ramp = (progress - self.begin) / (self.end - self.begin)
        return 1 + self.rise * min(max(along_the_ramp, 0.0), 1.0)
