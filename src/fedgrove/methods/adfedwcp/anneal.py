"""A pull towards the shared model whose weight follows the loss from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ... import trees
from ...core import Batch, Carry
from ...errors import check
from ...parts.objective import NOT_SETTABLE, Loss, Objective, ProblemLoss
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output

LOSS = "annealed.loss"
STEPS = "annealed.steps"
"""What is kept from step to step, in ``carry["aux"]``."""


@dataclass(frozen=True)
class AnnealedPull(Objective):
    r"""AdFedWCP's pull to the shared model, its weight annealed by the loss (its section E.4.1).

    The gradient of :math:`\lambda\,(\theta^t - \theta_g)` is added in every step, where
    :math:`\theta^t` is the personal model at the *start of the round*: a fixed vector, so the term
    is :math:`\lambda\,\langle \theta, \theta^t - \theta_g \rangle`. In the i-th mini-batch of an
    epoch, i = 0, 1, ..., with loss L and the expected loss
    :math:`\bar L = (L + \bar L_{prev}) / 2`:

    .. math::
        \lambda = \min(1.1\, b^{i+1},\ 0.8) \text{ if } L < \bar L, \text{ else }
        \max(b^{i+1} / 1.1,\ 0.1)

    b -> ``base``, :math:`\theta^t` -> ``carry[origin]``, :math:`\theta_g` -> ``carry[to]``. The
    expected loss starts at the round's first loss, so the first step takes the second branch: with
    a base of .5, .4545. ``pull="moving"`` pulls from where the model is now, a proximal term
    (Appendix D.1). A ``fixed`` weight takes the place of the annealed one (its Table 8).
    """

    is_loss: ClassVar[bool] = False
    base: float = 0.5
    pull: Literal["fixed", "moving"] = "fixed"
    fixed: float | None = None
    origin: str = field(default="personal", metadata=NOT_SETTABLE)
    to: str = field(default="model", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(0 < self.base < 1, "base", self.base, "in (0, 1)")
        check(self.pull in ("fixed", "moving"), "pull", self.pull, "'fixed' or 'moving'")
        if self.fixed is not None:
            check(self.fixed >= 0, "fixed", self.fixed, "0 or more")

    def begin(self, params: Tree, carry: Carry) -> Tree:
        """AdFedWCP: before the first step no loss is expected yet."""
        like = next(iter(params.values()))
        return {LOSS: like.new_zeros(()), STEPS: like.new_zeros(())}

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The pull of this step, and what loss is expected in the next."""
        loss, _ = ProblemLoss()(out, params, batch, carry)
        # Only the size of the loss steers the weight: no gradient flows through it.
        loss = loss.detach()
        aux = carry["aux"]
        # As a tensor: an objective has no Python branch on data.
        is_first = aux[STEPS] == 0
        expected = torch.where(is_first, loss, (loss + aux[LOSS]) / 2)
        remembered = {LOSS: expected, STEPS: aux[STEPS] + 1}
        weight = self.weight(loss, expected, batch.position)
        shared = trees.pick(carry[self.to], params)
        if self.pull == "moving":
            return 0.5 * weight * trees.sq_norm(trees.sub(params, shared)), remembered
        away = trees.sub(trees.pick(carry[self.origin], params), shared)
        along = trees.map(lambda theta, vector: (theta * vector).sum(), params, away)
        return weight * torch.stack(list(along.values())).sum(), remembered

    def weight(self, loss: Tensor, expected: Tensor, position: Tensor) -> Tensor:
        """AdFedWCP: the weight lambda of the pull in one step.

        >>> pull = AnnealedPull()
        >>> one, two, first = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(0)
        >>> float(pull.weight(one, two, first)), round(float(pull.weight(two, two, first)), 4)
        (0.550000011920929, 0.4545)
        """
        if self.fixed is not None:
            return torch.as_tensor(self.fixed, dtype=loss.dtype, device=loss.device)
        # `position` counts batches from the start of the epoch, so the pull is strongest there. The
        # paper defines neither i nor the base; both are those of the authors' code.
        power = torch.as_tensor(self.base, dtype=loss.dtype, device=loss.device) ** (position + 1)
        falling = (1.1 * power).clamp(max=0.8)
        otherwise = (power / 1.1).clamp(min=0.1)
        return torch.where(loss < expected, falling, otherwise)
