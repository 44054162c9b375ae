r"""How many centroids each layer of each client gets (AdFedWCP, section 4.4).

The server minimises the time all clients need to send their clustered models,

.. math:: \sum_i \sum_j (C\,k_{ij} + W_j \log_2 k_{ij} + C\,B_j) / b_i,
          \qquad k^{lower}_{ij} \le k_{ij} \le k^{upper}_{ij}

The sum grows with every k, so its least is at the lower bound; where the bounds cross, the upper
one applies, since bandwidth is a hard limit: :math:`k = \min(k^{lower}, k^{upper})`. The paper's
Adam on the server lands there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core import ClientInfo
from ...errors import check


@dataclass(frozen=True)
class Progress:
    """Where a run stands: rounds completed of all, and how the mean accuracy changed."""

    round: int
    rounds: int
    change: float = 0.0


@dataclass(frozen=True)
class Adaptive:
    r"""Centroids by a layer's importance, a client's data and its bandwidth.

    .. math::
        k^{data} &= k_{min} + \lceil \alpha\,\omega_{ij}\,(D_i - D_{min}) \rceil, \quad
            \alpha = (k_{max} - k_{min}) / (D_{max} - D_{min}) \\
        k^{lower} &= \mathrm{clip}(\lceil k^{data}\,\gamma\,\eta \rceil, k_{min}, k_{max}), \quad
            \gamma = 1 + t/T, \quad \eta = 1 - \xi|\Delta A|
            \text{ if accuracy rose, else } 1 + \zeta|\Delta A| \\
        k^{upper} &= \max(k_{min}, k_{max} - \lceil \beta\,(1 - \omega_{ij})\,(B_{max} - b_i)
            \rceil), \quad \beta = (k_{max} - k_{min}) / (B_{max} - B_{min})

    :math:`\omega_{ij}` -> ``omega``, :math:`D_i` -> ``ClientInfo.examples`` between ``fewest`` and
    ``most`` of all clients, :math:`b_i` -> ``ClientInfo.bandwidth``; :math:`B_{min}, B_{max}` ->
    ``slow``, ``fast``, the ends of the range (Mbit/s), not the clients' own extremes.

    Ours, off by default: ``memory`` and ``speed`` bound k in the same form, by
    ``ClientInfo.memory`` between ``little`` and ``plenty`` bytes and by ``ClientInfo.speed``
    between ``weak`` and ``strong``. The least of all upper bounds applies.
    """

    k_min: int = 5
    k_max: int = 32
    xi: float = 0.1
    zeta: float = 1.5
    slow: float = 5.0
    fast: float = 100.0
    lower: bool = True
    """Whether the lower bound applies; without it every layer gets k_min (the paper's Table 11)."""
    upper: bool = True
    """Whether bandwidth limits k."""
    memory: bool = False
    """Whether the device's memory limits k too."""
    little: int = 1 << 28
    plenty: int = 1 << 32
    speed: bool = False
    """Whether the device's speed limits k too."""
    weak: float = 0.25
    strong: float = 1.0
    follow_trace: bool = True
    """Whether b is the bandwidth at the start of each exchange (ours), if the run has a trace;
    False: the bandwidth before the first round, as the paper assumes."""

    def __post_init__(self) -> None:
        check(2 <= self.k_min <= 256, "k_min", self.k_min, "in 2..256")
        check(self.k_min <= self.k_max <= 256, "k_max", self.k_max, f"in {self.k_min} (k_min)..256")
        check(self.xi >= 0, "xi", self.xi, "0 or more")
        check(self.zeta >= 0, "zeta", self.zeta, "0 or more")
        check(0 < self.slow < self.fast, "slow and fast", (self.slow, self.fast), "0 < slow < fast")
        memories = (self.little, self.plenty)
        check(0 < self.little < self.plenty, "little and plenty", memories, "0 < little < plenty")
        speeds = (self.weak, self.strong)
        check(0 < self.weak < self.strong, "weak and strong", speeds, "0 < weak < strong")

    def __call__(
        self, omega: float, info: ClientInfo, fewest: int, most: int, progress: Progress
    ) -> int:
        """The number of centroids of one layer of one client."""
        # The objective rises with k, so its minimum under both bounds is the lower one. Where the
        # bounds cross, the upper one wins: bandwidth is a hard limit.
        low = self.least(omega, info.examples, fewest, most, progress) if self.lower else self.k_min
        return min(low, *self.limits(omega, info))

    def least(self, omega: float, examples: int, fewest: int, most: int, progress: Progress) -> int:
        """AdFedWCP: the fewest centroids that importance, data and progress require.

        >>> Adaptive().least(0.5, 300, fewest=100, most=500, progress=Progress(50, 100))
        18
        """
        # Clients of equal size: no client has more than the fewest, and nothing is divided by 0.
        alpha = 0.0 if most == fewest else (self.k_max - self.k_min) / (most - fewest)
        by_data = self.k_min + _up(alpha * omega * (examples - fewest))
        gamma = 1 + progress.round / progress.rounds
        # Asymmetric in the paper: a fall of accuracy raises k more than a rise lowers it.
        if progress.change > 0:
            eta = 1 - self.xi * progress.change
        else:
            eta = 1 + self.zeta * abs(progress.change)
        return min(max(_up(by_data * gamma * eta), self.k_min), self.k_max)

    def limits(self, omega: float, info: ClientInfo) -> list[int]:
        """AdFedWCP: the upper bounds on a client's centroids; k_max is always one of them.

        >>> Adaptive(memory=True).limits(0.5, ClientInfo(100, bandwidth=5.0, memory=1 << 32))
        [32, 18, 32]
        """
        bounds = [self.k_max]
        if self.upper:
            bounds.append(self.limit(omega, info.bandwidth, self.slow, self.fast))
        if self.memory:
            bounds.append(self.limit(omega, info.memory, self.little, self.plenty))
        if self.speed:
            bounds.append(self.limit(omega, info.speed, self.weak, self.strong))
        return bounds

    def limit(self, omega: float, has: float, least: float, most: float) -> int:
        """AdFedWCP: the most centroids for a client that has ``has`` of a resource.

        ``least`` and ``most`` are the bounds of the resource.

        >>> Adaptive().limit(0.5, 100.0, 5.0, 100.0), Adaptive().limit(0.5, 5.0, 5.0, 100.0)
        (32, 18)
        """
        beta = (self.k_max - self.k_min) / (most - least)
        return max(self.k_min, self.k_max - _up(beta * (1 - omega) * (most - has)))


@dataclass(frozen=True)
class Fixed:
    """The same number of centroids in every layer of every client; 0: nothing is clustered."""

    k: int = 16

    def __post_init__(self) -> None:
        check(self.k == 0 or 2 <= self.k <= 256, "k", self.k, "0 (no clustering), or in 2..256")

    @property
    def k_max(self) -> int:
        """AdFedWCP: the largest number of centroids of any layer."""
        return self.k

    def __call__(
        self, omega: float, info: ClientInfo, fewest: int, most: int, progress: Progress
    ) -> int:
        """Always ``k``."""
        return self.k


def _up(number: float) -> int:
    """The next whole number; one that is a whole number but for rounding is that."""
    # Products of shares and counts miss whole numbers by a last bit; the tolerance is far above it.
    return math.ceil(number - 1e-9)


def clustered_bits(weights: int, biases: int, k: int) -> int:
    """AdFedWCP: a layer's bits in the paper: k centroids of 32, log2 k per weight, and biases.

    (Its appendix says k - 1 centroids; its table fits k.)

    >>> clustered_bits(2400, 32, 8)
    8480
    """
    return 32 * k + math.ceil(math.log2(k)) * weights + 32 * biases
