r"""pFed1BS: personal models, pulled to agree in one-bit sketches (Cheng et al., AAAI 2026,
"Personalized Federated Learning with Bidirectional Communication Compression via One-Bit Random
Sketching").

Round :math:`t`, cohort :math:`S_t`; w_k personal, v the consensus, Phi a projection of the n
parameters to m = ``share`` n numbers, which all sides know::

    w_k  = E epochs of min CE(w; D_k) + lambda g(v, Phi w) + mu/2 |w|^2 from w_k   -> SignPull
    z_k  = sign(Phi w_k)                                                          -> one_bit
    v    = sign(sum_k n_k z_k)                                                    -> WeightedMean

A client sends z_k and gets v, m bits each, and uses w_k. At first v is the sketch of the initial
model. With ``pull.weight`` and ``pull.mu`` of 0 every client trains alone.

- Shared: signs of random projections of personal models, one bit each, both ways.
- A client uses: its own model.
- Bytes in the paper: 2 M T m / 8.
- Secure aggregation: yes; clients send one-bit sketches, to which no noise can be added; the vote
  is a sum of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .. import trees
from ..core import (
    Batch,
    Carry,
    Client,
    Edit,
    ExpectedPacket,
    ExpectedReport,
    Give,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net
from ..nets.layout import Layout
from ..parts.common import CommonParts
from ..parts.objective import Loss, Objective
from ..parts.personal import start_personal, use_personal
from ..seeds import torch_rng
from ..trees import Tree

if TYPE_CHECKING:
    from ..nets import Output


# ---- one-bit sketches ----------------------------------------------------------------------------

# The projection is a subsampled randomised Hadamard transform, Phi = S H D P / sqrt(m): P fills the
# vector up with zeros to a power of two n', D flips signs at random, H is the Hadamard matrix of 1
# and -1, S takes m of the n' rows. H is never written out: it takes about n' log n' operations.


PROJECTION = "projection"
CONSENSUS = "consensus"
"""Names in the carry: the projection, and the signs that all agreed on."""


TRANSFORM_BLOCK = 64
"""The transform multiplies by matrices of this size: five times as fast as sums of pairs."""


def block_of(size: int, dtype: torch.dtype) -> Tensor:
    """pFed1BS: the Hadamard matrix of a size that is a power of two.

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
    """pFed1BS: the product of the Hadamard matrix with a vector whose length is a power of two.

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
    """pFed1BS: D, S and a block of H: the projection to ``rows`` rows; equal on all sides.

    They are drawn once and for all: nothing has to be sent.
    """
    length = 1 << (numbers - 1).bit_length()
    draw = torch_rng(0, "sketch", numbers, rows)
    signs = 2 * torch.randint(2, (numbers,), generator=draw) - 1
    chosen = torch.randperm(length, generator=draw)[:rows]
    # The block is a tensor of the carry like the others, so that engines bring it to the device.
    return {"signs": signs.to(dtype), "rows": chosen, "block": block_of(TRANSFORM_BLOCK, dtype)}


def project(projection: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """pFed1BS: the projections of a vector: Phi x."""
    rows = projection["rows"]
    length = 1 << (x.shape[-1] - 1).bit_length()
    padded = functional.pad(x * projection["signs"], (0, length - x.shape[-1]))
    scale: float = rows.shape[-1] ** -0.5
    return scale * hadamard(padded, projection["block"])[rows]


def rows_of(numbers: int, share: float) -> int:
    """pFed1BS: how many bits a sketch of n numbers has."""
    return max(1, round(share * numbers))


def one_bit(projected: Tensor) -> Tensor:
    """pFed1BS: the signs, as booleans: a 0 counts as positive, so that one bit is enough."""
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

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The pull; the data do not matter."""
        z = project(carry[PROJECTION], trees.flatten(params))
        scaled = (self.gamma * z).abs()
        # log cosh x = |x| + log(1 + exp(-2|x|)) - log 2, which does not overflow.
        smooth = (scaled + functional.softplus(-2 * scaled)) / self.gamma
        disagreement = (smooth - carry[CONSENSUS]["signs"] * z).sum()
        decay = self.mu / 2 * trees.sq_norm(params)
        return self.weight * disagreement + decay, {}


# ---- the method ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The round, and the bits that clients agreed on: true where a sign is positive."""

    round: int
    consensus: Tree


@dataclass(frozen=True)
class PFed1BS(CommonParts):
    """Personal models that share nothing but the signs of random projections, both ways."""

    share: float = 0.1
    """m/n, the number of bits in a sketch per parameter."""
    pull: SignPull = SignPull()
    """The pull towards the consensus, with its weights and the sharpness of its signs."""

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, "share", self.share, "in (0, 1]")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """All agree on the sketch of the initial model."""
        return State(0, self._sketch(setup.params, setup.layout))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Nothing: every client uses its own model."""
        return {}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort gets the consensus and trains."""
        send = {CONSENSUS: Packet(state.consensus)}
        return [Task(client, send) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The vote of the cohort, weighted by examples."""
        mean = self.mean.start(signs_of(state.consensus))
        for report in reports:
            mean.add(signs_of(report.give["sketch"].values), report.examples)
        return State(state.round + 1, trees.map(one_bit, mean.value()))

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the personal model towards the consensus, and send its sketch."""
        return {
            "train": (
                Edit(self._begin),
                Train(self.objective + self.pull, self.local, start="personal"),
                Give(self._send, self._expected),
            ),
            "use": (Edit(use_personal),),
        }[verb]

    def _begin(self, carry: Carry, client: Client) -> Carry:
        """The personal model, the consensus as numbers, and the projection."""
        begun = start_personal(carry, client)
        begun[CONSENSUS] = signs_of(carry[CONSENSUS])
        begun[PROJECTION] = self._projection(client.start, client.layout)
        return begun

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """The sketch goes up, the model stays."""
        sketch = self._sketch(carry["local"], client.layout)
        return Outcome({"sketch": Packet(sketch)}, memory={"personal": carry["local"]})

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        """A sketch looks like the consensus."""
        return ExpectedReport({"sketch": ExpectedPacket.of(task.send[CONSENSUS].values)})

    def _projection(self, model: Tree, layout: Layout) -> Tree:
        rows = rows_of(layout.size, self.share)
        return projection(layout.size, rows, model[layout.params[0]].dtype)

    def _sketch(self, model: Tree, layout: Layout) -> Tree:
        """The signs of the projections of all parameters."""
        vector = trees.flatten(trees.pick(model, layout.params))
        return {"signs": one_bit(project(self._projection(model, layout), vector))}

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """m bits down and m bits up."""
        return round(2 * rows_of(net.layout.size, self.share) / 8 * cohort * rounds)


def signs_of(bits: Mapping[str, torch.Tensor]) -> Tree:
    """pFed1BS: bits as 1 and -1."""
    return trees.map(lambda bit: 2.0 * bit - 1.0, bits)
