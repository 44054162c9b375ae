"""BatchNorm of many clients side by side when some of their batches are short: padding counts for nothing.

A client's channels are normalised by the mean and variance of its own examples. In torch's kernels statistics take no
weights; but padding that is 0 adds nothing to sums, so with r = places / examples the mean is r m and the variance
r (v - (r - 1) m^2) of what the kernel finds (m, v) over all places.
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
    """Normalise x (N, K·C, ...) in train mode, where ``weight`` (K, N) is 1 for examples and 0 for padding.

    ``running`` mean and variance are moved in place, as torch moves them: the variance without bias.
    """
    each = x.shape[1] // len(weight)
    rest = [1] * (x.dim() - 2)
    there = weight.repeat_interleave(each, 0).T.reshape(*x.shape[:2], *rest).to(x.dtype)
    # Numbers are taken from near their mean, that of the first example: squares of large ones would hide the variance.
    near = x[0].detach().reshape(x.shape[1], -1).mean(1)
    from_there = torch.addcmul(-near.view(1, -1, *rest) * there, x, there)
    share = (len(x) / weight.sum(1).clamp_min(1)).repeat_interleave(each)
    kernel = _Kernels.apply if x.is_cuda else _plain
    y, mean, var = kernel(from_there, there, share, *affine, eps)
    count = x.numel() // x.shape[1] / share
    with torch.no_grad():
        for held, new in zip(running, (mean + near, var * count / (count - 1)), strict=True):
            if held is not None:
                held.lerp_(new.to(held.dtype), momentum)
    return y.to(x.dtype)


def _plain(
    x: Tensor, there: Tensor, share: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Where torch has no kernels for the parts of a BatchNorm; x is 0 where nothing is there."""
    x, dims, shape = (
        x.to(scale.dtype),
        [d for d in range(x.dim()) if d != 1],
        [-1, *[1] * (x.dim() - 2)],
    )
    mean = x.mean(dims) * share
    apart = (x - mean.view(shape)) * there
    var = apart.square().mean(dims) * share
    y = apart * (scale * torch.rsqrt(var + eps)).view(shape) + shift.view(shape)
    return y, mean.detach(), var.detach()


class _Kernels(torch.autograd.Function):
    """The same in the kernels that torch has for BatchNorm over several devices."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Tensor, share: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics over all places, corrected, then every element."""
        found, spread = torch.batch_norm_stats(x, eps)
        mean = found * share
        var = (share * (spread.pow(-2) - eps - (share - 1) * found.square())).clamp_min(0)
        spread = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, share, scale, mean, spread)
        ctx.mark_non_differentiable(mean, var)
        return torch.batch_norm_elemt(x, scale, shift, mean, spread, eps), mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """What comes back is 0 where nothing is there, so sums are over examples; so must their means be."""
        x, share, scale, mean, spread = ctx.saved_tensors
        total, along, d_scale, d_shift = torch.batch_norm_backward_reduce(
            grads[0], x, mean, spread, scale, True, True, True
        )
        places = torch.full((1,), x.numel() // x.shape[1], dtype=torch.int32, device=x.device)
        dx = torch.batch_norm_backward_elemt(
            grads[0], x, mean, spread, scale, total * share, along * share, places
        )
        return dx, None, None, d_scale, d_shift, None
