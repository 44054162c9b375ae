"""Choosing a number by trial: an upper confidence bound over intervals that get finer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...errors import check

Plays = Sequence[tuple[float, float]]
"""What was played and what it gained, the latest last."""


@dataclass(frozen=True)
class EUCB:
    r"""E-UCB (FedMP, Jiang et al. 2022): discounted UCB over the leaves of a growing tree.

    The numbers are divided into intervals. Interval :math:`P`, after the plays :math:`s = 1..k`
    with rewards :math:`r_s`::

        N(P)  = sum over plays in P of lambda^(k - s)
        R(P)  = sum over plays in P of lambda^(k - s) r_s / N(P)
        U(P)  = R(P) / R + c sqrt(2 log N / N(P)),  R and N those of all plays together

    :math:`\lambda` -> ``discount``, :math:`c` -> ``explore``. A number is drawn from the interval
    of largest :math:`U`, the lowest of equal ones; one without plays comes first. Then the interval
    is divided there, unless it is as short as ``finest``. Differs from the paper: rewards are
    divided by their mean, so that neither units nor a loss that falls ever more slowly decide how
    much is explored; and c is there.

    >>> EUCB()((0.0, 0.4, 0.8), [(0.1, 2.0)], draw=0.5)
    0.6000000000000001
    >>> EUCB().split((0.0, 0.8), 0.6)
    (0.0, 0.6, 0.8)
    """

    discount: float = 0.99
    finest: float = 0.1
    explore: float = 0.25
    """How much an interval that was seldom played counts; 1 in the paper."""

    def __post_init__(self) -> None:
        check(0 < self.discount <= 1, "discount", self.discount, "in (0, 1]")
        check(self.explore >= 0, "explore", self.explore, "0 or more")
        check(self.finest > 0, "finest", self.finest, "above 0")

    @property
    def remembered(self) -> int:
        """How many plays still count: older ones weigh less than a millionth, or 10,000 at most."""
        if self.discount == 1:
            return 10_000
        return min(10_000, math.ceil(math.log(1e-6) / math.log(self.discount)))

    def __call__(self, edges: Sequence[float], plays: Plays, draw: float) -> float:
        """The next number to play; ``draw`` in [0, 1) is its place in its interval."""
        chosen = (edges[0], edges[-1])
        best = -math.inf
        for interval, bound in self.bounds(edges, plays).items():
            if bound > best:
                best = bound
                chosen = interval
        low, high = chosen
        return low + draw * (high - low)

    def bounds(self, edges: Sequence[float], plays: Plays) -> dict[tuple[float, float], float]:
        """U of every interval: [low, high), or [low, high] for the last one."""
        weights = [self.discount**age for age in reversed(range(len(plays)))]
        total = sum(weights)
        gained = sum(weight * reward for (_, reward), weight in zip(plays, weights, strict=True))
        # If nothing was gained there is nothing to divide by.
        mean = gained / total if gained else 1.0
        found = {}
        for low, high in pairwise(edges):
            count = 0.0
            gain = 0.0
            for (number, reward), weight in zip(plays, weights, strict=True):
                if low <= number < high or number == high == edges[-1]:
                    count += weight
                    gain += weight * reward
            bound = math.inf
            if count:
                seldom = math.sqrt(2 * math.log(total) / count)
                bound = gain / count / mean + self.explore * seldom
            found[low, high] = bound
        return found

    def split(self, edges: Sequence[float], played: float) -> tuple[float, ...]:
        """The edges after a play: one more, unless its interval is short or ends there."""
        for low, high in pairwise(edges):
            is_inside = low < played < high
            if is_inside and high - low > self.finest:
                return tuple(sorted((*edges, played)))
        return tuple(edges)
