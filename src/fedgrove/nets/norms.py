"""The norm layers that a net may have, and what federated training needs of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import InputError, check
from ..renamed import find_old_names

NORM_KINDS = ("batch", "group", "none")


class BatchNorm2d(nn.BatchNorm2d):
    """Normalises in float32 or more, whatever the input's type; the output has the input's type.

    Under ``vmap`` and autocast torch's own layer scales bf16 by float32 and returns its gradient in
    the wrong type.
    """

    mixed = False
    """Whether input and parameters may differ in type, as torch's own kernel allows."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with statistics and scaling in the parameters' type."""
        if self.mixed:
            return super().forward(x)
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class ThinGroupNorm(nn.GroupNorm):
    """A GroupNorm with channels removed that computes as if they were still there and 0.

    Mean and variance are over all channels of the full group, so that the outputs are those of the
    masked net.

    Args:
        full: The layer with all its channels.
        sizes: How many channels are left in each group.
    """

    def __init__(self, full: nn.GroupNorm, sizes: tuple[int, ...]) -> None:
        # Not GroupNorm's own __init__, which refuses groups of different sizes.
        nn.Module.__init__(self)
        self.sizes = sizes
        self.width = full.num_channels // full.num_groups
        self.num_groups = len(sizes)
        self.num_channels = sum(sizes)
        self.eps = full.eps
        self.affine = True
        self.weight = full.weight
        self.bias = full.bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalise group by group, then scale and shift."""
        parts = []
        for part in torch.split(x, list(self.sizes), 1):
            # A group may have lost all of its channels.
            if part.shape[1]:
                parts.append(self._normalise(part))
        # One scale per channel, the same at every position of an image or series.
        shape = (-1, *(1,) * (x.dim() - 2))
        return torch.cat(parts, 1) * self.weight.view(shape) + self.bias.view(shape)

    def _normalise(self, x: Tensor) -> Tensor:
        dims = tuple(range(1, x.dim()))
        positions = math.prod(x.shape[2:])
        n = self.width * positions
        n_removed = (self.width - x.shape[1]) * positions
        mean = x.sum(dims, keepdim=True) / n
        centred = x - mean
        # Each removed number was 0, and so differed from the mean by the mean itself.
        squares = (centred * centred).sum(dims, keepdim=True) + n_removed * mean * mean
        variance = squares / n
        return centred * torch.rsqrt(variance + self.eps)


@contextmanager
def use_native_batch_norm() -> Iterator[None]:
    """Use torch's own BatchNorm kernel, for calls without ``vmap``.

    There it takes bf16 with float32 statistics, and is faster.
    """
    # On the class, not on one net's layers: a call runs on nets and copies that are not known here.
    BatchNorm2d.mixed = True
    try:
        yield
    finally:
        BatchNorm2d.mixed = False


def make_norm(kind: str, channels: int) -> nn.Module:
    """Make a norm layer for images: batch, group (two groups, as in FedAPTA) or none."""
    check(kind in NORM_KINDS, "norm", kind, f"one of {', '.join(NORM_KINDS)}")
    match kind:
        case "batch":
            return BatchNorm2d(channels)
        case "group":
            return nn.GroupNorm(2, channels)
        case _:
            return nn.Identity()


def find_fixed_norms(module: nn.Module) -> list[nn.Module]:
    """Find the norm layers whose running statistics are constants, as those of frozen layers are.

    They normalise by these in training too, and so are never in train mode.
    """
    found: list[nn.Module] = []
    for part in module.modules():
        if not isinstance(part, _NormBase) or part.running_mean is None:
            continue
        is_trained = any(parameter.requires_grad for parameter in part.parameters())
        if not is_trained and "running_mean" not in part.state_dict():
            found.append(part)
    return found


def drop_batch_counters(module: nn.Module) -> None:
    """Leave every BatchNorm with float buffers only, in place.

    Its integer counter cannot be averaged. Only ``momentum=None`` uses the counter, and that is
    refused.
    """
    for name, part in module.named_modules():
        if not isinstance(part, _NormBase) or not part.track_running_stats:
            continue
        if part.momentum is None:
            raise InputError(
                f"norm layer '{name}' has momentum=None; it must be a number, since a cumulative "
                "average counts batches and clients cannot share that count: give it momentum=0.1."
            )
        part.num_batches_tracked = None


__getattr__ = find_old_names(__name__)
