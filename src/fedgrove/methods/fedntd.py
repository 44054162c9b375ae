r"""FedNTD: clients keep what the shared model predicts for the classes an example is not of (Lee,
Jeong, Shin, Bae & Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(v; D_k) + beta KL~(w | v; D_k) from w    -> Train(NotTrueDistillation)
    w    = sum_k n_k w_k / sum_k n_k                                   -> FedAvg

KL~ leaves out every example's true class. With beta = 0 this is FedAvg.

- Shared: the model; clients preserve its predictions for the classes other than the true one.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import Batch, Carry, Give, Setup, Stage, Train
from ..errors import check
from ..parts.objective import NOT_SETTABLE, Loss, Objective
from ..parts.one_model import OneModel, initial_model, send_model
from ..problems import check_has_classes, class_targets, restrict_outputs
from ..trees import Tree
from .fedavg import FedAvg

if TYPE_CHECKING:
    from ..nets import Net, Output


@dataclass(frozen=True)
class NotTrueDistillation(Objective):
    r"""FedNTD's term: what the received model predicts for the classes that an example is *not* of.

    .. math:: \beta\, \tau^2 \sum_{c \ne y} \tilde q^g_c \log
        \frac{\tilde q^g_c}{\tilde q^l_c}, \qquad
        \tilde q_c = \frac{e^{z_c / \tau}}{\sum_{c' \ne y} e^{z_{c'} / \tau}}

    (Lee et al. 2022.) :math:`z^l` -> ``out.logits``, :math:`z^g` -> the logits of ``carry[to]``.
    :math:`\tau^2` is the usual scale of distillation, as the authors' code has it; at the paper's
    :math:`\tau = 1` it is 1. Labels that a client does not have take no part, nor does a client
    whose targets are not classes.

    The teacher runs in eval mode, in the width of the network that is trained, and without a
    gradient. Every method can add the term: the teacher is the model that was received.
    """

    is_loss: ClassVar[bool] = False
    beta: float = 1.0
    tau: float = 1.0
    to: str = field(default="model", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.beta >= 0, "beta", self.beta, "0 or more")
        check(self.tau > 0, "tau", self.tau, "above 0")

    def more_macs(self, net: Net, forward: int) -> int:
        """FedNTD: the multiply-accumulates of the teacher's pass."""
        return forward

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean over the examples that are not padding."""
        targets = class_targets(out.net.problem, out.logits, batch.y, carry.get("client", {}))
        with torch.no_grad():
            teacher = out.net(carry[self.to], batch.x, train=False).logits
        losses = not_true_divergence(out.logits, teacher, targets.y, targets.own, self.tau)
        losses = self.tau**2 * torch.where(targets.is_given, losses, torch.zeros_like(losses))
        return self.beta * (losses * batch.weight).sum() / batch.weight.sum(), {}


def not_true_divergence(
    student: Tensor, teacher: Tensor, y: Tensor, own: Tensor, tau: float | Tensor
) -> Tensor:
    """FedNTD: KL(teacher | student) of each example over all ``own`` classes but the true one."""
    classes = torch.arange(student.shape[1], device=student.device)
    # (n, classes): one row per example, without its true class.
    allowed = own & (classes != y.unsqueeze(1))
    log_student = F.log_softmax(restrict_outputs(student / tau, {"allowed": allowed}), 1)
    log_teacher = F.log_softmax(restrict_outputs(teacher / tau, {"allowed": allowed}), 1)
    terms = log_teacher.exp() * (log_teacher - log_student)
    # Of a class that is left out, both are about as low as numbers get: their difference is
    # rounding, and its weight 0.
    return terms.masked_fill(~allowed, 0.0).sum(1)


@dataclass(frozen=True)
class FedNTD(FedAvg):
    """One model for all; clients learn without forgetting what it knows of other classes."""

    distil: NotTrueDistillation = NotTrueDistillation()
    """The distillation; ``beta`` is its weight, ``tau`` its temperature."""

    def init(self, setup: Setup) -> OneModel:
        """Start at the network's initial parameters; the targets must be classes."""
        check_has_classes(setup.net.problem)
        return initial_model(setup, self.server)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the distillation and send."""
        if verb == "train":
            return (Train(self.objective + self.distil, self.local), Give(send_model))
        return {"use": ()}[verb]
