"""Dropout from few random bits."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import check

LEVELS = 1 << 16
"""How many values a random number of 16 bits can take."""
LEAST_NUMBERS = 4096
"""For fewer numbers torch's own dropout is faster."""

Seed = npt.NDArray[np.uint64]
"""What noise follows from: four random words of 64 bits."""

zero_where = torch.ops.aten.threshold_backward
"""``zero_where(x, y, t)`` is x, but 0 where y is at most t: the gradient of ReLU.

It is the one kernel of torch's that selects by comparing floats at full speed on a CPU; comparing
to booleans, turning booleans into floats and ``torch.where`` each take three times as long or more.
"""


class Dropout(nn.Module):
    """Dropout that on a CPU takes 16 random bits per number: a sixth of ``nn.Dropout``'s time.

    ``p`` is rounded to a multiple of 2^-16; kept values are divided by the rounded share, so the
    mean stays exact. Few numbers are left to torch's own dropout, which is faster for them. Works
    under ``torch.func.vmap``; all draws follow from torch's default generator.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        check(0 <= p < 1, "p", p, "in [0, 1)")
        self.p = p
        dropped_levels = round(p * LEVELS)
        self.drops = dropped_levels > 0
        # The random numbers are signed: the lowest is -LEVELS / 2.
        self.highest_dropped = dropped_levels - LEVELS // 2 - 1
        """Numbers up to this one drop their value."""
        self.scale = 1 / (1 - dropped_levels / LEVELS)
        """What is kept is multiplied by this."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop a layer's values in train mode; in eval mode return ``x`` itself."""
        if not self.training or not self.drops:
            return x
        if x.numel() < LEAST_NUMBERS or not is_plain(x):
            return F.dropout(x, self.p)
        kept: Tensor = zero_where(x, self.draw(x.shape, x.dtype), self.highest_dropped)
        return kept * self.scale

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Draw signed 16-bit integers for dropout, all equally likely."""
        n = math.prod(shape)
        try:
            noise = noise_of(draw_seed(), n)
        except RuntimeError:
            # Under vmap every client has a different seed, which cannot be read.
            noise = _random_words(-(-n // 4)).view(torch.int16)[:n]
        return noise.to(dtype).view(shape)

    def extra_repr(self) -> str:
        """Return what print shows of the dropout layer."""
        return f"p={self.p}"


def is_plain(x: Tensor) -> bool:
    """Return whether dropout can be fast: ``x`` on a CPU, in a type with all 16-bit integers.

    On a GPU random bits take little time, and kernels of another kind are fast.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class _Generator(threading.local):
    """A generator for each thread, twice as fast as torch's."""

    def __init__(self) -> None:
        # The seed does not matter: every use sets the state.
        self.bits = np.random.SFC64(0)


_generator = _Generator()


def draw_seed() -> Seed:
    """Draw the seed of a dropout layer's noise from torch's default generator."""
    return _random_words(4).numpy().view(np.uint64)


def noise_of(seed: Seed, n: int) -> Tensor:
    """Return a dropout layer's noise from its seed: n signed 16-bit integers."""
    _generator.bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": seed},
        "has_uint32": 0,
        "uinteger": 0,
    }
    # Four from each word of 64 bits; -(-n // 4) is n / 4 rounded up.
    words = _generator.bits.random_raw(-(-n // 4))
    return torch.from_numpy(words.view(np.int16)[:n])


def _random_words(count: int) -> Tensor:
    """Draw random words of 64 bits from torch's default generator."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,))
