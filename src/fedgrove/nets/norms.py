"""The choice of norm layers, and the care they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
