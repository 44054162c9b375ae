"""When and how much to prune: ``Schedule`` of a phase of rounds."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import check


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
    than can beside the deficit, and where the first density is below the target (its Fig. 2) the
    deficit is regrown instead of pruned.
    """

    every: int = 5
    rate: float = 0.05

    def __post_init__(self) -> None:
        check(self.every >= 1, "every", self.every, "1 or more rounds")
        check(0 <= self.rate <= 1, "churn", self.rate, "in [0, 1]")

    def steps(self, rounds: int) -> range:
        """The rounds, counted from 1, before which a step stands.

        >>> list(Churn(every=5).steps(12))
        [5, 10]
        """
        return range(self.every, rounds + 1, self.every)

    def left(self, t: int, rounds: int) -> int:
        """R: the steps over which the deficit is shared out.

        >>> [Churn(every=5).left(t, 15) for t in (5, 10, 15)]
        [2, 1, 1]
        """
        return max(1, (rounds - t) // self.every)

    def sizes(self, t: int, rounds: int, active: int, target: int, total: int) -> tuple[int, int]:
        """How many weights to prune and to regrow before round ``t``.

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


def stepwise(density: float, step: float = 0.1) -> tuple[float, ...]:
    r"""SAFL's schedule: densities :math:`1, 1 - s, 1 - 2s, \dots`, the target the last of them.

    (Its pruning rates, 0, .1, .2, ... up to the target, section IV.C.) :math:`s` -> ``step``.

    >>> stepwise(0.7), stepwise(0.35)[-2:]
    ((1.0, 0.9, 0.8, 0.7), (0.4, 0.35))
    """
    check(0 < density <= 1, "density", density, "in (0, 1]")
    check(0 < step <= 1, "step", step, "in (0, 1]")
    # (1 - 0.9) / 0.1 is a little less than 1 in floating point, and still one whole step.
    whole_steps = int((1 - density) / step + 1e-9)
    densities = [round(1 - i * step, 6) for i in range(whole_steps + 1)]
    if densities[-1] > density + 1e-6:
        densities.append(density)
    return tuple(densities)


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
