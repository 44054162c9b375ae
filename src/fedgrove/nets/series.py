"""Convolution, pooling, ReLU and dropout of a series as one function, for training on a CPU.

In a training step of ``har-cnn`` pooling, ReLU and dropout took more than half of the time of the
convolutions: torch's pooling writes an index of 64 bits for every number and reads it again, each
of the three goes over all numbers several times, and every call costs some microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .dropout import Dropout, is_plain, zero_where


def conv_pool_relu_drop(conv: nn.Conv2d, drop: nn.Module, x: Tensor) -> Tensor:
    """``drop(relu(max_pool(conv(x))))`` of series (batch, length, channels), pooled in pairs.

    The kernel is (1, width), its steps are of length 1, and it has a bias. In training, hooks on
    ``conv`` and ``drop`` may not be called.
    """
    if not _is_faster_at_once(conv, drop, x):
        # As images of height 1 with channels last in memory.
        images = x.transpose(1, 2).unsqueeze(2)
        # Pooling and ReLU commute; in this order ReLU sees half the numbers.
        dropped: Tensor = drop(F.relu(F.max_pool2d(conv(images), (1, 2))))
        return dropped.squeeze(2).transpose(1, 2)
    noise = None
    highest_dropped = 0
    scale = 1.0
    if isinstance(drop, Dropout) and drop.drops:
        noise = drop.draw((x.shape[0], x.shape[1] // 2, conv.weight.shape[0]), x.dtype)
        highest_dropped = drop.highest_dropped
        scale = drop.scale
    out: Tensor = _ConvPoolReluDrop.apply(  # type: ignore[no-untyped-call]
        x, conv.weight, conv.bias, noise, highest_dropped, scale
    )
    return out


def _is_faster_at_once(conv: nn.Conv2d, drop: nn.Module, x: Tensor) -> bool:
    # In eval mode step by step, so that others can follow what is done: whoever exports a network,
    # or finds out which channels belong together.
    if not drop.training or not is_plain(x) or x.shape[1] % 2 or not x.is_contiguous():
        return False
    # The batched engine puts clients side by side as channels, and their weights one behind the
    # other.
    if conv.weight.dim() != 4 or conv.weight.shape[1] != x.shape[2]:
        return False
    try:
        # What torch.func differentiates or maps over is no piece of memory. (It could be taught to
        # go through this function, but then every call would take 30 microseconds longer.)
        x.data_ptr()
        conv.weight.data_ptr()
    except RuntimeError:
        return False
    is_odd = conv.weight.shape[3] % 2 == 1
    return is_odd and conv.padding[1] == conv.weight.shape[3] // 2


class _ConvPoolReluDrop(torch.autograd.Function):
    """The function and its gradient, in few passes over the numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        noise: Tensor | None,
        highest_dropped: int,
        scale: float,
    ) -> Tensor:
        """Of each pair the larger one if it is above 0 and its noise lets it, times ``scale``."""
        batch, length, _ = x.shape
        ctx.is_first = not ctx.needs_input_grad[0]
        if ctx.is_first:
            # The gradient of the weights is then a product too, which is faster than torch's.
            x = _windows(x, weight.shape[3])
            y = x @ weight.permute(3, 2, 1, 0).reshape(x.shape[1], -1)
        else:
            y = F.conv2d(_as_image(x), weight, padding=_padding(weight)).permute(0, 2, 3, 1)
        pairs = y.reshape(batch, length // 2, 2, -1)
        # The bias comes after pooling, where there are half the numbers: rounding keeps the order.
        first, second = pairs.unbind(2)
        out = torch.maximum(first, second).add_(bias).relu_()
        # Half of what the pairs take, and all that the gradient needs of them.
        ahead = second - first
        if noise is not None:
            out = zero_where(out, noise, highest_dropped).mul_(scale)
        ctx.scale = scale
        ctx.save_for_backward(x, weight, ahead, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient goes to the larger one; to the first where they are equal, as in torch."""
        x, weight, ahead, out = ctx.saved_tensors
        # After the last pooling it comes with channels first, and mixed orders take long.
        grad = grads[0].contiguous()
        # The output is above 0 where the larger one was and where it was not dropped.
        if torch.is_grad_enabled():
            # Somebody wants the gradient of this gradient: nothing in place.
            grad = zero_where(grad, out, 0) * ctx.scale
            to_second = zero_where(grad, ahead, 0)
            to_pairs = torch.stack([grad - to_second, to_second], 2)
        else:
            grad = zero_where(grad, out, 0).mul_(ctx.scale)
            to_pairs = grad.new_empty(out.shape[0], out.shape[1], 2, out.shape[2])
            to_second = to_pairs.select(2, 1)
            zero_where.grad_input(grad, ahead, 0, grad_input=to_second)
            torch.sub(grad, to_second, out=to_pairs.select(2, 0))
        to_bias = grad.sum((0, 1))
        if ctx.is_first:
            outputs, channels, _, width = weight.shape
            product = to_pairs.view(-1, outputs).t() @ x
            to_weight = product.view(outputs, width, channels).transpose(1, 2).unsqueeze(2)
            return None, to_weight, to_bias, None, None, None
        to_y = to_pairs.view(x.shape[0], x.shape[1], -1)
        to_x, to_weight, _ = torch.ops.aten.convolution_backward(
            _as_image(to_y),
            _as_image(x),
            weight,
            None,
            (1, 1),
            _padding(weight),
            (1, 1),
            False,
            (0, 0),
            1,
            (True, True, False),
        )
        return to_x.squeeze(2).transpose(1, 2), to_weight, to_bias, None, None, None


def _as_image(x: Tensor) -> Tensor:
    """A series (batch, length, channels) as images of height 1 with channels last in memory."""
    return x.transpose(1, 2).unsqueeze(2)


def _padding(weight: Tensor) -> tuple[int, int]:
    """As much as keeps the length."""
    return 0, weight.shape[3] // 2


def _windows(x: Tensor, width: int) -> Tensor:
    """All pieces of ``width`` steps of a series, each a row; zeros before and after."""
    batch, length, channels = x.shape
    padding = width // 2
    padded = x.new_zeros(batch, length + 2 * padding, channels)
    padded[:, padding : padding + length] = x
    # A piece is one stretch of memory, and the next begins a step later.
    strides = (padded.stride(0), channels, 1)
    pieces = padded.as_strided((batch, length, width * channels), strides)
    return pieces.reshape(batch * length, -1)
