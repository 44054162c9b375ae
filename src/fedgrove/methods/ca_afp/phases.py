"""When CA-AFP does what: the phases of Alg. 1, and the pruning steps of the third."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ...errors import check


@dataclass(frozen=True)
class Churn:
    r"""CA-AFP's deficit and churn (its Alg. 1, lines 44-53): steps towards a target density.

    Round t = 1..P of the phase; a step stands before the broadcast of every round that f divides::

        R         = max(1, floor((P - t) / f))        steps that are left     -> left
        N_deficit = (N_active - N_target) / R          density still to go
        N_churn   = rho N_active                       pruned and regrown
        prune N_churn + N_deficit, regrow N_churn                              -> sizes

    f -> ``every``, rho -> ``rate``. Numbers are rounded to whole weights; the deficit is counted
    from the weights in use, so that the target is met to the weight at the last step. Differs from
    the paper: R is at least 1 (its last steps would divide by 0), no more weights change places
    than can next to the deficit, and where the first density is below the target (its Fig. 2) the
    deficit is regrown instead of pruned.
    """

    every: int = 5
    rate: float = 0.05

    def __post_init__(self) -> None:
        check(self.every >= 1, "every", self.every, "1 or more rounds")
        check(0 <= self.rate <= 1, "churn", self.rate, "in [0, 1]")

    def steps(self, rounds: int) -> range:
        """CA-AFP: the rounds, counted from 1, before which there is a pruning step.

        >>> list(Churn(every=5).steps(12))
        [5, 10]
        """
        return range(self.every, rounds + 1, self.every)

    def left(self, t: int, rounds: int) -> int:
        """CA-AFP: R: the steps over which the deficit is shared out.

        >>> [Churn(every=5).left(t, 15) for t in (5, 10, 15)]
        [2, 1, 1]
        """
        return max(1, (rounds - t) // self.every)

    def sizes(self, t: int, rounds: int, active: int, target: int, total: int) -> tuple[int, int]:
        """CA-AFP: how many weights to prune and to regrow before round ``t``.

        A density that is to rise is regrown. Here churn is 7, and the deficit (70 - 30) / 2:

        >>> Churn(every=5, rate=0.1).sizes(5, 15, active=70, target=30, total=100)
        (27, 7)
        """
        deficit = round((active - target) / self.left(t, rounds))
        after = active - deficit
        # The deficit comes first, and neither side may run out: churn + deficit are pruned from
        # the active weights, so churn is at most ``after``; what regrows goes to places that were
        # free before the step, not to those just pruned.
        churn = min(round(self.rate * active), after, total - max(active, after))
        # A negative deficit is a density below the target: it is regrown.
        pruned = churn + max(deficit, 0)
        regrown = churn + max(-deficit, 0)
        return pruned, regrown


Phases = tuple[int, int, int] | tuple[float, float, float]
"""Rounds of warm-up, stabilisation and pruning, or shares of the rounds.

Two types, so that rounds that are typed or read from config.toml stay whole numbers.
"""


class Phase(Enum):
    """The phases of Alg. 1."""

    WARM_UP = 1
    STABILISE = 2
    PRUNE = 3
    PERSONAL = 4
    """After the last round; runs do it by ``--finetune``."""


@dataclass(frozen=True)
class Clock:
    """Where in Alg. 1 the next round stands.

    >>> clock = Clock(6, phases=(2, 3, 10), schedule=Churn(every=5))
    >>> clock.phase, clock.prune_round, clock.step_is_due, clock.next_step
    (<Phase.PRUNE: 3>, 2, False, 5)
    """

    round: int
    """Rounds completed."""
    phases: tuple[int, int, int]
    schedule: Churn

    @property
    def phase(self) -> Phase:
        """CA-AFP: the phase of the next round."""
        warm_up, stabilise, pruning = self.phases
        if self.round < warm_up:
            return Phase.WARM_UP
        if self.round < warm_up + stabilise:
            return Phase.STABILISE
        if self.round < warm_up + stabilise + pruning:
            return Phase.PRUNE
        return Phase.PERSONAL

    @property
    def prune_round(self) -> int:
        """CA-AFP: the paper's t of phase 3, counted from 1; 0 or less before phase 3."""
        warm_up, stabilise, _ = self.phases
        return self.round - (warm_up + stabilise) + 1

    @property
    def rounds_until_prune(self) -> int:
        """CA-AFP: rounds left before phase 3, the next one included."""
        return 1 - self.prune_round

    @property
    def steps(self) -> list[int]:
        """CA-AFP: the t of phase 3 with a pruning step before the broadcast."""
        pruning = self.phases[2]
        if pruning == 0:
            return []
        # The first mask is made before round 1, whether f divides 1 or not.
        return sorted({1, *self.schedule.steps(pruning)})

    @property
    def step_is_due(self) -> bool:
        """CA-AFP: whether there is a pruning step before the next round."""
        return self.prune_round in self.steps

    @property
    def next_step(self) -> int | None:
        """CA-AFP: the pruning step that uses the next round's reports; None if none is left."""
        for step in self.steps:
            # A step before the next round itself is over by the time the round's reports arrive.
            if step > self.prune_round:
                return step
        return None


def are_phases(phases: Phases | None) -> bool:
    """CA-AFP: whether these are three lengths: whole rounds, or shares that sum to 1."""
    # None comes from configurations of before: it used to mean no warm-up.
    if phases is None or len(phases) != 3 or min(phases) < 0:
        return False
    all_whole = all(float(length).is_integer() for length in phases)
    return all_whole or are_shares(phases)


def are_shares(phases: Phases) -> bool:
    """CA-AFP: whether phases are shares of the rounds."""
    # Not exactly 1: 0.7 + 0.2 + 0.1 is 0.9999999999999999. Whole rounds that sum to 1 are those of
    # a run of one round, where shares mean the same.
    return math.isclose(sum(phases), 1)


def phase_lengths(phases: Phases, rounds: int) -> tuple[int, int, int]:
    """CA-AFP: the phases of a run of ``rounds`` rounds, in rounds.

    Of shares, the ends of the first two phases are rounded down and the third takes the rest: the
    sum is exact, and however short a run is, it prunes if it is meant to.
    """
    warm_up, stabilise, pruning = phases
    lengths = (int(warm_up), int(stabilise), int(pruning))
    if are_shares(phases):
        end_of_warm_up = _round_down(warm_up * rounds)
        end_of_stabilise = _round_down((warm_up + stabilise) * rounds)
        lengths = (end_of_warm_up, end_of_stabilise - end_of_warm_up, rounds - end_of_stabilise)
    check(
        sum(lengths) == rounds,
        "phases",
        lengths,
        f"three numbers that sum to the rounds, {rounds}, or shares of them that sum to 1",
    )
    return lengths


def _round_down(length: float) -> int:
    # 0.29 * 100 is 28.999999999999996, and still 29 rounds.
    return math.floor(length + 1e-9)
