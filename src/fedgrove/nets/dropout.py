"""Dropout from few random bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import check

LEVELS = 1 << 16
"""How many values a random number of 16 bits can take."""

FEW = 4096
"""Below so many numbers torch's own dropout is faster."""
START_WORDS = 3
"""So many words numpy's generator starts from; torch's draws them."""

zero_where = torch.ops.aten.threshold_backward
"""``zero_where(x, y, t)`` is x, but 0 where y is at most t: the gradient of ReLU.

It is the one kernel of torch's that selects by comparing floats at full speed on a CPU; comparing
to booleans, turning booleans into floats and ``torch.where`` each take three times as long or more.
"""


class Dropout(nn.Module):
    """Dropout that on a CPU takes 16 random bits for each number: a tenth of ``nn.Dropout``'s time.

    ``p`` is rounded to a multiple of 2^-16; kept values are divided by the rounded share, so the
    mean stays exact. Works under ``torch.func.vmap``; what is drawn follows from torch's default
    generator.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        check(0 <= p < 1, "p", p, "in [0, 1)")
        self.p = p

    @property
    def dropped_levels(self) -> int:
        """So many of the values that 16 bits can take drop a number."""
        return round(self.p * LEVELS)

    @property
    def highest_dropped(self) -> int:
        """The numbers are signed: the lowest is -LEVELS / 2, and those up to this one drop."""
        return self.dropped_levels - LEVELS // 2 - 1

    @property
    def scale(self) -> float:
        """What is kept is multiplied by this."""
        return 1 / (1 - self.dropped_levels / LEVELS)

    def forward(self, x: Tensor) -> Tensor:
        """Drop in train mode; in eval mode ``x`` itself."""
        if not self.training or self.dropped_levels == 0:
            return x
        # For a few numbers one call is best.
        if not is_plain(x) or x.numel() < FEW:
            return F.dropout(x, self.p)
        kept: Tensor = zero_where(x, draw(x.shape, x.dtype), self.highest_dropped)
        return kept * self.scale

    def extra_repr(self) -> str:
        """What print shows."""
        return f"p={self.p}"


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is on a CPU, in a type that can hold all numbers of 16 bits.

    On a GPU random bits are cheap, and kernels of another kind are fast.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def draw(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Whole numbers of 16 bits, signed, each as likely; from torch's default generator."""
    n = math.prod(shape)
    # Four from each word of 64 bits; -(-n // 4) is n / 4 rounded up.
    words = _words(-(-n // 4))
    return words.view(torch.int16)[:n].to(dtype).view(shape)


class _Start(ISeedSequence):
    """Random words as the state that a generator of numpy's starts from."""

    def __init__(self, words: Tensor) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Any:
        """The words themselves: numpy's own way would first spread a short seed over them."""
        return self.words.numpy().view(np.uint64)


def _words(count: int) -> Tensor:
    """So many random words of 64 bits."""
    start = _torch_words(START_WORDS)
    try:
        # numpy's generator takes half of the time of torch's.
        return torch.from_numpy(np.random.SFC64(_Start(start)).random_raw(count).view(np.int64))
    except RuntimeError:
        # Under vmap, where every client has a start of its own that cannot be read.
        return _torch_words(count)


def _torch_words(count: int) -> Tensor:
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,))
