"""The choice of norm layers, and the care they need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import InputError, check

KINDS = ("batch", "group", "none")


class BatchNorm2d(nn.BatchNorm2d):
    """Normalises in float32 or more, whatever comes in, and gives back what came.

    Under ``vmap`` and autocast torch's own scales bf16 by float32 and hands its gradient back in the wrong type.
    """

    mixed = False
    """Whether torch's own kernel may take the types as they come."""

    def forward(self, x: Tensor) -> Tensor:
        """Statistics and scaling in the parameters' type."""
        if self.mixed:
            return super().forward(x)
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class ThinGroupNorm(nn.GroupNorm):
    """A GroupNorm some of whose channels were removed, as if they were there and 0.

    ``sizes``: how many channels stay in each group. Mean and variance are over the channels there used to be, so that
    the outputs are those of the masked net.
    """

    def __init__(self, full: nn.GroupNorm, sizes: tuple[int, ...]) -> None:
        nn.Module.__init__(self)
        self.sizes, self.width = sizes, full.num_channels // full.num_groups
        self.num_groups, self.num_channels, self.eps, self.affine = (
            len(sizes),
            sum(sizes),
            full.eps,
            True,
        )
        self.weight, self.bias = full.weight, full.bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalise group by group, then scale and shift."""
        parts = [
            self._normal(part) for part in torch.split(x, list(self.sizes), 1) if part.shape[1]
        ]
        shape = (-1, *(1,) * (x.dim() - 2))
        return torch.cat(parts, 1) * self.weight.view(shape) + self.bias.view(shape)

    def _normal(self, x: Tensor) -> Tensor:
        dims, spots = tuple(range(1, x.dim())), math.prod(x.shape[2:])
        n, gone = self.width * spots, (self.width - x.shape[1]) * spots
        mean = x.sum(dims, keepdim=True) / n
        apart = x - mean
        # Each number that is gone was 0, the mean's own distance away.
        variance = ((apart * apart).sum(dims, keepdim=True) + gone * mean * mean) / n
        return apart * torch.rsqrt(variance + self.eps)


@contextmanager
def native() -> Iterator[None]:
    """Without ``vmap`` torch's kernel takes bf16 with float32 statistics, and faster."""
    BatchNorm2d.mixed = True
    try:
        yield
    finally:
        BatchNorm2d.mixed = False


def layer(kind: str, channels: int) -> nn.Module:
    """The norm layer for images of ``channels``: batch, group (two groups, as in FedAPTA) or none."""
    check(kind in KINDS, "norm", kind, f"one of {', '.join(KINDS)}")
    match kind:
        case "batch":
            return BatchNorm2d(channels)
        case "group":
            return nn.GroupNorm(2, channels)
        case _:
            return nn.Identity()


def settle(module: nn.Module) -> None:
    """Leave every BatchNorm with float buffers only, in place: its integer counter cannot be averaged.

    The counter is used for ``momentum=None`` alone, which is refused.
    """
    for name, part in module.named_modules():
        if isinstance(part, _NormBase) and part.track_running_stats:
            if part.momentum is None:
                raise InputError(
                    f"norm layer '{name}' has momentum=None; it must be a number, since a cumulative average counts "
                    "batches and clients cannot share that count: give it momentum=0.1."
                )
            part.num_batches_tracked = None
