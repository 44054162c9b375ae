r"""FedAdagrad: the server takes the mean update as a gradient for Adagrad (Reddi, Charles, Zaheer,
Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021, Alg. 2).

Round :math:`t`, cohort :math:`S_t`; m is 0 and v is tau^2 at first::

    w_k  = E epochs of min CE(w; D_k) from w         -> Train(ProblemLoss)
    d    = sum_k n_k w_k / sum_k n_k - w             -> WeightedMean
    m    = b1 m + (1 - b1) d
    v    = v + d^2                                   -> ServerAdagrad
    w    = w + step m / (sqrt(v) + tau)              -> step_server

With ``server=none`` this is FedAvg.

- Shared: the model.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged; the server's optimiser needs the mean alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..parts.server import ServerAdagrad, ServerOptimiser
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedAvg):
    """One model for all, which the server moves with Adagrad."""

    server: ServerOptimiser | None = ServerAdagrad()
    """What the server makes of the mean update."""
