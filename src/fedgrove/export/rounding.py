"""Weights as integers, rounded so that a layer's outputs change least on the inputs it reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
"""The largest magnitude of an int8 weight; -128 is not used, so that steps are symmetric."""
DAMPING = 0.01
"""What is added to the diagonal of the moments before they are inverted, as a share of its mean."""


def rounded(weight: Tensor, scale: Tensor, moments: Tensor) -> Tensor:
    """Return int8 integers q, at most 127, whose ``scale * q`` stands for ``weight``.

    ``scale`` holds one step size per output.

    ::

        min |X (w - scale q)|^2, moments = X^T X, greedily: inputs are rounded in turn, and those
        whose turn is yet to come make up for the error as far as they vary together
        (GPTQ, Frantar et al. 2023, there for language models)

    Two inputs that are always equal, weights .4 and .4 in steps of 1: 0 + 0 would be .8 off,
    0 + 1 is .2 off.

    >>> moments = torch.ones(2, 2)
    >>> rounded(torch.tensor([[0.4, 0.4]]), torch.ones(1), moments)
    tensor([[0, 1]], dtype=torch.int8)
    """
    # A copy: later columns are changed below, to make up for the errors of earlier ones.
    w = weight.double().clone()
    s = scale.double()
    # Without damping, inputs that are always 0 or always equal make the moments singular; the
    # clamp is for a layer that reads nothing but zeros.
    damping = moments.diagonal().mean().clamp_min(1e-12) * DAMPING
    identity = torch.eye(len(moments), dtype=torch.double)
    inverse = torch.linalg.inv(moments.double() + damping * identity)
    # Row j of the Cholesky factor is what GPTQ needs of the inverse once inputs before j are fixed,
    # so the inverse need not be updated after each input.
    upper = torch.linalg.cholesky(inverse, upper=True)
    q = torch.empty_like(w)
    for j in range(w.shape[1]):
        q[:, j] = (w[:, j] / s).round().clamp(-LARGEST, LARGEST)
        error = (w[:, j] - s * q[:, j]) / upper[j, j]
        w[:, j:] -= torch.outer(error, upper[j, j:])
    return q.to(torch.int8)


def patches(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> Tensor:
    """Return what each output of an exported convolution reads, a row per output position.

    ``pads`` are in ONNX's order: the start of each axis, then the end of each axis.

    >>> patches(torch.tensor([[[1.0, 2.0, 3.0]]]), (2,), (1,), (0, 1), (1,)).tolist()
    [[1.0, 2.0], [2.0, 3.0], [3.0, 0.0]]
    """
    axes = len(kernel)
    # F.pad wants (start, end) of the last axis first.
    padding: list[int] = []
    for axis in reversed(range(axes)):
        padding.append(pads[axis])
        padding.append(pads[axis + axes])
    x = F.pad(x, padding)
    # F.unfold knows images only: a sequence becomes an image of height 1.
    if axes == 1:
        x = x.unsqueeze(2)
        kernel = (1, *kernel)
        strides = (1, *strides)
        dilations = (1, *dilations)
    columns = F.unfold(x, tuple(kernel), dilation=tuple(dilations), stride=tuple(strides))
    return columns.transpose(1, 2).reshape(-1, columns.shape[1])
