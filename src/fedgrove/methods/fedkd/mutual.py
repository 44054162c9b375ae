"""Two networks that learn at once, each from the data and from the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core import Batch, Carry
from ...errors import check
from ...parts.objective import Objective
from ...problems import CLASSES, AnyProblem, restrict_outputs
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output

MENTEE = "mentee."
MENTOR = "mentor."
"""How the names of their parameters begin in the tree of a :class:`Pair`."""


class Pair(nn.Module):
    """A mentee and a mentor as one module: its output is the logits of the first, then the other's.

    One Train stage moves both in one step. Optimisers work number by number, so that each moves as
    it would alone.
    """

    def __init__(self, mentee: nn.Module, mentor: nn.Module) -> None:
        super().__init__()
        self.mentee = mentee
        self.mentor = mentor

    def forward(self, x: Tensor) -> Tensor:
        """Both logits side by side, (examples, 2 outputs)."""
        return torch.cat([self.mentee(x), self.mentor(x)], 1)


def join(mentee: Tree, mentor: Tree) -> Tree:
    """The tree of a pair."""
    pair = {MENTEE + name: value for name, value in mentee.items()}
    pair |= {MENTOR + name: value for name, value in mentor.items()}
    return pair


def part(pair: Tree, which: str) -> Tree:
    """One network's tree of a pair, ``which`` being :data:`MENTEE` or :data:`MENTOR`."""
    mine = {}
    for name, value in pair.items():
        if name.startswith(which):
            mine[name.removeprefix(which)] = value
    return mine


@dataclass(frozen=True)
class MutualDistillation(Objective):
    r"""FedKD's losses of a pair, task loss and adaptive mutual distillation of both.

    :math:`L^s_t + L^m_t + \delta\,[D(m, s) + D(s, m)] / (L^s_t + L^m_t)` (Wu et al. 2022, Eqs. 1 to
    4): :math:`L_t` the task losses of mentee s and mentor m, :math:`D(a, b)` how far b's
    predictions are from a's, :math:`\delta` -> ``weight``. a and the divisor are constants: each
    network learns by its own task and towards the other, and neither by being taught badly.
    """

    only_in: ClassVar[str] = "fedkd"
    weight: float = 1.0

    def __post_init__(self) -> None:
        check(self.weight >= 0, "weight", self.weight, "0 or more")

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        """The sum of the two networks' losses; each network's gradient is that of its own."""
        own = carry.get("client", {})
        problem = out.net.problem
        mentee, mentor = out.logits.chunk(2, 1)
        examples = batch.weight.sum()

        def mean(per_example: Tensor) -> Tensor:
            return (per_example * batch.weight).sum() / examples

        mentee_task = mean(problem.losses(mentee, batch.y, own))
        mentor_task = mean(problem.losses(mentor, batch.y, own))
        apart = mean(divergence(problem, mentor.detach(), mentee, own))
        apart = apart + mean(divergence(problem, mentee.detach(), mentor, own))
        # Where both are sure of the data they are all but 0: no division by that.
        tasks = (mentee_task + mentor_task).detach().clamp_min(SMALLEST_LOSS)
        return mentee_task + mentor_task + self.weight * apart / tasks, {}


SMALLEST_LOSS = 1e-3
"""The divisor of the distillation is at least this."""


def divergence(problem: AnyProblem, teacher: Tensor, learner: Tensor, own: Tree) -> Tensor:
    r"""How far each example's prediction is from a teacher's.

    Of classes :math:`KL(p_{teacher} \,\|\, p_{learner})`; of numbers and of several labels, for
    which the paper has no rule, half the squared distance of the outputs.
    """
    if problem.name != CLASSES.name:
        return 0.5 * (learner - teacher).square().sum(1)
    taught = F.log_softmax(restrict_outputs(teacher, own), 1)
    learnt = F.log_softmax(restrict_outputs(learner, own), 1)
    return (taught.exp() * (taught - learnt)).sum(1)
