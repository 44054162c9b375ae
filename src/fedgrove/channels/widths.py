"""How wide a model a device can hold: the largest share of channels that fits memory and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core import ClientInfo
from ..errors import InputError, check
from ..nets import Net
from .choice import nested
from .find import removable_groups
from .groups import Channels
from .shrink import cut


@dataclass(frozen=True)
class Width:
    """What a net needs with a share of the channels of every group."""

    share: float
    memory: int
    """Bytes of one training step, by :meth:`fedgrove.nets.layout.Layout.memory`."""
    macs: int


def widths(
    net: Net, batch: int = 32, optimiser_slots: int = 1, steps: int = 8
) -> tuple[Width, ...]:
    """What a training step needs in each of ``steps`` widths, 1/steps up to 1."""
    check(steps >= 1, "steps", steps, "1 or more")
    groups = removable_groups(net)
    options: list[Width] = []
    for i in range(1, steps + 1):
        share = i / steps
        small = cut(net, nested(groups, share)).net.layout
        options.append(Width(share, small.memory(batch, optimiser_slots), small.macs))
    return tuple(options)


def width_for(info: ClientInfo, options: Sequence[Width]) -> float:
    """The largest share whose training step fits the device's memory and is fast enough.

    Fast enough: it takes no longer than the whole net takes a device of speed 1, so
    macs ≤ speed · macs of the whole. If none is, the smallest share that fits the memory.

    >>> whole = [Width(0.5, 100, 30), Width(1.0, 300, 100)]
    >>> devices = [(1, 999), (1, 200), (0.5, 1 << 30)]
    >>> [width_for(ClientInfo(9, speed=v, memory=m), whole) for v, m in devices]
    [1.0, 0.5, 0.5]
    """
    fitting = [option for option in options if option.memory <= info.memory]
    if not fitting:
        least = min(option.memory for option in options)
        raise InputError(
            f"a device has {info.memory} bytes of memory and the narrowest net needs {least}; "
            "take a smaller net."
        )
    most_macs = info.speed * max(option.macs for option in options)
    fast_enough = [option for option in fitting if option.macs <= most_macs]
    if fast_enough:
        return max(option.share for option in fast_enough)
    return min(option.share for option in fitting)


def largest_that_fits(
    info: ClientInfo,
    net: Net,
    choose: Callable[[float], Channels],
    most: float,
    batch: int = 32,
    optimiser_slots: int = 1,
    steps: int = 32,
) -> Channels:
    """What ``choose`` keeps at the largest density whose training step fits the device.

    Densities are multiples of 1/``steps``, and at most ``most``; a step fits as in
    :func:`width_for`. If none fits, what ``choose`` keeps at the smallest density.
    """

    def fits(channels: Channels) -> bool:
        small = cut(net, channels).net.layout
        in_memory = small.memory(batch, optimiser_slots) <= info.memory
        in_time = small.macs <= info.speed * net.layout.macs
        return in_memory and in_time

    channels = choose(most)
    if fits(channels):
        return channels
    # Bisection: a smaller density never needs more. `low` fits (or is the least there is),
    # `high` does not.
    low = 1
    high = math.ceil(most * steps)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(choose(middle / steps)):
            low = middle
        else:
            high = middle
    return choose(low / steps)
