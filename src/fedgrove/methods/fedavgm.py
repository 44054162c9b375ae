r"""FedAvgM: FedAvg with momentum on the server (Hsu, Qi, Brown, "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification", 2019).

Round :math:`t`, cohort :math:`S_t`; v is 0 at first::

    w_k  = E epochs of min CE(w; D_k) from w         -> Train(ProblemLoss)
    d    = sum_k n_k w_k / sum_k n_k - w             -> WeightedMean
    v    = beta v + d                                -> ServerSGD
    w    = w + step v                                -> step_server

Without momentum and with step 1 this is FedAvg.

- Shared: the model.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged; the server's momentum needs the mean alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..parts.server import ServerOptimiser, ServerSGD
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    """One model for all, which the server moves with momentum."""

    server: ServerOptimiser | None = ServerSGD(momentum=0.9)
    """What the server makes of the mean update."""
