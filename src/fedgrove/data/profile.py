"""Named device profiles: bandwidth (Mbit/s), relative speed and memory (bytes) of every client."""

from __future__ import annotations

from ..core import ClientInfo
from ..errors import unknown
from ..seeds import numpy_rng

NAMES = ("adfedwcp", "phones", "uniform")

# An old phone, a common one, a new one.
TIERS = (
    (0.3, 5.0, 0.25, 1 << 28),
    (0.4, 20.0, 0.5, 1 << 30),
    (0.3, 100.0, 1.0, 1 << 32),
)
"""Share of clients, bandwidth, speed and memory of each tier: round numbers of ours, no survey."""


def info(profile: str, examples: int, client: int, seed: int) -> ClientInfo:
    """The device of one client; it depends on the seed and the client alone.

    `uniform`: all equal. `adfedwcp`: bandwidth ~ N(52.5, 15.83²), rounded, clipped to 5..100.
    `phones`: three tiers.

    >>> info("uniform", 7, client=0, seed=0)
    ClientInfo(examples=7, bandwidth=52.5, speed=1.0, memory=1073741824, task='', downlink=None)
    """
    rng = numpy_rng(seed, "profile", client)
    match profile:
        case "uniform":
            return ClientInfo(examples)
        case "adfedwcp":
            drawn = round(rng.normal(52.5, 15.83))
            return ClientInfo(examples, bandwidth=float(min(max(drawn, 5), 100)))
        case "phones":
            tier = rng.choice(len(TIERS), p=[share for share, *_ in TIERS])
            _, bandwidth, speed, memory = TIERS[tier]
            return ClientInfo(examples, bandwidth, speed, memory)
    raise unknown("profile", profile, NAMES)
