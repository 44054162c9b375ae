"""Max pooling of images with channels last, for windows that do not overlap: written in Triton.

torch's own kernels remember the place of every maximum as a 64-bit number, which takes twice the
room of the maxima, and add gradients up as if windows overlapped. Where they do not, a byte per
maximum is enough, and the gradient is one pass over the images.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]

BLOCK = 1024


@triton.jit
def _forward(
    x,
    y,
    place,
    numbers,
    channels,
    width,
    out_height,
    out_width,
    height,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of maxima, and where in its window each was found."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < numbers
    channel = i % channels
    column = (i // channels) % out_width
    row = (i // channels // out_width) % out_height
    example = i // channels // out_width // out_height
    corner = ((example * height + row * WINDOW_H) * width + column * WINDOW_W) * channels + channel
    best = tl.load(x + corner, mask=here)
    found = tl.zeros((BLOCK,), dtype=tl.uint8)
    for k in tl.static_range(1, WINDOW_H * WINDOW_W):
        offset = ((k // WINDOW_W) * width + k % WINDOW_W) * channels
        value = tl.load(x + corner + offset, mask=here)
        # As in torch: the first of equal ones, and what is no number wins.
        wins = (value > best) | (value != value)
        best = tl.where(wins, value, best)
        found = tl.where(wins, k, found).to(tl.uint8)
    tl.store(y + i, best, mask=here)
    tl.store(place + i, found, mask=here)


@triton.jit
def _backward(
    dy,
    place,
    dx,
    numbers,
    channels,
    width,
    out_height,
    out_width,
    height,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of the images' gradient: what came back for a maximum, and 0 elsewhere."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < numbers
    channel = i % channels
    column = (i // channels) % width
    row = (i // channels // width) % height
    example = i // channels // width // height
    # Beyond the last whole window there is nothing to give back.
    inside = here & (row // WINDOW_H < out_height) & (column // WINDOW_W < out_width)
    out_row = example * out_height + row // WINDOW_H
    source = (out_row * out_width + column // WINDOW_W) * channels + channel
    k = (row % WINDOW_H) * WINDOW_W + column % WINDOW_W
    is_maximum = inside & (tl.load(place + source, mask=inside, other=0) == k)
    tl.store(dx + i, tl.load(dy + source, mask=is_maximum, other=0.0), mask=here)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Pair) -> Tensor:
        """Triton kernel: the maxima (N, C, H', W') of images with channels last."""
        x = x.contiguous(memory_format=torch.channels_last)
        examples, channels, height, width = x.shape
        size = (height // window[0], width // window[1])
        shape = (examples, channels, *size)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        place = torch.empty_like(y, dtype=torch.uint8)
        _launch(_forward, (x, y, place), y, x, y, window)
        ctx.save_for_backward(place)
        ctx.window = window
        ctx.size = (height, width)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Triton kernel: the gradient (N, C, H, W) of the images."""
        (place,) = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        shape = (*dy.shape[:2], *ctx.size)
        dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        _launch(_backward, (dy, place, dx), dx, dx, dy, ctx.window)
        return dx, None


def _launch(
    kernel: Any,
    pointers: tuple[Tensor, ...],
    made: Tensor,
    images: Tensor,
    maxima: Tensor,
    window: Pair,
) -> None:
    """A program per block of what is made."""
    _, channels, height, width = images.shape
    numbers = made.numel()
    kernel[(triton.cdiv(numbers, BLOCK),)](
        *pointers,
        numbers,
        channels,
        width,
        maxima.shape[2],
        maxima.shape[3],
        height,
        WINDOW_H=window[0],
        WINDOW_W=window[1],
        BLOCK=BLOCK,
    )


def max_pool(x: Tensor, window: Pair) -> Tensor:
    """Triton kernel: the maxima (N, C, H', W') of adjacent windows of images (N, C, H, W)."""
    y: Tensor = _MaxPool.apply(x, window)
    return y
