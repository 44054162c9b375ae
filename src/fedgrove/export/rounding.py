"""Weights as whole numbers, rounded so that what a layer gives changes least on inputs it was seen to take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
DAMPING = 0.01


def rounded(weight: Tensor, scale: Tensor, moments: Tensor) -> Tensor:
    """Whole numbers q, at most 127, whose ``scale * q`` stands for a weight (outputs, inputs), a scale per output.

    ::

        min |X (w - scale q)|^2, moments = X^T X, greedily: inputs are rounded in turn, and those whose turn is yet to
        come make up for the error as far as they vary together  (GPTQ, Frantar et al. 2023, there for language models)

    Two inputs that are always equal, weights .4 and .4 in steps of 1: 0 + 0 would be .8 off, 0 + 1 is .2 off.

    >>> moments = torch.ones(2, 2)
    >>> rounded(torch.tensor([[0.4, 0.4]]), torch.ones(1), moments)
    tensor([[0, 1]], dtype=torch.int8)
    """
    w, s = weight.double().clone(), scale.double()
    spread = moments.diagonal().mean().clamp_min(1e-12) * DAMPING
    inverse = torch.linalg.inv(
        moments.double() + spread * torch.eye(len(moments), dtype=torch.double)
    )
    upper = torch.linalg.cholesky(inverse, upper=True)
    q = torch.empty_like(w)
    for j in range(w.shape[1]):
        q[:, j] = (w[:, j] / s).round().clamp(-LARGEST, LARGEST)
        w[:, j:] -= torch.outer((w[:, j] - s * q[:, j]) / upper[j, j], upper[j, j:])
    return q.to(torch.int8)


def patches(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> Tensor:
    """What each output of a convolution over one or two axes reads, a row per output; ``pads`` as ONNX has them.

    >>> patches(torch.tensor([[[1.0, 2.0, 3.0]]]), (2,), (1,), (0, 1), (1,)).tolist()
    [[1.0, 2.0], [2.0, 3.0], [3.0, 0.0]]
    """
    axes = len(kernel)
    x = F.pad(x, [pads[i + side] for i in reversed(range(axes)) for side in (0, axes)])
    if axes == 1:
        x, kernel, strides, dilations = x.unsqueeze(2), (1, *kernel), (1, *strides), (1, *dilations)
    read = F.unfold(x, tuple(kernel), dilation=tuple(dilations), stride=tuple(strides))
    return read.transpose(1, 2).reshape(-1, read.shape[1])
