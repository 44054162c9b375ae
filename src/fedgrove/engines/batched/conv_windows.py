"""A convolution of many clients as windows times weights (im2col): one batched product for all.

All windows are laid out in memory first, by a single copy: a convolution is then a product that
any library does well. The copy is kh·kw times as large as the images, so this pays for small
kernels and few channels; :mod:`.convolution` finds out where.

Images of K clients have their channels last and side by side, (N, H, W, K·C) in memory: the windows
of one client are then rows at equal distances, which a batched product reads and writes without
another copy.

Shapes: K clients, N examples, C channels in and O out, kernels of kh x kw, images of H x W in and
H' x W' out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Convolve many clients by products with windows: x (N, K·C, H, W), packed weight."""
    clients, _, kh, kw, _ = weight.shape
    windows, size = _windows(x, clients, (kh, kw), stride, padding)
    y = _product(windows, weight.flatten(2).mT, len(x), size)
    if bias is None:
        return y
    return y + bias.view(-1, 1, 1).to(y.dtype)


def input_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return the clients' gradient of x: a convolution of that of y with mirrored weights.

    For a stride of 1, and a padding smaller than the kernel.
    """
    clients, _, kh, kw, depth = weight.shape
    if stride != (1, 1) or padding[0] >= kh or padding[1] >= kw:
        raise ValueError(
            "windows give the gradient of images for a stride of 1 and less padding than kernel"
        )
    mirrored = weight.flip(2, 3).permute(0, 4, 2, 3, 1).reshape(clients, depth, -1)
    full_padding = (kh - 1 - padding[0], kw - 1 - padding[1])
    windows, size = _windows(dy, clients, (kh, kw), (1, 1), full_padding)
    return _product(windows, mirrored.mT, len(x), size)


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return the clients' gradient of the weights (K, O, C, kh, kw): a product with windows."""
    clients, filters, kh, kw, depth = weight.shape
    windows, _ = _windows(x, clients, (kh, kw), stride, padding)
    dy_rows = dy.permute(0, 2, 3, 1).reshape(-1, clients, filters).permute(1, 2, 0)
    packed = (dy_rows @ windows).view(clients, filters, kh, kw, depth)
    return packed.permute(0, 1, 4, 2, 3)


def _windows(
    x: Tensor, clients: int, kernel: Pair, stride: Pair, padding: Pair
) -> tuple[Tensor, Pair]:
    """All windows of x, (K, N·H'·W', kh·kw·C), and the size (H', W') of the image they make."""
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    last = padded.permute(0, 2, 3, 1)
    images = last.reshape(*last.shape[:3], clients, -1)
    # A view (N, H', W', K, C, kh, kw). The last reshape copies all windows in one kernel, where
    # torch's own im2col launches one per example.
    views = images.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])
    size = (views.shape[1], views.shape[2])
    rows = views.permute(3, 0, 1, 2, 5, 6, 4)
    return rows.reshape(clients, len(x) * size[0] * size[1], -1), size


def _product(windows: Tensor, weight: Tensor, examples: int, size: Pair) -> Tensor:
    """Windows (K, M, R) times weight (K, R, O) as images (N, K·O, H', W'), channels last."""
    clients, rows, _ = windows.shape
    filters = weight.shape[2]
    y = windows.new_empty(rows, clients, filters)
    # Written in place: a client's rows lie at equal distances.
    torch.bmm(windows, weight, out=y.transpose(0, 1))
    return y.view(examples, *size, clients * filters).permute(0, 3, 1, 2)
