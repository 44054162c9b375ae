r"""MOON: features are pulled to the shared model's, away from the client's own (Li, He & Song,
"Model-Contrastive Federated Learning", CVPR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; p_k is what client k trained last::

    w_k  = E epochs of min CE(v; D_k) + mu l_con(v; w, p_k) from w     -> Train(ModelContrast)
    p_k  = w_k, which the client keeps                                 -> send_and_keep
    w    = sum_k n_k w_k / sum_k n_k                                   -> FedAvg

A client that trains for the first time has p_k = w: the term is then constant. With mu = 0 this is
FedAvg.

- Shared: the model; features are kept close to the shared model's and away from the client's
  previous ones.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged; the last local one stays on the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import Batch, Carry, Client, Edit, Give, Outcome, Packet, Setup, Stage, Train
from ..errors import InputError, UnfitError, check
from ..nets.layout import Layout
from ..parts.objective import NOT_SETTABLE, Loss, Objective
from ..parts.one_model import OneModel, initial_model
from ..trees import Tree
from .fedavg import FedAvg

if TYPE_CHECKING:
    from ..nets import Net, Output

SMALLEST_SQUARE = 1e-16
"""Features shorter than the root of this count as this long: all of them may be 0 after a ReLU."""


@dataclass(frozen=True)
class ModelContrast(Objective):
    r"""MOON's term: features near the shared model's, away from those of the client's last model.

    .. math:: \mu\, \ell_{con} = -\mu \log \frac{e^{s(z, z_{glob}) / \tau}}
        {e^{s(z, z_{glob}) / \tau} + e^{s(z, z_{prev}) / \tau}}

    (Li, He & Song 2021, Eq. 3, and the weight of Eq. 4.) :math:`s` is the cosine; :math:`z` ->
    ``out.features``, the input of the last linear layer; :math:`z_{glob}` -> the features of
    ``carry[to]``, :math:`z_{prev}` -> of ``carry[away]``. Where both are the same model it is
    :math:`\mu \log 2`, whatever the features.

    The other two models run in eval mode, in the width of the network that is trained, and without
    a gradient.
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
        """MOON: the multiply-accumulates of passes of the other two models."""
        return 2 * forward

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean over the examples that are not padding."""
        z = features_of(out)
        with torch.no_grad():
            z_near = features_of(out.net(carry[self.to], batch.x, train=False))
            z_far = features_of(out.net(carry[self.away], batch.x, train=False))
        losses = contrast(z, z_near, z_far, self.tau)
        return self.mu * (losses * batch.weight).sum() / batch.weight.sum(), {}


def contrast(z: Tensor, near: Tensor, far: Tensor, tau: float | Tensor) -> Tensor:
    """MOON: the contrastive loss of each example (Li et al. 2021, Eq. 3)."""
    # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a)), which does not overflow.
    return F.softplus((cosine(z, far) - cosine(z, near)) / tau)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """MOON: the cosine of each pair of features; 0 if one of them is 0.

    >>> cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    tensor([0.6000, 0.0000])
    """
    # Bounded before the root, whose slope at 0 is infinite.
    square_a = (a * a).sum(1).clamp_min(SMALLEST_SQUARE)
    square_b = (b * b).sum(1).clamp_min(SMALLEST_SQUARE)
    return (a * b).sum(1) / (square_a.sqrt() * square_b.sqrt())


def features_of(out: Output) -> Tensor:
    """MOON: the input of the last linear layer; a network without one is refused."""
    if out.features is None:
        raise InputError(
            "the network has no linear layer, and so no features before one; use a net that ends "
            "in a linear layer."
        )
    return out.features


def check_has_features(layout: Layout) -> None:
    """MOON: refuse a network without a last linear layer, before anything is trained."""
    if layout.head_layer is None:
        raise UnfitError(
            "its features are the input of the last linear layer, and it has none. Use a net that "
            "ends in a linear layer."
        )


@dataclass(frozen=True)
class MOON(FedAvg):
    """One model for all; its features are contrasted with those a client had before."""

    contrast: ModelContrast = ModelContrast()
    """The contrastive term; ``mu`` is its weight, ``tau`` its temperature."""

    def init(self, setup: Setup) -> OneModel:
        """Start at the network's initial parameters."""
        check_has_features(setup.layout)
        return initial_model(setup, self.server)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Alg. 1, PartyLocalTraining: train against the last model, send, and keep the new one."""
        if verb == "train":
            return (
                # First, so that old and new clients have equal sets of trees, and train at once.
                Edit(begin_previous),
                Train(self.objective + self.contrast, self.local),
                Give(send_and_keep),
            )
        return {"use": ()}[verb]


def begin_previous(carry: Carry, client: Client) -> Carry:
    """MOON: a client that never trained takes the model it got for its last one."""
    return {"previous": carry["model"], **carry}


def send_and_keep(carry: Carry, client: Client) -> Outcome:
    """MOON: send what was trained, and keep it to be contrasted with."""
    return Outcome({"model": Packet(carry["local"])}, memory={"previous": carry["local"]})
