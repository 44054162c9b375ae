"""Axes of figures: where ticks stand, what they say, and where a value comes to lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""What people count in, times a power of ten."""
TINY = 1e-100
"""What is smaller is drawn as zero: such numbers cannot be counted with."""
LETTER = 6.6
"""The mean width of a letter in figures, in their units; their text is 12 units high."""


@dataclass(frozen=True)
class Axis:
    """A stretch of numbers with ticks; ``is_log``: equal ratios are equally far apart."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def at(self, value: float, start: float, end: float) -> float:
        """Where a value lies when the axis goes from ``start`` to ``end``.

        >>> Axis(0, 10, ()).at(2.5, 100, 200)
        125.0
        >>> Axis(1, 100, (), is_log=True).at(10, 0, 50)
        25.0
        """
        if self.is_log:
            # What is not above zero has no place on such an axis: it lies at its beginning.
            value = max(value, self.low)
            # Of each by itself: a ratio of very unlike numbers has no end.
            first = math.log(self.low)
            share = (math.log(value) - first) / (math.log(self.high) - first)
        else:
            share = (value - self.low) / (self.high - self.low)
        return start + share * (end - start)

    def labels(self) -> list[str]:
        """What the ticks say: all with as many digits as the closest two need."""
        if self.is_log or len(self.ticks) < 2:
            return [short(tick) for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0]
        # Not of the step's own logarithm: 2.5 needs a digit more than 2.
        digits = 0
        while digits < 9 and abs(round(step, digits) - step) > 1e-6 * step:
            digits += 1
        if digits > 6 or max(abs(tick) for tick in self.ticks) >= 1e6:
            labels = [short(tick) for tick in self.ticks]
            # Large numbers that lie close together need all their digits.
            if len(set(labels)) == len(labels):
                return labels
        if digits == 9:
            return [f"{tick:.12g}" for tick in self.ticks]
        return [f"{tick:,.{digits}f}" for tick in self.ticks]


def short(value: float) -> str:
    """A number of any size in few letters.

    >>> short(1500000), short(20000), short(0.25), short(0.00004)
    ('1.5M', '20,000', '0.25', '4e-05')
    """
    if abs(value) >= 1e9:
        return f"{value / 1e9:g}G"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:g}"


def axis_of(
    values: Iterable[float | None],
    *,
    from_zero: bool = False,
    log: bool = False,
    count: int = 5,
    within: tuple[float | None, float | None] = (None, None),
) -> Axis:
    """The axis of some values, ending at ticks; ``within`` are ends it does not go beyond.

    A logarithmic one needs values above zero that are far apart; otherwise it is a plain one.

    >>> axis_of([0.12, 0.57]).ticks
    (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    >>> axis_of([3, 3], from_zero=True).ticks
    (0.0, 1.0, 2.0, 3.0)
    >>> axis_of([97], within=(0, 100)).high
    100.0
    >>> axis_of([2, 900], log=True).ticks
    (1.0, 10.0, 100.0, 1000.0)
    """
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if from_zero or not known:
        known.append(0.0)
    low = min(known)
    high = max(known)
    if log and low > 0 and high / low >= 30:
        return _log_axis(low, high)
    largest = max(abs(low), abs(high))
    if largest < TINY:
        low = 0.0
        high = 0.0
    if high - low <= 1e-9 * largest:
        # One value only, as far as ticks can tell: any room will do but none.
        room = abs(high) / 2 or 0.5
        high += 0 if from_zero and high > 0 else room
        low -= 0 if from_zero else room
        if from_zero:
            low = min(low, 0.0)
        # The room is not a value: no percent above a hundred.
        least, most = within
        if least is not None and known[0] >= least:
            low = max(low, least)
        if most is not None and known[0] <= most:
            high = min(high, most)
    step = _step(high - low, count)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    least, most = within
    ticks = []
    for i in range(first, last + 1):
        # Rounded, or the third of a tenth would be 0.30000000000000004.
        ticks.append(float(f"{i * step:.12g}"))
    if least is not None:
        ticks = [tick for tick in ticks if tick >= least - 1e-9 * step] or ticks
    if most is not None:
        ticks = [tick for tick in ticks if tick <= most + 1e-9 * step] or ticks
    return Axis(min(ticks[0], low), max(ticks[-1], high), tuple(ticks))


def _step(span: float, count: int) -> float:
    """The distance of ticks so that there are about ``count``."""
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    for step in STEPS:
        if step * power >= rough * (1 - 1e-9):
            return step * power
    return 10 * power


def _log_axis(low: float, high: float) -> Axis:
    first = math.floor(math.log10(low) + 1e-9)
    last = math.ceil(math.log10(high) - 1e-9)
    powers = [10.0**i for i in range(first, last + 1)]
    # Of many powers some are left out: a tick for every second one, every third, ...
    ticks = powers[:: math.ceil(len(powers) / 8)]
    if len(powers) <= 3:
        ticks = sorted([*powers, *(3 * power for power in powers[:-1])])
    return Axis(powers[0], powers[-1], tuple(ticks), is_log=True)


def width_of(texts: Sequence[str]) -> float:
    """About how wide the longest of some texts is."""
    return LETTER * max((len(text) for text in texts), default=0)


def cut(text: str, letters: int) -> str:
    """A text of at most so many letters; what is left out is marked.

    >>> cut("fedavg-local.lr=0.01", 10)
    'fedavg-lo…'
    """
    return text if len(text) <= letters else text[: letters - 1] + "…"
