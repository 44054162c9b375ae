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

Pair = tuple[int, int]
OptionalPair = tuple[Tensor | None, Tensor | None]

CHANNELS = 64
"""The channels of a program: 128 bytes of each row in bf16, and 256 in float32."""
ROWS = 32
"""The rows that a program reads at once."""
PROGRAMS = 640
"""A GPU has about 130 processors, each of which runs several programs at once."""


@triton.jit
def _find_places(start, rows, channels, channel, is_channel, ROWS: tl.constexpr):
    """Where a block of rows lies, and which of its numbers exist."""
    row = start + tl.arange(0, ROWS)
    here = (row < rows)[:, None] & is_channel[None, :]
    return row.to(tl.int64)[:, None] * channels + channel[None, :], here


@triton.jit
def _about_the_mean(x, rows, channels, channel, is_channel, ROWS: tl.constexpr):
    """The mean of the first rows, per channel."""
    place, here = _find_places(0, rows, channels, channel, is_channel, ROWS)
    first = tl.load(x + place, mask=here, other=0.0)
    return tl.sum(first.to(tl.float32), 0) / tl.minimum(rows, ROWS)


@triton.jit
def _sums(
    x,
    dy,
    mean_of,
    inverse_std_of,
    parts,
    rows,
    channels,
    rows_each,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over some rows, per channel: of the values, and of their squares.

    Less about their mean, so that the squares of large values do not hide a small variance. With
    ``BACKWARD`` the sums are of the gradient, and of it times the normalised value.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    if BACKWARD:
        shift = tl.load(mean_of + channel, mask=is_channel, other=0.0)
    else:
        shift = _about_the_mean(x, rows, channels, channel, is_channel, ROWS)
    # Row by row of a block, and together at the end: threads need not wait for each other before.
    totals = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    products = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    first = tl.program_id(1) * rows_each
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        place, here = _find_places(start, rows, channels, channel, is_channel, ROWS)
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - shift[None, :], 0.0)
        if BACKWARD:
            summed = tl.load(dy + place, mask=here, other=0.0).to(tl.float32)
        else:
            summed = value
        totals += summed
        products += summed * value
    part = parts + tl.program_id(1) * 2 * channels + channel
    total = tl.sum(products, 0)
    if BACKWARD:
        total = total * tl.load(inverse_std_of + channel, mask=is_channel, other=0.0)
    tl.store(part, tl.sum(totals, 0), mask=is_channel)
    tl.store(part + channels, total, mask=is_channel)


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
        place, here = _find_places(start, rows, channels, channel, is_channel, ROWS)
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
        place, here = _find_places(start, rows, channels, channel, is_channel, ROWS)
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
        running: OptionalPair,
        scale: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Triton kernels: the normalised images; running statistics are moved in place."""
        grid, sizes, parts = _divide(x)
        mean = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
        inverse_std = torch.empty_like(mean)
        y = torch.empty_like(x)
        _sums[grid](x, x, mean, inverse_std, parts, BACKWARD=False, **sizes)
        running_mean, running_var = running
        _normalise[grid](
            x,
            parts,
            _some_address(scale, mean),
            _some_address(bias, mean),
            _some_address(running_mean, mean),
            _some_address(running_var, mean),
            y,
            mean,
            inverse_std,
            count=len(parts),
            momentum=momentum,
            eps=eps,
            HAS_AFFINE=scale is not None,
            HAS_RUNNING=running_mean is not None,
            COUNT=triton.next_power_of_2(len(parts)),
            **sizes,
        )
        ctx.save_for_backward(x, mean, inverse_std, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Triton kernels: the gradient of the images, and those of scale and bias."""
        x, mean, inverse_std, scale = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        grid, sizes, parts = _divide(x)
        dx = torch.empty_like(x)
        d_scale = torch.empty_like(mean)
        d_bias = torch.empty_like(mean)
        _sums[grid](x, dy, mean, inverse_std, parts, BACKWARD=True, **sizes)
        _gradients[grid](
            x,
            dy,
            _some_address(scale, mean),
            mean,
            inverse_std,
            parts,
            dx,
            d_scale,
            d_bias,
            count=len(parts),
            HAS_AFFINE=scale is not None,
            COUNT=triton.next_power_of_2(len(parts)),
            **sizes,
        )
        if scale is None:
            return dx, None, None, None, None, None
        return dx, None, d_scale.to(scale.dtype), d_bias.to(scale.dtype), None, None


def _some_address(wanted: Tensor | None, other: Tensor) -> Tensor:
    """What is not there is not read; a kernel needs some address all the same."""
    return other if wanted is None else wanted


def _divide(x: Tensor) -> tuple[Pair, dict[str, int], Tensor]:
    """Divide the rows and channels of x: programs, sizes, and room for the sums of each part."""
    channels = x.shape[1]
    rows = x.numel() // channels
    blocks = triton.cdiv(channels, CHANNELS)
    parts_wanted = triton.cdiv(PROGRAMS, blocks)
    # Each should read a few times, or adding the parts up takes longer than it saves.
    most = triton.cdiv(rows, 2 * ROWS)
    # Whole blocks, so that no row belongs to two parts.
    rows_each = triton.cdiv(triton.cdiv(rows, max(1, min(parts_wanted, most))), ROWS) * ROWS
    # No part is empty.
    count = triton.cdiv(rows, rows_each)
    sizes = {
        "rows": rows,
        "channels": channels,
        "rows_each": rows_each,
        "ROWS": ROWS,
        "CHANNELS": CHANNELS,
    }
    parts = torch.empty((count, 2, channels), dtype=torch.float32, device=x.device)
    return (blocks, count), sizes, parts


def can_normalise(x: Tensor, momentum: float | None) -> bool:
    """Return whether our Triton kernels can replace torch's batch norm."""
    is_image = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    # In float64, which is for comparisons, sums would have to be too.
    is_short = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    has_variance = x.numel() >= 2 * x.shape[1]
    return is_image and is_short and has_variance and momentum is not None


def batch_norm(
    x: Tensor, running: OptionalPair, affine: OptionalPair, momentum: float, eps: float
) -> Tensor:
    """Triton kernels for ``F.batch_norm`` in train mode, of images with channels last.

    There are both or none of the running statistics, and of scale and shift (``affine``).
    """
    y: Tensor = _BatchNorm.apply(x, running, *affine, momentum, eps)
    return y
