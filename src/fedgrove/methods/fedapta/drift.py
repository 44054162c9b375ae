r"""FedDC's drift: what a device's own data keep pulling away is learnt, and kept on the device.

(Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction", CVPR 2022.) Round t, device i; M its mask, K its steps in a round, lr their rate::

    server -> device   w_t and G_t, the mean gradient of the group's devices, both under M
    device             c_i = G_t - g_i                                       -> correction
                       w_i = E epochs of min CE + alpha/2 |w + h_i - w_t|^2
                             + <w, c_i>                                      -> DriftCorrection
                       h_i = h_i + (w_i - w_t)                               -> drifted
                       g_i = -(c_i + (w_i - w_t) / (K lr))                   -> own_gradient
    device -> server   w_i + h_i and g_i
    server             w_{t+1} and G_{t+1}, the means of these

A device keeps h_i and g_i; both are 0 at first, and so is c_i. With plain SGD a step moves against
the gradient and c_i, so that g_i is what is left: the mean gradient of the device's own loss. It is
the rule of FedDC's code, and that of SCAFFOLD. The paper's text corrects by the updates alone,
without adding back the c_i in them: then a device whose correction was right has nothing to correct
in the next round, and errs in every second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ... import trees
from ...core import Batch, Carry
from ...errors import check
from ...parts.objective import Linear, Loss, Objective
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output

DRIFTS = ("none", "feddc", "server")
"""No drift; FedDC's; or its sum on the server alone, without its terms in the loss."""


@dataclass(frozen=True)
class DriftCorrection(Objective):
    r"""FedDC's two terms: :math:`\frac{\alpha}{2}\lVert w + h_i - w_t\rVert^2 + \langle w,
    c_i\rangle`.

    :math:`w` -> ``params``, :math:`h_i` -> ``carry["drift"]``, :math:`w_t`, the model as it was
    received -> ``carry["model"]``, :math:`c_i` -> ``carry["correction"]`` (:func:`correction`).
    """

    is_loss: ClassVar[bool] = False
    alpha: float = 0.1
    weighted: bool = False
    """Whether alpha and the group's gradient are divided by a device's weight, its examples over
    the mean of its group's, as in FedDC's code."""

    def __post_init__(self) -> None:
        check(self.alpha >= 0, "alpha", self.alpha, "0 or more")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The penalty and the gradient term."""
        drift = trees.pick(carry["drift"], params)
        received = trees.pick(carry["model"], params)
        away = trees.map(lambda w, h, t: w + h - t, params, drift, received)
        linear, _ = Linear("correction")(out, params, batch, carry)
        alpha = self.alpha / carry["settings"]["weight"]
        return 0.5 * alpha * trees.sq_norm(away) + linear, {}


def correction(own: Mapping[str, Tensor], group: Mapping[str, Tensor], weight: float = 1.0) -> Tree:
    r"""FedAPTA: FedDC's correction :math:`c_i = G_t / \omega_i - g_i`.

    :math:`g_i` -> ``own``, the device's gradient of its last round; :math:`G_t` -> ``group``, the
    mean of its group's; :math:`\omega_i` -> ``weight``, 1 but in FedDC's code.

    >>> import torch
    >>> own, group = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    >>> correction(own, group)
    {'w': tensor([-2.])}
    """
    return trees.map(lambda i, t: t / weight - i, own, group)


def own_gradient(
    update: Mapping[str, Tensor], along: Mapping[str, Tensor], steps: int, lr: float
) -> Tree:
    r"""FedAPTA: a device's own gradient after a round, :math:`g_i = -(c_i + \Delta_i / (K \eta))`.

    :math:`\Delta_i` -> ``update``, :math:`c_i` -> ``along``, the correction that was in it,
    :math:`K` -> ``steps``, :math:`\eta` -> ``lr``. (FedDC's code writes it :math:`g_i - G_t -
    \Delta_i / (K \eta)`.)

    >>> import torch
    >>> update, along = {"w": torch.tensor([-2.0])}, {"w": torch.tensor([-2.0])}
    >>> own_gradient(update, along, steps=4, lr=0.5)
    {'w': tensor([3.])}
    """
    return trees.map(lambda moved, c: -(c + moved / (steps * lr)), update, along)


def drifted(
    drift: Mapping[str, Tensor], trained: Mapping[str, Tensor], received: Mapping[str, Tensor]
) -> Tree:
    r"""FedAPTA: FedDC's drift after a round, :math:`h_i \leftarrow h_i + (w_i - w_t)`.

    >>> import torch
    >>> h, w, t = ({"w": torch.tensor([x])} for x in (1.0, 5.0, 3.0))
    >>> drifted(h, w, t)
    {'w': tensor([3.])}
    """
    return trees.map(lambda h, w, t: h + (w - t), drift, trained, received)
