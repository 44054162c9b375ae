"""How wide a model a device can hold: the largest share of channels that fits its memory and its speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core import Info
from ..errors import InputError, check
from ..nets import Net
from ..nets.layout import Layout
from .choice import nested
from .groups import Channels
from .shrink import cut


@dataclass(frozen=True)
class Width:
    """A net with a share of the channels of every group: what it needs."""

    share: float
    memory: int
    """Bytes of one training step, by :meth:`fedgrove.nets.layout.Layout.memory`."""
    macs: int


def widths(
    layout: Layout, batch: int = 32, optimiser_slots: int = 1, steps: int = 8
) -> tuple[Width, ...]:
    """The net in ``steps`` widths, 1/steps up to 1: what a training step of each really needs. Found once per run."""
    check(steps >= 1, "steps", steps, "1 or more")
    if layout.source is None or not layout.groups:
        raise InputError(
            "this net has no channels that can be removed, so it has one width; use a net with hidden layers."
        )
    net = Net(*layout.source)
    shares = [i / steps for i in range(1, steps + 1)]
    small = [cut(net, nested(layout.groups, share)).net.layout for share in shares]
    return tuple(
        Width(s, m.memory(batch, optimiser_slots), m.macs)
        for s, m in zip(shares, small, strict=True)
    )


def width_for(info: Info, options: Sequence[Width]) -> float:
    """The largest share whose training step fits the device's memory and takes it no longer than the whole net takes a
    device of speed 1: macs ≤ speed · macs of the whole. The smallest, where none does it in time.

    >>> whole = [Width(0.5, 100, 30), Width(1.0, 300, 100)]
    >>> [width_for(Info(9, speed=speed, memory=memory), whole) for speed, memory in ((1, 999), (1, 200), (0.5, 999))]
    [1.0, 0.5, 0.5]
    """
    fitting = [w for w in options if w.memory <= info.memory]
    if not fitting:
        least = min(w.memory for w in options)
        raise InputError(
            f"a device has {info.memory} bytes of memory and the narrowest net needs {least}; take a smaller net."
        )
    most = info.speed * max(w.macs for w in options)
    quick = [w for w in fitting if w.macs <= most]
    return max(w.share for w in quick) if quick else min(w.share for w in fitting)


def largest_that_fits(
    info: Info,
    layout: Layout,
    choose: Callable[[float], Channels],
    most: float,
    batch: int = 32,
    optimiser_slots: int = 1,
    steps: int = 32,
) -> Channels:
    """What ``choose`` keeps at the largest density, in ``steps`` steps and at most ``most``, whose training step fits
    the device as in :func:`width_for`; what it keeps at the smallest, where none does."""
    assert layout.source is not None
    net = Net(*layout.source)

    def fits(channels: Channels) -> bool:
        small = cut(net, channels).net.layout
        return (
            small.memory(batch, optimiser_slots) <= info.memory
            and small.macs <= info.speed * layout.macs
        )

    if fits(found := choose(most)):
        return found
    low, high = 1, math.ceil(most * steps)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(choose(middle / steps)) else (low, middle)
    return choose(low / steps)
