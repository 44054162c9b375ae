"""Pooling in pairs, ReLU and dropout as one function with a gradient of its own.

On a CPU, in a training step of ``har-cnn``, the three took more than half of the time that its
convolutions take: torch's pooling writes an index of 64 bits for every number and reads it again,
and each of the three goes over all numbers several times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .dropout import Dropout, draw, is_plain, zero_where


def pool_relu_drop(x: Tensor, drop: nn.Module) -> Tensor:
    """``drop(relu(max_pool(x)))`` of series (batch, channels, 1, length), pooled in pairs."""
    # In eval mode step by step, so that others can follow what is done: whoever exports a network,
    # or finds out which channels belong together.
    if not drop.training or not _fits(x):
        # Pooling and ReLU commute; in this order ReLU sees half the numbers.
        dropped: Tensor = drop(F.relu(F.max_pool2d(x, (1, 2))))
        return dropped
    batch, channels, _, length = x.shape
    pairs = x.permute(0, 2, 3, 1).view(batch, length // 2, 2, channels)
    noise = None
    highest_dropped = 0
    scale = 1.0
    if isinstance(drop, Dropout) and drop.dropped_levels:
        noise = draw(torch.Size((batch, length // 2, channels)), x.dtype)
        highest_dropped = drop.highest_dropped
        scale = drop.scale
    out: Tensor = _PoolReluDrop.apply(pairs, noise, highest_dropped, scale)
    return out.unsqueeze(1).permute(0, 3, 1, 2)


def _fits(x: Tensor) -> bool:
    """Whether ``x`` is in a CPU's memory with channels last, and its length is even."""
    if not is_plain(x) or x.shape[3] % 2 or not x.permute(0, 2, 3, 1).is_contiguous():
        return False
    try:
        # What torch.func maps over or differentiates is no piece of memory. (It could be taught to
        # do so here, but then every call would take 30 microseconds longer.)
        x.data_ptr()
    except RuntimeError:
        return False
    return True


class _PoolReluDrop(torch.autograd.Function):
    """Of pairs (batch, length, 2, channels) the larger, if it is above 0 and its noise lets it."""

    @staticmethod
    def forward(
        ctx: Any, pairs: Tensor, noise: Tensor | None, highest_dropped: int, scale: float
    ) -> Tensor:
        """The larger of each pair, or 0, times ``scale``."""
        out = torch.maximum(pairs.select(2, 0), pairs.select(2, 1)).relu_()
        if noise is not None:
            out = zero_where(out, noise, highest_dropped).mul_(scale)
        ctx.scale = scale
        ctx.save_for_backward(pairs, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient goes to the larger one; to the first where they are equal, as in torch."""
        pairs, out = ctx.saved_tensors
        # After the last pooling it comes with channels first, and mixed orders take long.
        grad = grads[0].contiguous()
        ahead = pairs.select(2, 1) - pairs.select(2, 0)
        # The output is above 0 where the larger one was and where it was not dropped.
        if torch.is_grad_enabled():
            # Somebody wants the gradient of this gradient: nothing in place.
            grad = zero_where(grad, out, 0) * ctx.scale
            to_second = zero_where(grad, ahead, 0)
            return torch.stack([grad - to_second, to_second], 2), None, None, None
        grad = zero_where(grad, out, 0).mul_(ctx.scale)
        to_pairs = torch.empty_like(pairs)
        to_second = to_pairs.select(2, 1)
        zero_where.grad_input(grad, ahead, 0, grad_input=to_second)
        torch.sub(grad, to_second, out=to_pairs.select(2, 0))
        return to_pairs, None, None, None
