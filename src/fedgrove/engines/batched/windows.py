"""A convolution of many clients as windows times weights, one batched product for all.

Grouped kernels are slow where an image is small or a group has few channels. Microseconds per client, forwards and
back, grouped and so (one H200, 120 clients, batches of 32, kernels of 3 x 3; 2026-11-15): 3 to 64 channels at 32 x 32,
21 and 14 in tf32, 23 and 16 in bf16; 64 to 128 at 16 x 16, 39 and 77, 33 and 63; 128 to 256 at 8 x 8, 72 and 43, 30 and
34; 256 to 512 at 4 x 4, 92 and 35, 89 and 25. To take the weights' gradient alone from windows at 16 x 16 was tried:
the copy cost more than the faster product saved (a step of bn-cnn4 312 before, 334 with it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]
FEW, SMALL, TINY = 32, 64, 16
"""First layers whose windows have at most FEW numbers, and images of at most SMALL points (TINY in bf16), are
multiplied; all else, series too, is left to grouped kernels."""


def better(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> bool:
    """Whether to convolve x (N, K·C, H, W) with weight (K, O, C, kh, kw) here."""
    if not x.requires_grad and _few(weight):
        return True
    kernel = tuple(weight.shape[3:])
    high, wide = _size(x, weight, padding)
    if (
        stride != (1, 1)
        or min(high, wide) == 1
        or any(p >= side for p, side in zip(padding, kernel, strict=True))
    ):
        return False
    return high * wide <= (SMALL if _half(x) is None else TINY)


def _half(x: Tensor) -> torch.dtype | None:
    """What autocast makes of x; None where it is off. Doubles stay, as in torch's own."""
    asked = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if asked else None


def _few(weight: Tensor) -> bool:
    return weight.shape[2:].numel() <= FEW


def _size(x: Tensor, weight: Tensor, padding: Pair) -> Pair:
    """Of the image that a stride of 1 makes."""
    high, wide = (int(x.shape[2 + d] + 2 * padding[d] - weight.shape[3 + d] + 1) for d in (0, 1))
    return high, wide


def convolve(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The images (N, K·O, H', W') of x (N, K·C, H, W) under each client's own weight (K, O, C, kh, kw)."""
    return _Convolve.apply(x, weight, stride, padding)  # type: ignore[no-any-return,no-untyped-call]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        """Images; what the weights' gradient needs is kept."""
        if half := _half(x):
            x, weight = x.to(half), weight.to(half)
        ctx.padding = padding
        columns, size = _columns(x, weight, stride, padding)
        ctx.save_for_backward(weight, columns)
        return _images(weight.flatten(2) @ columns, len(x), size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The weights' gradient is a product with the windows; the input's, a convolution with the mirrored weights."""
        (weight, columns), dy, padding = ctx.saved_tensors, grads[0], ctx.padding
        clients, filters, _, kh, kw = weight.shape
        each = (
            dy.reshape(len(dy), clients, filters, -1)
            .permute(1, 2, 0, 3)
            .reshape(clients, filters, -1)
        )
        d_weight = (each @ columns.mT).view_as(weight)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None, None
        around, mirrored = (
            (kh - 1 - padding[0], kw - 1 - padding[1]),
            weight.flip(3, 4).transpose(1, 2),
        )
        windows, size = _columns(dy, mirrored, (1, 1), around)
        dx = _images(mirrored.flatten(2) @ windows, len(dy), size)
        return dx, d_weight, None, None


def _columns(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Pair]:
    """All windows of x, (K, C·kh·kw, N·H'·W'), and the size of the image they make."""
    clients, (kh, kw) = len(weight), weight.shape[3:]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = padded.unfold(2, kh, stride[0]).unfold(3, kw, stride[1])  # N, K·C, H', W', kh, kw
    size = seen.shape[2], seen.shape[3]
    seen = seen.reshape(len(x), clients, -1, *seen.shape[2:]).permute(1, 2, 5, 6, 0, 3, 4)
    return seen.reshape(clients, weight.shape[2:].numel(), -1), size


def _images(rows: Tensor, n: int, size: Pair) -> Tensor:
    """(K, O, N·H'·W') as (N, K·O, H', W')."""
    return rows.view(-1, n, *size).transpose(0, 1).contiguous()
