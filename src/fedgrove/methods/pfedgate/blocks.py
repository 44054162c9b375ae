r"""Blocks of weights, and which of them a device can afford.

(pFedGate, Chen et al. 2023.) The weights of a layer are cut, in the order they are stored, into
``count`` blocks of one size, the last one perhaps shorter. A score for each block says how
important it is; the blocks in use are a knapsack: worth the most, within a share of all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ...core import GRADIENT_PASSES, Batch, Carry
from ...errors import InputError
from ...nets.layout import Layout
from ...parts.objective import Objective
from ...trees import Mask, Tree

if TYPE_CHECKING:
    from ...nets import Net, Output


@dataclass(frozen=True)
class Cut:
    """The blocks of one weight: ``count`` of them from number ``first``, of ``size`` numbers."""

    name: str
    shape: tuple[int, ...]
    first: int
    count: int
    size: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each block has."""
        last = torch.Size(self.shape).numel() - self.size * (self.count - 1)
        return (self.size,) * (self.count - 1) + (last,)


def cuts(layout: Layout, count: int) -> tuple[Cut, ...]:
    """All prunable weights in ``count`` blocks each; in fewer where they have fewer numbers.

    25 numbers in 10 blocks: of ceil(25 / 10) = 3 numbers, which makes 9, the last with 1.
    """
    found = []
    first = 0
    for name in layout.prunable:
        shape = tuple(layout.shapes[name])
        numbers = torch.Size(shape).numel()
        size = -(-numbers // min(count, numbers))
        blocks = -(-numbers // size)
        found.append(Cut(name, shape, first, blocks, size))
        first += blocks
    return tuple(found)


def sizes_of(blocks: Sequence[Cut]) -> tuple[int, ...]:
    """The numbers of all blocks in order."""
    sizes: list[int] = []
    for cut in blocks:
        sizes += cut.sizes
    return tuple(sizes)


def check_budget(blocks: Sequence[Cut], budget: float) -> None:
    """Refuse a budget that does not hold the first block of each weight, which always stays."""
    least = sum(cut.sizes[0] for cut in blocks)
    total = sum(sizes_of(blocks))
    if budget * total < least:
        raise InputError(
            f"budget is {budget}; the first block of every layer always stays, and these are "
            f"{least:,} of {total:,} weights: give {least / total:.3g} or more, or more blocks."
        )


def chosen(scores: Tensor, blocks: Sequence[Cut], budget: float) -> Tensor:
    r"""The blocks in use, as booleans: greedy in :math:`score_i / size_i` while they fit.

    :math:`\max \sum_i m_i s_i` with :math:`\sum_i m_i size_i \le budget \sum_i size_i`. The first
    block of each weight comes before all others, so that no layer is cut off. A block that does not
    fit is passed over, and smaller ones behind it may still be taken. Pure: it may be mapped over
    clients.
    """
    # Made on the device: a captured step may copy nothing to it.
    sizes = torch.cat([_sizes_on(scores.device, cut) for cut in blocks])
    comes_first = torch.zeros(len(sizes), dtype=torch.bool, device=scores.device)
    for cut in blocks:
        comes_first[cut.first] = True
    worth = torch.where(comes_first, torch.inf, scores.detach().double() / sizes)
    # Stable: of two blocks that are worth the same the earlier one, on every device.
    order = torch.sort(worth, descending=True, stable=True).indices
    ordered = sizes[order]
    room = budget * sizes.sum()
    taken = []
    # One at a time, with no branch on data: what fits depends on what was taken before.
    for place in range(len(blocks_in(blocks))):
        fits = ordered[place] <= room
        room = room - torch.where(fits, ordered[place], 0.0)
        taken.append(fits)
    return torch.zeros_like(comes_first).scatter(0, order, torch.stack(taken))


def _sizes_on(device: torch.device, cut: Cut) -> Tensor:
    sizes = torch.full((cut.count,), cut.size, dtype=torch.float64, device=device)
    sizes[-1] = cut.sizes[-1]
    return sizes


def blocks_in(blocks: Sequence[Cut]) -> range:
    """The numbers of all blocks."""
    return range(sum(cut.count for cut in blocks))


def spread_out(values: Tensor, blocks: Sequence[Cut]) -> Tree:
    """One value for each block as one for each weight, by name."""
    tree: Tree = {}
    for cut in blocks:
        numbers = torch.Size(cut.shape).numel()
        owner = torch.arange(numbers, device=values.device) // cut.size
        tree[cut.name] = values[cut.first + owner].reshape(cut.shape)
    return tree


def block_mask(scores: Tensor, blocks: Sequence[Cut], budget: float) -> Mask:
    """The weights in use by these scores."""
    return spread_out(chosen(scores, blocks, budget), blocks)


# ---- the gating layer ----------------------------------------------------------------------------


class GatingLayer(nn.Module):
    """A score for each block from one example: the example at mean 0 and deviation 1, one layer."""

    def __init__(self, features: int, blocks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, elementwise_affine=False)
        self.linear = nn.Linear(features, blocks)

    def forward(self, x: Tensor) -> Tensor:
        """The scores before the sigmoid, (examples, blocks)."""
        logits: Tensor = self.linear(self.norm(x.flatten(1)))
        return logits


def batch_scores(logits: Tensor, weight: Tensor) -> Tensor:
    """The mean over a batch of the sigmoid of each example's scores, padding left out."""
    return (torch.sigmoid(logits) * weight[:, None]).sum(0) / weight.sum()


@dataclass(frozen=True)
class GatedLoss(Objective):
    r"""The loss of the model in the blocks that a batch's gates choose; it trains the gating layer.

    The forward pass sees gates of 0 and 1, the gradient their scores ("straight through"):
    :math:`m + s - sg(s)`. The model itself, ``carry["model"]``, is a constant.
    """

    only_in: ClassVar[str] = "pfedgate"
    count: int
    budget: float

    def more_macs(self, net: Net, forward: int) -> int:
        """A gradient through the model, beside that of the gating layer."""
        return GRADIENT_PASSES * net.nets["model"].layout.macs

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        """The mean loss over the examples that are not padding."""
        net = out.nets["model"]
        blocks = cuts(net.layout, self.count)
        scores = batch_scores(out.logits, batch.weight)
        gates = chosen(scores, blocks, self.budget).to(scores) + scores - scores.detach()
        model = carry["model"]
        gated = dict(model)
        for name, gate in spread_out(gates, blocks).items():
            gated[name] = model[name] * gate
        # Not in train mode: running statistics are the model's, which is not trained here.
        logits = net(gated, batch.x, train=False).logits
        losses = net.problem.losses(logits, batch.y, carry.get("client", {}))
        return (losses * batch.weight).sum() / batch.weight.sum(), {}


def summed_scores(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    """For a Measure: the sum over examples of the scores, and how many examples."""
    logits = net(params, batch.x, train=False).logits
    scores = torch.sigmoid(logits) * batch.weight[:, None]
    return {"sum": scores.sum(0), "examples": batch.weight.sum()}
