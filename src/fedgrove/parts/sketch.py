r"""One-bit sketches: the signs of a few random projections of a model, and a pull towards them.

The projection is a subsampled randomised Hadamard transform,
:math:`\Phi = \frac{1}{\sqrt m} S H D P`: P fills the vector up with zeros to a power of two n', D
flips signs at random, H is the Hadamard matrix of 1 and -1, S takes m of the n' rows. H takes
n' log2 n' additions and no room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from .. import trees
from ..core import Batch, Carry
from ..errors import check
from ..seeds import torch_rng
from ..trees import Tree
from .objective import Objective

if TYPE_CHECKING:
    from ..nets import Output

PROJECTION = "projection"
CONSENSUS = "consensus"
"""Where the carry holds the projection, and the signs that all agreed on."""


def hadamard(x: Tensor) -> Tensor:
    """The product of the Hadamard matrix with a vector whose length is a power of two.

    >>> hadamard(torch.tensor([1.0, 2.0, 3.0, 5.0]))
    tensor([11., -3., -5.,  1.])
    """
    length = x.shape[-1]
    width = 1
    while width < length:
        # Neighbouring blocks a and b of this width become a + b and a - b.
        pairs = x.reshape(-1, 2, width)
        x = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        width *= 2
    return x.reshape(length)


def projection(numbers: int, rows: int, dtype: torch.dtype) -> Tree:
    """D and S, the signs and the rows of a projection to so many rows; the same on all sides.

    They are drawn once and for all: nothing has to be sent.
    """
    length = 1 << (numbers - 1).bit_length()
    draw = torch_rng(0, "sketch", numbers, rows)
    signs = 2 * torch.randint(2, (numbers,), generator=draw) - 1
    chosen = torch.randperm(length, generator=draw)[:rows]
    return {"signs": signs.to(dtype), "rows": chosen}


def project(projection: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The projections of a vector: Phi x."""
    rows = projection["rows"]
    length = 1 << (x.shape[-1] - 1).bit_length()
    padded = functional.pad(x * projection["signs"], (0, length - x.shape[-1]))
    scale: float = rows.shape[-1] ** -0.5
    return scale * hadamard(padded)[rows]


def rows_of(numbers: int, share: float) -> int:
    """How many bits a sketch of so many numbers has."""
    return max(1, round(share * numbers))


def one_bit(projected: Tensor) -> Tensor:
    """The signs, as booleans: a 0 counts as positive, so that one bit is enough."""
    return projected >= 0


@dataclass(frozen=True)
class SignPull(Objective):
    r"""Pull a model to where the signs of its projections are those agreed on (pFed1BS).

    :math:`\lambda \sum_i \left( \frac1\gamma \log\cosh(\gamma z_i) - v_i z_i \right)
    + \frac{\mu}{2} \lVert w \rVert_2^2` with :math:`z = \Phi w`: a smooth :math:`\lVert z
    \rVert_1 - \langle v, z \rangle`, which is 0 where the signs agree. Its gradient is
    :math:`\lambda \Phi^\top (\tanh(\gamma z) - v) + \mu w`. w -> ``params``, v ->
    ``carry["consensus"]`` (1 and -1), Phi -> ``carry["projection"]``. The constant that log cosh
    lacks where it is nearly |z|, log 2 / gamma, has no gradient.
    """

    weight: float = 5e-4
    """lambda"""
    mu: float = 1e-5
    gamma: float = 1e4

    def __post_init__(self) -> None:
        check(self.weight >= 0, "weight", self.weight, "0 or more")
        check(self.mu >= 0, "mu", self.mu, "0 or more")
        check(self.gamma > 0, "gamma", self.gamma, "above 0")

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        """The pull; the data do not matter."""
        z = project(carry[PROJECTION], trees.flat(params))
        scaled = (self.gamma * z).abs()
        # log cosh x = |x| + log(1 + exp(-2|x|)) - log 2, which does not overflow.
        smooth = (scaled + functional.softplus(-2 * scaled)) / self.gamma
        disagreement = (smooth - carry[CONSENSUS]["signs"] * z).sum()
        decay = self.mu / 2 * trees.sq_norm(params)
        return self.weight * disagreement + decay, {}
