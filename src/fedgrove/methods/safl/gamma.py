"""Terms of a local loss on the scales of norm layers: what makes channels prunable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...core import Batch, Carry
from ...errors import check
from ...parts.objective import NOT_SETTABLE, Objective
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output


@dataclass(frozen=True)
class GammaL1(Objective):
    r"""Sparse scales: :math:`\lambda \sum_b \lVert \gamma_b \rVert_1` over norm layers.

    (Network slimming; SAFL's guided update.) :math:`\gamma_b` -> ``params``, the weight of norm
    layer b, :math:`\lambda` -> ``weight``. The slope at 0 is 0: a restored channel, whose scale is
    0, is not held there.
    """

    is_loss: ClassVar[bool] = False
    weight: float = 1e-4

    def __post_init__(self) -> None:
        check(self.weight >= 0, "weight", self.weight, "0 or more")

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        """Lambda times the sum of all scales' magnitudes."""
        magnitudes = [params[k].abs() for k in out.net.layout.scales]
        return self.weight * _total(magnitudes, out.logits), {}


@dataclass(frozen=True)
class GammaDistance(Objective):
    r"""Pull to the scales of the group.

    :math:`\mu \sum_b \lVert \gamma_b - \gamma_b^{cluster} \rVert_1` (SAFL's guided update).
    :math:`\gamma_b` -> ``params``, :math:`\gamma_b^{cluster}` -> ``carry[to]``, :math:`\mu` ->
    ``weight``.
    """

    is_loss: ClassVar[bool] = False
    weight: float = 0.004
    to: str = field(default="cluster", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.weight >= 0, "weight", self.weight, "0 or more")

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        """Mu times the sum of all scales' distances."""
        cluster = carry[self.to]
        distances = [(params[k] - cluster[k]).abs() for k in out.net.layout.scales]
        return self.weight * _total(distances, out.logits), {}


def _total(vectors: list[Tensor], like: Tensor) -> Tensor:
    """The sum of all entries."""
    # A net without norm layers has no scales, and cat() of nothing raises.
    if not vectors:
        return like.new_zeros(())
    return torch.cat(vectors).sum()
