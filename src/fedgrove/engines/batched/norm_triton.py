"""BatchNorm in train mode of images with channels last, many channels at once: written in Triton.

K clients side by side have K·C channels, thousands where a network alone has hundreds, and fewer
places each. torch's kernels are made for the other form, and reach a third of the GPU's memory
rate here. Both passes are two kernels: sums over a part of the places, then every element, for
which each program adds up the parts of its own channels.

Images (N, C, H, W) with channels last are rows (N·H·W) of C numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 64
"""The channels of a program: 128 bytes of each row in bf16, and 256 in float32."""
ROWS = 32
"""The rows that a program reads at once."""
PROGRAMS = 640
"""A GPU has about 130 processors, each of which runs several programs at once."""


@triton.jit
def _about_the_mean(x, rows, channels, channel, is_channel, ROWS: tl.constexpr):
    """The mean of the first rows, per channel."""
    row = tl.arange(0, ROWS)
    here = (row < rows)[:, None] & is_channel[None, :]
    first = tl.load(x + row[:, None] * channels + channel[None, :], mask=here, other=0.0)
    return tl.sum(first.to(tl.float32), 0) / tl.minimum(rows, ROWS)


@triton.jit
def _sums(x, parts, rows, channels, rows_each, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums over some rows, per channel: of the values, and of their squares.

    Less about their mean, so that the squares of large values do not hide a small variance.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    shift = _about_the_mean(x, rows, channels, channel, is_channel, ROWS)
    # Row by row of a block, and together at the end: threads need not wait for each other before.
    totals = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    first = tl.program_id(1) * rows_each
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & is_channel[None, :]
        place = row.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - shift[None, :], 0.0)
        totals += value
        squares += value * value
    part = parts + tl.program_id(1) * 2 * channels + channel
    tl.store(part, tl.sum(totals, 0), mask=is_channel)
    tl.store(part + channels, tl.sum(squares, 0), mask=is_channel)


@triton.jit
def _normalise(
    x,
    parts,
    scale,
    bias,
    running_mean,
    running_var,
    y,
    mean_of,
    inverse_std_of,
    rows,
    channels,
    rows_each,
    count,
    momentum,
    eps,
    HAS_AFFINE: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Some rows, normalised; the program of the first ones also keeps the statistics."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    number = tl.arange(0, COUNT)
    is_part = (number < count)[:, None] & is_channel[None, :]
    part = parts + number[:, None] * 2 * channels + channel[None, :]
    shifted_mean = tl.sum(tl.load(part, mask=is_part, other=0.0), 0) / rows
    mean_square = tl.sum(tl.load(part + channels, mask=is_part, other=0.0), 0) / rows
    mean = shifted_mean + _about_the_mean(x, rows, channels, channel, is_channel, ROWS)
    var = mean_square - shifted_mean * shifted_mean
    # Rounding may leave a variance of 0 slightly below.
    var = tl.where(var < 0, 0.0, var)
    inverse_std = 1.0 / tl.sqrt(var + eps)
    factor = inverse_std
    offset = tl.zeros((CHANNELS,), dtype=tl.float32)
    if HAS_AFFINE:
        factor = inverse_std * tl.load(scale + channel, mask=is_channel, other=0.0).to(tl.float32)
        offset = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    first = tl.program_id(1) * rows_each
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & is_channel[None, :]
        place = row.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        tl.store(y + place, (value - mean[None, :]) * factor[None, :] + offset[None, :], mask=here)
    if tl.program_id(1) == 0:
        tl.store(mean_of + channel, mean, mask=is_channel)
        tl.store(inverse_std_of + channel, inverse_std, mask=is_channel)
        if HAS_RUNNING:
            # As torch moves them: the variance unbiased.
            old_mean = tl.load(running_mean + channel, mask=is_channel, other=0.0)
            old_var = tl.load(running_var + channel, mask=is_channel, other=0.0)
            unbiased = var * (rows / (rows - 1.0))
            new_mean = old_mean + momentum * (mean - old_mean)
            new_var = old_var + momentum * (unbiased - old_var)
            tl.store(running_mean + channel, new_mean, mask=is_channel)
            tl.store(running_var + channel, new_var, mask=is_channel)


@triton.jit
def _gradient_sums(
    x,
    dy,
    mean_of,
    inverse_std_of,
    parts,
    rows,
    channels,
    rows_each,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over some rows, per channel: of the gradient, and of it times the normalised value."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    mean = tl.load(mean_of + channel, mask=is_channel, other=0.0)
    inverse_std = tl.load(inverse_std_of + channel, mask=is_channel, other=0.0)
    totals = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    products = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    first = tl.program_id(1) * rows_each
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & is_channel[None, :]
        place = row.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        gradient = tl.load(dy + place, mask=here, other=0.0).to(tl.float32)
        totals += gradient
        products += gradient * (value - mean[None, :])
    part = parts + tl.program_id(1) * 2 * channels + channel
    tl.store(part, tl.sum(totals, 0), mask=is_channel)
    tl.store(part + channels, tl.sum(products, 0) * inverse_std, mask=is_channel)


@triton.jit
def _gradients(
    x,
    dy,
    scale,
    mean_of,
    inverse_std_of,
    parts,
    dx,
    d_scale,
    d_bias,
    rows,
    channels,
    rows_each,
    count,
    HAS_AFFINE: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradient of some rows; the program of the first ones also keeps that of the affine."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    number = tl.arange(0, COUNT)
    is_part = (number < count)[:, None] & is_channel[None, :]
    part = parts + number[:, None] * 2 * channels + channel[None, :]
    total = tl.sum(tl.load(part, mask=is_part, other=0.0), 0)
    products = tl.sum(tl.load(part + channels, mask=is_part, other=0.0), 0)
    mean = tl.load(mean_of + channel, mask=is_channel, other=0.0)
    inverse_std = tl.load(inverse_std_of + channel, mask=is_channel, other=0.0)
    factor = inverse_std
    if HAS_AFFINE:
        factor = inverse_std * tl.load(scale + channel, mask=is_channel, other=0.0).to(tl.float32)
    mean_gradient = total / rows
    slope = products / rows * inverse_std
    first = tl.program_id(1) * rows_each
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & is_channel[None, :]
        place = row.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        gradient = tl.load(dy + place, mask=here, other=0.0).to(tl.float32)
        along = (value - mean[None, :]) * slope[None, :]
        result = (gradient - mean_gradient[None, :] - along) * factor[None, :]
        tl.store(dx + place, result, mask=here)
    if tl.program_id(1) == 0:
        tl.store(d_scale + channel, products, mask=is_channel)
        tl.store(d_bias + channel, total, mask=is_channel)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running: tuple[Tensor, Tensor] | None,
        scale: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Triton kernels: the normalised images; running statistics are moved in place."""
        rows, channels, blocks, count = _division(x)
        parts = torch.empty((count, 2, channels), dtype=torch.float32, device=x.device)
        mean = torch.empty(channels, dtype=torch.float32, device=x.device)
        inverse_std = torch.empty_like(mean)
        y = torch.empty_like(x)
        rows_each = _rows_each(rows, count)
        sizes = {"ROWS": ROWS, "CHANNELS": CHANNELS}
        _sums[(blocks, count)](x, parts, rows, channels, rows_each, **sizes)
        # What is not there is not read; a kernel needs some address all the same.
        running_mean, running_var = running or (mean, mean)
        _normalise[(blocks, count)](
            x,
            parts,
            mean if scale is None else scale,
            mean if bias is None else bias,
            running_mean,
            running_var,
            y,
            mean,
            inverse_std,
            rows,
            channels,
            rows_each,
            count,
            momentum,
            eps,
            HAS_AFFINE=scale is not None,
            HAS_RUNNING=running is not None,
            COUNT=triton.next_power_of_2(count),
            **sizes,
        )
        ctx.save_for_backward(x, mean, inverse_std, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Triton kernels: the gradient of the images, and those of scale and bias."""
        x, mean, inverse_std, scale = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        rows, channels, blocks, count = _division(x)
        parts = torch.empty((count, 2, channels), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x)
        d_scale = torch.empty_like(mean)
        d_bias = torch.empty_like(mean)
        rows_each = _rows_each(rows, count)
        sizes = {"ROWS": ROWS, "CHANNELS": CHANNELS}
        _gradient_sums[(blocks, count)](
            x, dy, mean, inverse_std, parts, rows, channels, rows_each, **sizes
        )
        _gradients[(blocks, count)](
            x,
            dy,
            mean if scale is None else scale,
            mean,
            inverse_std,
            parts,
            dx,
            d_scale,
            d_bias,
            rows,
            channels,
            rows_each,
            count,
            HAS_AFFINE=scale is not None,
            COUNT=triton.next_power_of_2(count),
            **sizes,
        )
        if scale is None:
            return dx, None, None, None, None, None
        return dx, None, d_scale.to(scale.dtype), d_bias.to(scale.dtype), None, None


def _division(x: Tensor) -> tuple[int, int, int, int]:
    """Rows and channels, blocks of channels, and into how many parts the rows are divided."""
    channels = x.shape[1]
    rows = x.numel() // channels
    blocks: int = triton.cdiv(channels, CHANNELS)
    parts_wanted: int = triton.cdiv(PROGRAMS, blocks)
    # Each should read a few times, or adding the parts up takes longer than it saves.
    most: int = triton.cdiv(rows, 2 * ROWS)
    count = max(1, min(parts_wanted, most))
    # No part is empty.
    count = triton.cdiv(rows, _rows_each(rows, count))
    return rows, channels, blocks, count


def _rows_each(rows: int, count: int) -> int:
    """Return the rows of a part: whole blocks, so that no row belongs to two."""
    each: int = triton.cdiv(triton.cdiv(rows, count), ROWS) * ROWS
    return each


def can_normalise(x: Tensor, momentum: float | None) -> bool:
    """Return whether our Triton kernels can replace torch's batch norm."""
    is_image = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    # In float64, which is for comparisons, sums would have to be too.
    is_short = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    has_variance = x.numel() >= 2 * x.shape[1]
    return is_image and is_short and has_variance and momentum is not None


def batch_norm(
    x: Tensor,
    running: tuple[Tensor, Tensor] | None,
    affine: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Triton kernels for ``F.batch_norm`` in train mode, of images with channels last."""
    scale, bias = affine or (None, None)
    y: Tensor = _BatchNorm.apply(x, running, scale, bias, momentum, eps)
    return y
