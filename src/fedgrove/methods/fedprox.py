r"""FedProx: FedAvg with a penalty that keeps clients close to the received model (Li et al.,
"Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(v; D_k) + mu/2 |v - w|^2 from w     -> Train(ProblemLoss + Proximal)
    w    = sum_k n_k w_k / sum_k n_k                              -> FedAvg

With mu = 0 this is FedAvg.

- Shared: the model; a pull keeps clients near it.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Give, Stage, Train
from ..parts.objective import Proximal
from ..parts.one_model import send_model
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """One model for all; a pull keeps clients near it while they train."""

    pull: Proximal = Proximal(mu=0.01)
    """The pull towards the model that was received."""

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the pull (Eq. 2) and send."""
        if verb == "train":
            return (Train(self.objective + self.pull, self.local), Give(send_model))
        return {"use": ()}[verb]
