"""A convolution of many clients as one with groups, in the library's kernels: a group per client.

Fast for many channels and large images. Where groups have few channels the library works through
them one by one; :mod:`.convolution` finds out where another way is faster.

Shapes: K clients, N examples, C channels in and O out, kernels of kh x kw, images of H x W in and
H' x W' out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Convolve many clients at once with torch: x (N, K·C, H, W), weight (K, O, kh, kw, C)."""
    flat_bias = None if bias is None else bias.flatten().to(x.dtype)
    return F.conv2d(x, _filters(weight), flat_bias, stride, padding, groups=len(weight))


def input_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return the clients' gradient of x with torch, from that of y (N, K·O, H', W')."""
    dx: Tensor = _backward(dy, x, weight, stride, padding, (True, False, False))[0]
    return dx


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return the clients' gradient of the weights (K, O, C, kh, kw) with torch."""
    clients, filters, kh, kw, depth = weight.shape
    dw: Tensor = _backward(dy, x, weight, stride, padding, (False, True, False))[1]
    return dw.reshape(clients, filters, depth, kh, kw)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, ...]:
    """torch's own gradients of a convolution: of its input, weights and bias, those wanted."""
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy,
        x,
        _filters(weight),
        None,
        stride,
        padding,
        (1, 1),
        False,
        (0, 0),
        len(weight),
        wanted,
    )
    return gradients


def _filters(weight: Tensor) -> Tensor:
    """Packed weights (K, O, kh, kw, C) as filters (K·O, C, kh, kw), channels last: a view."""
    return weight.permute(0, 1, 4, 2, 3).flatten(0, 1)
