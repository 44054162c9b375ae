r"""Updates as products of thin matrices: the singular vectors that hold most of the energy.

(FedKD, Wu et al. 2022, "dynamic gradient approximation".) A weight of more than one dimension is
seen as a matrix (outputs, the rest). Factors travel in shapes that do not depend on the rank: rows
that are not needed are zeros, which a codec leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import check
from ...trees import Tree


@dataclass(frozen=True)
class Energy:
    r"""How much of an update's energy travels: :math:`T = T_{start} + (T_{end} - T_{start})\,t`.

    :math:`t` is the share of the rounds that are over; ``first`` and ``last`` are
    :math:`T_{start}` and :math:`T_{end}`. With ``first`` = ``last`` = 1 nothing is factored.

    >>> Energy()(0.5), Energy(1.0, 1.0).is_all
    (0.965, True)
    """

    first: float = 0.95
    last: float = 0.98

    def __post_init__(self) -> None:
        check(0 < self.first <= 1, "first", self.first, "above 0, at most 1")
        check(self.first <= self.last <= 1, "last", self.last, f"in [{self.first}, 1], above first")

    def __call__(self, progress: float) -> float:
        """The share of the energy after a share ``progress`` of the rounds."""
        return self.first + (self.last - self.first) * progress

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out, ever."""
        return self.first >= 1


def largest_rank(shape: tuple[int, ...]) -> int:
    """The largest rank whose factors are fewer numbers than the matrix; 0 if there is none.

    Of K singular values, K (rows + columns + 1) numbers travel in place of rows x columns.

    >>> largest_rank((64, 64)), largest_rank((16, 6, 5, 5)), largest_rank((10,))
    (31, 14, 0)
    """
    if len(shape) < 2:
        return 0
    rows = shape[0]
    columns = torch.Size(shape[1:]).numel()
    # The largest K with K (rows + columns + 1) < rows x columns.
    return (rows * columns - 1) // (rows + columns + 1)


def rank_at(singular_values: Tensor, energy: float) -> int:
    r"""The least K with :math:`\sum_{i \le K} \sigma_i^2 \ge T \sum_i \sigma_i^2`; 0 of nothing.

    >>> rank_at(torch.tensor([3.0, 2.0, 1.0]), 0.9)
    2
    """
    squares = singular_values.double().square()
    total = squares.sum()
    if not total > 0:
        return 0
    enough = squares.cumsum(0) >= energy * total
    # The sum of all may miss an energy of 1 by rounding: then all are kept.
    reached = enough.nonzero()
    if not len(reached):
        return len(singular_values)
    return int(reached[0]) + 1


def factored(update: Tensor, energy: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """The factors u (most, rows), s (most,), v (most, columns), zeros beyond the rank.

    ``most`` is :func:`largest_rank`. None where that is not enough for the energy, or where the
    update is not finite and has no factors.
    """
    most = largest_rank(tuple(update.shape))
    matrix = update.reshape(len(update), -1)
    if not most or not bool(torch.isfinite(matrix).all()):
        return None
    left, singular_values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = rank_at(singular_values, energy)
    if rank > most:
        return None
    # Which of two opposite signs a solver gives is an accident of rounding: the entry of largest
    # size of each left vector is made positive.
    largest = left.gather(0, left.abs().argmax(0, keepdim=True)).squeeze(0)
    sign = torch.where(largest < 0, -1.0, 1.0).to(left)
    left = left * sign
    right = right * sign[:, None]
    u, s, v = empty_factors(update)
    u[:rank] = left.T[:rank]
    s[:rank] = singular_values[:rank]
    v[:rank] = right[:rank]
    return u, s, v


def empty_factors(update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of rank 0, in the shapes that travel."""
    most = largest_rank(tuple(update.shape))
    rows = len(update)
    columns = update[0].numel()
    zeros = update.new_zeros
    return zeros(most, rows), zeros(most), zeros(most, columns)


def product(u: Tensor, s: Tensor, v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The matrix that factors stand for, in double precision and in its own shape.

    Three finite float32 may have a product that only double precision holds.
    """
    return ((u.double().T * s.double()) @ v.double()).reshape(shape)


def factorable(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The weights that factors may stand for."""
    return tuple(name for name, shape in shapes.items() if largest_rank(tuple(shape)))


def split(update: Tree, energy: float) -> tuple[Tree, Tree, Tree, Tree]:
    """Updates by name as (what travels whole, u, s, v); their sum is what a receiver reads.

    A matrix that takes too many factors travels whole beside factors of zeros, and the other way
    round.
    """
    whole: Tree = {}
    us: Tree = {}
    ss: Tree = {}
    vs: Tree = {}
    for name, matrix in update.items():
        found = factored(matrix, energy)
        if found is None:
            whole[name] = matrix
            found = empty_factors(matrix)
        else:
            whole[name] = torch.zeros_like(matrix)
        us[name], ss[name], vs[name] = found
    return whole, us, ss, vs
