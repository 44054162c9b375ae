"""Layers for series, as images of height 1 with channels last, made for training on a CPU.

In a training step of ``har-cnn`` pooling, ReLU and dropout took more than half of the time of the
convolutions: torch's pooling writes an index of 64 bits for every number and reads it again, and
each of the three goes over all numbers several times. Here they are one function with a gradient of
its own. And the gradient of a first convolution's weights is faster as a product of matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .dropout import Dropout, draw, is_plain, zero_where


class SeriesConv2d(nn.Conv2d):
    """A convolution; over a series that needs no gradient, as a product of windows and weights.

    Its steps are of length 1, and its kernel is (1, width).
    """

    def forward(self, input: Tensor) -> Tensor:
        """The same numbers either way."""
        # The batched engine gives it the weights of many clients, with one more dimension.
        is_single = self.weight.dim() == 4 and input.shape[1] == self.weight.shape[1]
        is_first = torch.is_grad_enabled() and not input.requires_grad
        if not (self.training and is_first and is_single and _is_channels_last(input)):
            return super().forward(input)
        assert self.bias is not None
        batch, channels, _, length = input.shape
        width = self.weight.shape[3]
        padding = int(self.padding[1])
        padded = input.new_zeros(batch, length + 2 * padding, channels)
        padded[:, padding : padding + length] = input.permute(0, 2, 3, 1).squeeze(1)
        outputs = length + 2 * padding - width + 1
        # With channels last a window is a piece of memory, and the next begins a step later.
        steps = (padded.stride(0), channels, 1)
        windows = padded.as_strided((batch, outputs, width * channels), steps)
        weight = self.weight.permute(3, 2, 1, 0).reshape(width * channels, -1)
        products = torch.addmm(self.bias, windows.reshape(batch * outputs, -1), weight)
        return products.view(batch, 1, outputs, -1).permute(0, 3, 1, 2)


def pool_relu_drop(x: Tensor, drop: nn.Module) -> Tensor:
    """``drop(relu(max_pool(x)))`` of series (batch, channels, 1, length), pooled in pairs."""
    # In eval mode step by step, so that others can follow what is done: whoever exports a network,
    # or finds out which channels belong together.
    if not drop.training or x.shape[3] % 2 or not _is_channels_last(x):
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


def _is_channels_last(x: Tensor) -> bool:
    """Whether ``x`` is a piece of a CPU's memory with channels last."""
    if not is_plain(x) or not x.permute(0, 2, 3, 1).is_contiguous():
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
