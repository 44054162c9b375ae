"""A convolution of many clients as windows times weights (im2col): one batched product for all.

Grouped kernels are slow where an image is small or a group has few channels. Microseconds per
client, forwards and back, grouped and by windows (one H200, 120 clients, batches of 32, kernels of
3 x 3; 2026-11-15):

=====================  ============  ===============  ============  ===============
channels, image        grouped tf32  by windows tf32  grouped bf16  by windows bf16
=====================  ============  ===============  ============  ===============
3 to 64, 32 x 32       21            14               23            16
64 to 128, 16 x 16     39            77               33            63
128 to 256, 8 x 8      72            43               30            34
256 to 512, 4 x 4      92            35               89            25
=====================  ============  ===============  ============  ===============

To take the weights' gradient alone from windows at 16 x 16 was tried: the copy cost more than the
faster product saved (a step of bn-cnn4 312 before, 334 with it).

Shapes: K clients, N examples, C channels in and O out, kernels of kh x kw, images of H x W in and
H' x W' out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]

FEW_NUMBERS = 32
"""A first layer whose windows have at most so many numbers (C·kh·kw) is done by windows."""
SMALL_IMAGE = 64
"""Any layer that makes images of at most so many points (H'·W') is done by windows ..."""
SMALL_IMAGE_HALF = 16
"""... and under autocast, where grouped kernels still win at 8 x 8, of at most so many."""


def is_faster(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> bool:
    """Whether to convolve x (N, K·C, H, W) with weight (K, O, C, kh, kw) by windows."""
    # A first layer's input needs no gradient, so the limits of `backward` below do not hold for it.
    if not x.requires_grad and weight.shape[2:].numel() <= FEW_NUMBERS:
        return True
    # The gradient of the input, as `backward` takes it, is right for a stride of 1, and pads by
    # kernel - 1 - padding, which must not be negative.
    if stride != (1, 1):
        return False
    kh, kw = weight.shape[3:]
    if padding[0] >= kh or padding[1] >= kw:
        return False
    # With a stride of 1:
    height = x.shape[2] + 2 * padding[0] - kh + 1
    width = x.shape[3] + 2 * padding[1] - kw + 1
    # A series, run as an image of height 1, is left to grouped kernels.
    if min(height, width) == 1:
        return False
    limit = SMALL_IMAGE if _autocast_dtype(x) is None else SMALL_IMAGE_HALF
    return height * width <= limit


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast casts x to; None where it is off. float64 stays, as in torch's own."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def convolve(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The images (N, K·O, H', W') of x (N, K·C, H, W) and the clients' weight (K, O, C, kh, kw)."""
    y: Tensor = _Convolve.apply(x, weight, stride, padding)  # type: ignore[no-untyped-call]
    return y


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        """Images; the windows are kept for the weights' gradient."""
        # Autocast does not look into an autograd function: the cast is ours to do.
        half = _autocast_dtype(x)
        if half is not None:
            x = x.to(half)
            weight = weight.to(half)
        columns, size = _columns(x, weight, stride, padding)
        ctx.padding = padding
        ctx.save_for_backward(weight, columns)
        return _to_images(weight.flatten(2) @ columns, len(x), size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The weights' gradient is a product with the windows; the input's, a convolution with the
        mirrored weights."""
        weight, columns = ctx.saved_tensors
        dy = grads[0]
        clients, filters, _, kh, kw = weight.shape

        # (N, K·O, H', W') as (K, O, N·H'·W'), the order in which `columns` has its windows.
        dy_rows = dy.reshape(len(dy), clients, filters, -1).permute(1, 2, 0, 3)
        dy_rows = dy_rows.reshape(clients, filters, -1)
        d_weight = (dy_rows @ columns.mT).view_as(weight)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None, None

        mirrored = weight.flip(3, 4).transpose(1, 2)
        full_padding = (kh - 1 - ctx.padding[0], kw - 1 - ctx.padding[1])
        dy_columns, size = _columns(dy, mirrored, (1, 1), full_padding)
        dx = _to_images(mirrored.flatten(2) @ dy_columns, len(dy), size)
        return dx, d_weight, None, None


def _columns(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Pair]:
    """All windows of x, (K, C·kh·kw, N·H'·W'), and the size (H', W') of the image they make."""
    clients = len(weight)
    kh, kw = weight.shape[3:]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    # A view (N, K·C, H', W', kh, kw). The last reshape copies all windows in one kernel, where
    # torch's own im2col launches one per example.
    windows = padded.unfold(2, kh, stride[0]).unfold(3, kw, stride[1])
    size = (windows.shape[2], windows.shape[3])
    windows = windows.reshape(len(x), clients, -1, *windows.shape[2:]).permute(1, 2, 5, 6, 0, 3, 4)
    return windows.reshape(clients, weight.shape[2:].numel(), -1), size


def _to_images(rows: Tensor, examples: int, size: Pair) -> Tensor:
    """(K, O, N·H'·W') as (N, K·O, H', W')."""
    return rows.view(-1, examples, *size).transpose(0, 1).contiguous()
