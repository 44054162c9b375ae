r"""One-bit sketches: the signs of a few random projections of a model, and a pull towards them.

The projection is a subsampled randomised Hadamard transform,
:math:`\Phi = \frac{1}{\sqrt m} S H D P`: P fills the vector up with zeros to a power of two n', D
flips signs at random, H is the Hadamard matrix of 1 and -1, S takes m of the n' rows. H is
never written out: it takes about n' log n' operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ... import trees
from ...core import Batch, Carry
from ...errors import check
from ...parts.objective import Objective
from ...seeds import torch_rng
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output

PROJECTION = "projection"
CONSENSUS = "consensus"
"""Where the carry holds the projection, and the signs that all agreed on."""


BLOCK = 64
"""The transform multiplies by matrices of this size: five times as fast as sums of pairs."""


def block_of(size: int, dtype: torch.dtype) -> Tensor:
    """The Hadamard matrix of a size that is a power of two.

    >>> block_of(2, torch.int64)
    tensor([[ 1,  1],
            [ 1, -1]])
    """
    block = torch.ones(1, 1, dtype=dtype)
    while len(block) < size:
        # Sylvester's construction.
        above = torch.cat([block, block], dim=1)
        below = torch.cat([block, -block], dim=1)
        block = torch.cat([above, below])
    return block


def hadamard(x: Tensor, block: Tensor) -> Tensor:
    """The product of the Hadamard matrix with a vector whose length is a power of two.

    ``block`` is a smaller such matrix: the whole one is a Kronecker product of it with itself.

    >>> hadamard(torch.tensor([1.0, 2.0, 3.0, 5.0]), block_of(2, torch.float32))
    tensor([11., -3., -5.,  1.])
    """
    remaining = x.shape[-1]
    while remaining > 1:
        size = min(remaining, block.shape[-1])
        # The upper left corner of a Hadamard matrix is one. The transposition brings the next axis
        # to the end; after all of them they are in order again.
        x = (x.reshape(-1, size) @ block[:size, :size]).T.reshape(-1)
        remaining //= size
    return x


def projection(numbers: int, rows: int, dtype: torch.dtype) -> Tree:
    """D, S and a block of H: what projects to so many rows; the same on all sides.

    They are drawn once and for all: nothing has to be sent.
    """
    length = 1 << (numbers - 1).bit_length()
    draw = torch_rng(0, "sketch", numbers, rows)
    signs = 2 * torch.randint(2, (numbers,), generator=draw) - 1
    chosen = torch.randperm(length, generator=draw)[:rows]
    # The block is a tensor of the carry like the others, so that engines bring it to the device.
    return {"signs": signs.to(dtype), "rows": chosen, "block": block_of(BLOCK, dtype)}


def project(projection: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The projections of a vector: Phi x."""
    rows = projection["rows"]
    length = 1 << (x.shape[-1] - 1).bit_length()
    padded = functional.pad(x * projection["signs"], (0, length - x.shape[-1]))
    scale: float = rows.shape[-1] ** -0.5
    return scale * hadamard(padded, projection["block"])[rows]


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

    is_loss: ClassVar[bool] = False

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
        z = project(carry[PROJECTION], trees.flatten(params))
        scaled = (self.gamma * z).abs()
        # log cosh x = |x| + log(1 + exp(-2|x|)) - log 2, which does not overflow.
        smooth = (scaled + functional.softplus(-2 * scaled)) / self.gamma
        disagreement = (smooth - carry[CONSENSUS]["signs"] * z).sum()
        decay = self.mu / 2 * trees.sq_norm(params)
        return self.weight * disagreement + decay, {}
