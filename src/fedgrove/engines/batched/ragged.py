"""BatchNorm of many clients side by side when some batches are short: padding counts for nothing.

A client's channels are normalised by the mean and variance of its own examples. In torch's kernels
statistics take no weights; but padding that is 0 adds nothing to sums. With r = places / examples,
and m and v the mean and variance that the kernel computes over all places, those of the examples
are r m and r (v - (r - 1) m^2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def batch_norm(
    x: Tensor,
    weight: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    affine: tuple[Tensor, Tensor],
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise x (N, K·C, ...) in train mode; ``weight`` (K, N) is 1 for examples, 0 for padding.

    ``running`` mean and variance are moved in place, as torch moves them: the variance unbiased.
    """
    channels = x.shape[1] // len(weight)
    trailing = [1] * (x.dim() - 2)
    # `weight` in a shape that broadcasts over x: (N, K·C, 1, ...).
    is_example = weight.repeat_interleave(channels, 0).T
    is_example = is_example.reshape(*x.shape[:2], *trailing).to(x.dtype)

    # Values are first shifted by about their mean, that of the first example: the kernel subtracts
    # squares, and those of large values would hide the variance. Padding becomes 0.
    shift = x[0].detach().reshape(x.shape[1], -1).mean(1)
    shifted = torch.addcmul(-shift.view(1, -1, *trailing) * is_example, x, is_example)

    # r of the formula above. A client whose batch is all padding has no examples to divide by.
    ratio = (len(x) / weight.sum(1).clamp_min(1)).repeat_interleave(channels)
    normalise = _Kernels.apply if x.is_cuda else _eager
    y, mean, var = normalise(shifted, is_example, ratio, *affine, eps)

    places = x.numel() // x.shape[1]
    count = places / ratio
    with torch.no_grad():
        new_mean = mean + shift
        new_var = var * count / (count - 1)
        for statistic, new in ((running[0], new_mean), (running[1], new_var)):
            if statistic is not None:
                statistic.lerp_(new.to(statistic.dtype), momentum)
    return y.to(x.dtype)


def _eager(
    x: Tensor, is_example: Tensor, ratio: Tensor, scale: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """For the CPU, where torch has no kernels for the parts of a BatchNorm; x is 0 at padding."""
    x = x.to(scale.dtype)
    dims = [0, *range(2, x.dim())]
    shape = [-1, *[1] * (x.dim() - 2)]
    mean = x.mean(dims) * ratio
    centred = (x - mean.view(shape)) * is_example
    var = centred.square().mean(dims) * ratio
    y = centred * (scale * torch.rsqrt(var + eps)).view(shape) + bias.view(shape)
    return y, mean.detach(), var.detach()


class _Kernels(torch.autograd.Function):
    """The same on CUDA, in the kernels that torch has for BatchNorm over several devices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        is_example: Tensor,
        ratio: Tensor,
        scale: Tensor,
        bias: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics over all places, corrected, then every element."""
        # The kernel gives 1 / sqrt(v + eps), from which v is taken back.
        mean_of_places, inverse_std = torch.batch_norm_stats(x, eps)
        mean = mean_of_places * ratio
        var_of_places = inverse_std.pow(-2) - eps
        # Clamped: rounding may leave a variance of 0 slightly below.
        var = (ratio * (var_of_places - (ratio - 1) * mean_of_places.square())).clamp_min(0)
        inverse_std = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, ratio, scale, mean, inverse_std)
        ctx.mark_non_differentiable(mean, var)
        return torch.batch_norm_elemt(x, scale, bias, mean, inverse_std, eps), mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient is 0 at padding, so that sums are over examples; so must their means be."""
        x, ratio, scale, mean, inverse_std = ctx.saved_tensors
        sum_dy, sum_dy_x, d_scale, d_bias = torch.batch_norm_backward_reduce(
            grads[0], x, mean, inverse_std, scale, True, True, True
        )
        # The kernel divides both sums by the number of places; the ratio makes it the examples.
        places = torch.full((1,), x.numel() // x.shape[1], dtype=torch.int32, device=x.device)
        dx = torch.batch_norm_backward_elemt(
            grads[0], x, mean, inverse_std, scale, sum_dy * ratio, sum_dy_x * ratio, places
        )
        return dx, None, None, d_scale, d_bias, None
