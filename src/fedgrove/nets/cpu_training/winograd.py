"""Winograd's algorithm for a series: 4 neighbouring outputs of a kernel of width 5 by 8 products.

(Lavin & Gray 2016, Sec. 4, in one dimension; plainly they take 20.) The products add up other
numbers than the plain sums: with 64 channels in float32 the outputs are off by 6e-7 of their size,
where plain sums are by 1e-7. More outputs at once would save little, and cost digits. A sum whose
terms are all 0 may come out as a rest of rounding, unless a whole tile or a whole kernel is 0.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 5
"""Of the kernel."""
TILE = 4
"""The number of neighbouring outputs that are computed together."""
FINITE_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)
"""Where polynomials are evaluated: small numbers, and their powers are exact in binary."""
POINTS = len(FINITE_POINTS) + 1
"""The last point is infinity."""


class Transforms(NamedTuple):
    r"""The matrices: a tile is :math:`A^\top[(G g) \odot (B^\top d)]` of a kernel and 8 inputs.

    The product of a polynomial with 4 coefficients and one with 5 has 8, and is known from its
    values at 8 points: evaluate both (:math:`A` and :math:`G`), multiply, interpolate (:math:`B`).
    A tile is that, transposed.
    """

    kernel: Tensor
    """G, (8, 5), times the scale."""
    block: Tensor
    """The first half of B, (4, 8): for the first 4 inputs."""
    next_block: Tensor
    """The second half of B, (4, 8)."""
    outputs: Tensor
    """A, (8, 4)."""


@cache
def transforms(dtype: torch.dtype, scale: float = 1.0) -> Transforms:
    """Return the matrices of a Winograd convolution; outputs are multiplied by ``scale``.

    >>> kernel, block, next_block, outputs = transforms(torch.float64)
    >>> g = torch.tensor([1.0, 0, 0, 0, 2]).double()
    >>> d = torch.arange(8).double()
    >>> values = block.T @ d[:4] + next_block.T @ d[4:]
    >>> (outputs.T @ ((kernel @ g) * values)).round()  # d[i] + 2 d[i + 4]
    tensor([ 8., 11., 14., 17.], dtype=torch.float64)
    """
    interpolate = torch.linalg.inv(evaluate(TILE + WIDTH - 1))
    return Transforms(
        kernel=(evaluate(WIDTH) * scale).to(dtype),
        block=interpolate[:TILE].to(dtype),
        next_block=interpolate[TILE:].to(dtype),
        outputs=evaluate(TILE).to(dtype),
    )


def evaluate(coefficients: int) -> Tensor:
    """Return the values of a polynomial at all points of a Winograd convolution, as a matrix."""
    points = torch.tensor(FINITE_POINTS, dtype=torch.float64)
    powers = points[:, None] ** torch.arange(coefficients)
    # At infinity only the highest power counts.
    at_infinity = torch.eye(coefficients, dtype=torch.float64)[-1:]
    return torch.cat([powers, at_infinity])
