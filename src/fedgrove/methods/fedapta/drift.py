"""FedDC's drift: what a device's own data keep pulling away is learnt, and kept on the device.

(Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction", CVPR 2022.) A device has a drift :math:`h_i`, 0 at first. It trains with
:class:`DriftCorrection` next to its loss, then :math:`h_i \\leftarrow h_i + (w_i - w)`
(:func:`drifted`), and the server averages :math:`w_i + h_i`. Where a device lacks a weight all of
these are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ... import trees
from ...core import Batch, Carry
from ...errors import check
from ...parts.objective import Loss, Objective
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output


@dataclass(frozen=True)
class DriftCorrection(Objective):
    r"""FedDC's two terms: :math:`\frac{\alpha}{2}\lVert w + h_i - w_t\rVert^2 + \langle w,
    c_i\rangle`.

    :math:`w` -> ``params``, :math:`h_i` -> ``carry["drift"]``, :math:`w_t`, the model as it was
    received -> ``carry["model"]``, :math:`c_i` -> ``carry["correction"]`` (:func:`correction`).
    """

    is_loss: ClassVar[bool] = False
    alpha: float = 0.1

    def __post_init__(self) -> None:
        check(self.alpha >= 0, "alpha", self.alpha, "0 or more")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The penalty and the gradient term."""
        drift = trees.pick(carry["drift"], params)
        received = trees.pick(carry["model"], params)
        along = trees.pick(carry["correction"], params)
        away = trees.map(lambda w, h, t: w + h - t, params, drift, received)
        linear = torch.stack([(w * along[name]).sum() for name, w in params.items()]).sum()
        return 0.5 * self.alpha * trees.sq_norm(away) + linear, {}


def correction(
    own: Mapping[str, Tensor], groups: Mapping[str, Tensor], steps: int, lr: float
) -> Tree:
    r"""FedAPTA: FedDC's correction :math:`c_i = (\Delta_i - \Delta_t) / (K \eta)`.

    The updates are those of the round before.

    :math:`\Delta_i` -> ``own``, the device's; :math:`\Delta_t` -> ``groups``, the mean of its
    group's; :math:`K` -> ``steps`` of the device in a round, :math:`\eta` -> ``lr``. With plain SGD
    this is the group's mean gradient minus the device's.

    >>> own, groups = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    >>> correction(own, groups, steps=4, lr=0.5)
    {'w': tensor([1.])}
    """
    return trees.map(lambda i, t: (i - t) / (steps * lr), own, groups)


def drifted(
    drift: Mapping[str, Tensor], trained: Mapping[str, Tensor], received: Mapping[str, Tensor]
) -> Tree:
    r"""FedAPTA: FedDC's drift after a round, :math:`h_i \leftarrow h_i + (w_i - w_t)`.

    >>> h, w, t = ({"w": torch.tensor([x])} for x in (1.0, 5.0, 3.0))
    >>> drifted(h, w, t)
    {'w': tensor([3.])}
    """
    return trees.map(lambda h, w, t: h + (w - t), drift, trained, received)
