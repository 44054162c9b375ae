r"""FedLC: logits are calibrated by how often a client has each class (Zhang, Li, Li, Xu, Wu, Ding &
Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; client k has n_kc examples of class c::

    n_kc = counted on the client, and never sent                       -> LabelCounts
    w_k  = E epochs of min CE(z_c - tau n_kc^(-1/4); D_k) from w       -> Train(LogitCalibration)
    w    = sum_k n_k w_k / sum_k n_k                                   -> FedAvg

With tau = 0 this is FedAvg.

- Shared: the model; clients train with logits calibrated by their labels.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged; label counts stay on the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core import Batch, Batches, Carry, Give, Measure, Setup, Stage, Train
from ..errors import check
from ..parts.label_counts import LabelCounts
from ..parts.objective import NOT_SETTABLE, Loss, Objective
from ..parts.one_model import OneModel, initial_model, send_model
from ..problems import check_has_classes
from ..trees import Tree
from .fedavg import FedAvg

if TYPE_CHECKING:
    from ..nets import Output

LEAST_COUNT = 1e-8
"""The count of a class without examples: its logit falls by 100 tau, which is out of sight."""


@dataclass(frozen=True)
class LogitCalibration(Objective):
    r"""FedLC's loss: logits of rare classes are lowered while a client trains, so that it must
    raise them.

    .. math:: -\log \frac{e^{z_y - \tau n_y^{-1/4}}}{\sum_c e^{z_c - \tau n_c^{-1/4}}}

    (Zhang et al. 2022.) :math:`z` -> ``out.logits``, :math:`n_c` -> the client's examples of
    class c, ``carry[labels]["counts"]``, which :class:`LabelCounts` makes. It takes the place of
    ``ProblemLoss``, and equals it to the bit at :math:`\tau = 0`. A class without examples is
    taken for one of ``LEAST_COUNT``. Outputs that are no classes stay as they are.

    Differs from the paper: its sum leaves out :math:`c = y`, which is no cross-entropy and falls
    below 0; published implementations keep it.
    """

    only_in: ClassVar[str] = "fedlc"
    targets: ClassVar[tuple[str, ...] | None] = ()
    tau: float = 1.0
    labels: str = field(default="labels", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.tau >= 0, "tau", self.tau, "0 or more")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean over the examples that are not padding."""
        labels = carry[self.labels]
        lowered = out.logits - self.tau * margins(labels["counts"], labels["is_class"])
        losses = out.net.problem.losses(lowered, batch.y, carry.get("client", {}))
        return (losses * batch.weight).sum() / batch.weight.sum(), {}


def margins(counts: Tensor, is_class: Tensor) -> Tensor:
    r"""FedLC: how much the logit of each class is lowered: :math:`n_c^{-1/4}`, or 0.

    Outputs that are no class of the client get 0.

    >>> margins(torch.tensor([16.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    tensor([  0.5000, 100.0000,   0.0000])
    """
    # Bounded first: 0 to a negative power is infinite.
    rare = counts.clamp_min(LEAST_COUNT) ** -0.25
    return torch.where(is_class > 0, rare, torch.zeros_like(rare))


@dataclass(frozen=True, kw_only=True)
class FedLC(FedAvg):
    """One model for all; clients train with logits calibrated by how often they have a class."""

    objective: LogitCalibration = LogitCalibration()
    """It replaces the usual loss."""

    def init(self, setup: Setup) -> OneModel:
        """Start at the network's initial parameters; the targets must be classes."""
        check_has_classes(setup.net.problem)
        return initial_model(setup, self.server)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Count the labels, train with calibrated logits and send."""
        if verb == "train":
            return (
                Measure(self.objective.labels, LabelCounts(), Batches("train")),
                Train(self.objective, self.local),
                Give(send_model),
            )
        return {"use": ()}[verb]
