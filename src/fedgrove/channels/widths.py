"""Choosing the widest model for a device: the largest share of channels for memory and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core import ClientInfo
from ..errors import InputError, check
from ..nets import Net
from ..renamed import find_old_names
from .find_groups import require_groups
from .groups import Channels
from .selection import select_first
from .shrink import cut_channels


@dataclass(frozen=True)
class Width:
    """What a net needs with a share of the channels of every group."""

    share: float
    memory: int
    """Bytes of one training step, by :meth:`fedgrove.nets.layout.Layout.memory`."""
    macs: int


def measure_widths(
    net: Net, batch: int = 32, optimiser_slots: int = 1, steps: int = 8
) -> tuple[Width, ...]:
    """Measure a training step with ``1/steps`` up to all of every group's channels."""
    check(steps >= 1, "steps", steps, "1 or more")
    groups = require_groups(net)
    options: list[Width] = []
    for i in range(1, steps + 1):
        share = i / steps
        small = cut_channels(net, select_first(groups, share)).net.layout
        options.append(Width(share, small.memory(batch, optimiser_slots), small.macs))
    return tuple(options)


def choose_width(info: ClientInfo, options: Sequence[Width]) -> float:
    """Choose the largest share of channels whose training step fits the device.

    It must fit the memory and be fast enough.

    Fast enough: it takes no longer than the whole net takes on a device of speed 1, so
    macs ≤ speed · macs of the whole. If none is, the smallest share that fits the memory.

    >>> whole = [Width(0.5, 100, 30), Width(1.0, 300, 100)]
    >>> devices = [(1, 999), (1, 200), (0.5, 1 << 30)]
    >>> [choose_width(ClientInfo(9, speed=v, memory=m), whole) for v, m in devices]
    [1.0, 0.5, 0.5]
    """
    fitting = []
    for option in options:
        if option.memory <= info.memory:
            fitting.append(option)
    if not fitting:
        least = min(option.memory for option in options)
        raise InputError(
            f"a device has {info.memory} bytes of memory and the narrowest net needs {least}; use "
            "a smaller net."
        )
    most_macs = info.speed * max(option.macs for option in options)
    fast_enough = []
    for option in fitting:
        if option.macs <= most_macs:
            fast_enough.append(option)
    if fast_enough:
        return max(option.share for option in fast_enough)
    return min(option.share for option in fitting)


def choose_largest_that_fits(
    info: ClientInfo,
    net: Net,
    choose: Callable[[float], Channels],
    most: float,
    batch: int = 32,
    optimiser_slots: int = 1,
    steps: int = 32,
) -> Channels:
    """Return the channels of the largest density whose training step fits the device.

    Args:
        info: The device.
        net: The network in full width.
        choose: Selects the channels of a density.
        most: The largest density to try.
        batch: Examples of a training step.
        optimiser_slots: Numbers that the optimiser stores per parameter.
        steps: Densities are multiples of 1/``steps``.

    Returns:
        Channels that fit as in :func:`choose_width`; if none do, those of the smallest density.
    """

    def fits(channels: Channels) -> bool:
        small = cut_channels(net, channels).net.layout
        # The same two conditions as in choose_width, for channels that are not the first ones.
        in_memory = small.memory(batch, optimiser_slots) <= info.memory
        in_time = small.macs <= info.speed * net.layout.macs
        return in_memory and in_time

    channels = choose(most)
    if fits(channels):
        return channels
    # Bisection: a smaller density never needs more. `low` fits (or is 1), `high` does not.
    low = 1
    high = math.ceil(most * steps)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(choose(middle / steps)):
            low = middle
        else:
            high = middle
    return choose(low / steps)


__getattr__ = find_old_names(__name__)
