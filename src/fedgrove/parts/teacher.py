"""Objectives that hold the network in training against another one: a teacher, or an opponent.

Both take the other networks' weights from trees of the carry and run them in eval mode, in the
width of the network that is trained: where channels are pruned these trees are narrowed with it.
No gradient reaches them. Added to another objective they compose with any method that has such
trees: ``ProblemLoss() + NotTrueDistillation()`` needs nothing but the model that was received.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import Batch, Carry
from ..errors import InputError, UnfitError, check
from ..nets.layout import Layout
from ..problems import class_targets, restrict_outputs
from ..trees import Tree
from .objective import NOT_SETTABLE, Objective

if TYPE_CHECKING:
    from ..nets import Net, Output

SMALLEST_SQUARE = 1e-16
"""Features shorter than the root of this count as this long: all of them may be 0 after a ReLU."""


# ---- model-contrastive learning ------------------------------------------------------------------


@dataclass(frozen=True)
class ModelContrast(Objective):
    r"""MOON's term: features near the shared model's, away from those of the client's last model.

    .. math:: \mu\, \ell_{con} = -\mu \log \frac{e^{s(z, z_{glob}) / \tau}}
        {e^{s(z, z_{glob}) / \tau} + e^{s(z, z_{prev}) / \tau}}

    (Li, He & Song 2021, Eq. 3, and the weight of Eq. 4.) :math:`s` is the cosine; :math:`z` ->
    ``out.features``, the input of the last linear layer; :math:`z_{glob}` -> the same of
    ``carry[to]``, :math:`z_{prev}` -> of ``carry[away]``. Where both are the same model it is
    :math:`\mu \log 2`, whatever the features.
    """

    is_loss: ClassVar[bool] = False
    mu: float = 1.0
    tau: float = 0.5
    to: str = field(default="model", metadata=NOT_SETTABLE)
    away: str = field(default="previous", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.mu >= 0, "mu", self.mu, "0 or more")
        check(self.tau > 0, "tau", self.tau, "above 0")

    def more_macs(self, net: Net, forward: int) -> int:
        """A pass of each of the other two models."""
        return 2 * forward

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        """The mean over the examples that are not padding."""
        z = features_of(out)
        with torch.no_grad():
            z_near = features_of(out.net(carry[self.to], batch.x, train=False))
            z_far = features_of(out.net(carry[self.away], batch.x, train=False))
        losses = contrast(z, z_near, z_far, self.tau)
        return self.mu * (losses * batch.weight).sum() / batch.weight.sum(), {}


def contrast(z: Tensor, near: Tensor, far: Tensor, tau: float | Tensor) -> Tensor:
    """The loss of each example (Li et al. 2021, Eq. 3)."""
    # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a)), which does not overflow.
    return F.softplus((cosine(z, far) - cosine(z, near)) / tau)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of each pair of rows; 0 where one of them is 0.

    >>> cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    tensor([0.6000, 0.0000])
    """
    # Bounded before the root, whose slope at 0 is infinite.
    square_a = (a * a).sum(1).clamp_min(SMALLEST_SQUARE)
    square_b = (b * b).sum(1).clamp_min(SMALLEST_SQUARE)
    return (a * b).sum(1) / (square_a.sqrt() * square_b.sqrt())


def features_of(out: Output) -> Tensor:
    """The input of the last linear layer; refused where there is none."""
    if out.features is None:
        raise InputError(
            "the network has no linear layer, and so no features in front of one; take a net that "
            "ends in a linear layer."
        )
    return out.features


def check_has_features(layout: Layout) -> None:
    """Refuse a network without a last linear layer, before anything is trained."""
    if layout.head_layer is None:
        raise UnfitError(
            "its features are the input of the last linear layer, and it has none. Take a net that "
            "ends in a linear layer."
        )


# ---- not-true distillation -----------------------------------------------------------------------


@dataclass(frozen=True)
class NotTrueDistillation(Objective):
    r"""FedNTD's term: what the received model says of the classes that an example is *not* of.

    .. math:: \beta\, \tau^2 \sum_{c \ne y} \tilde q^g_c \log
        \frac{\tilde q^g_c}{\tilde q^l_c}, \qquad
        \tilde q_c = \frac{e^{z_c / \tau}}{\sum_{c' \ne y} e^{z_{c'} / \tau}}

    (Lee et al. 2022.) :math:`z^l` -> ``out.logits``, :math:`z^g` -> the logits of
    ``carry[to]``. :math:`\tau^2` is the usual scale of distillation, as the authors' code has it;
    at the paper's :math:`\tau = 1` it is 1. Labels that a client does not have take no part, nor
    does a client whose targets are no classes.
    """

    is_loss: ClassVar[bool] = False
    beta: float = 1.0
    tau: float = 1.0
    to: str = field(default="model", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.beta >= 0, "beta", self.beta, "0 or more")
        check(self.tau > 0, "tau", self.tau, "above 0")

    def more_macs(self, net: Net, forward: int) -> int:
        """A pass of the teacher."""
        return forward

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
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
    """KL(teacher | student) of each example over the classes in ``own`` but its own one, y."""
    classes = torch.arange(student.shape[1], device=student.device)
    # (n, classes): one row per example, without its true class.
    counts = {"allowed": own & (classes != y.unsqueeze(1))}
    said = F.log_softmax(restrict_outputs(student / tau, counts), 1)
    wanted = F.log_softmax(restrict_outputs(teacher / tau, counts), 1)
    terms = wanted.exp() * (wanted - said)
    # Of a class that does not count, both are about as low as numbers get: their difference is
    # rounding, and its weight 0.
    return terms.masked_fill(~counts["allowed"], 0.0).sum(1)
