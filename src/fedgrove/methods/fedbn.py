r"""FedBN: normalisation stays on the client (Li et al., "FedBN: Federated Learning on Non-IID
Features via Local Batch Normalization", ICLR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; u the norm layers' parameters and statistics, v the rest::

    (u_k, v_k)  = E epochs of min CE from (u_k, v)    -> complete, Train, share_received
    v           = sum_k n_k v_k / sum_k n_k           -> FedAvg

A client that has not trained yet uses the initial u. On a network without norm layers this is
FedAvg.

- Shared: all layers except the norm layers.
- A client uses: the shared layers with its own norm layers.
- Bytes in the paper: 8 (d − d_norm) M T.
- Secure aggregation: yes; all layers except the norm layers are averaged; norm layers and their
  statistics are kept on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Edit, Give, Setup, Stage, Train
from ..nets import Net
from ..parts.one_model import OneModel, dense_bytes, initial_model
from ..parts.personal import complete, share_received
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedBN(FedAvg):
    """One model for all, except its norm layers, which every client keeps to itself."""

    def init(self, setup: Setup) -> OneModel:
        """All but the norm layers is shared."""
        norms = setup.layout.norms
        shared = {name: v for name, v in setup.params.items() if name not in norms}
        return initial_model(setup, self.server, shared)

    def notes(self, net: Net) -> list[str]:
        """FedBN: say that nothing stays on the client if the network has no norm layers."""
        if net.layout.norms:
            return []
        return ["the net has no norm layers, so that fedbn shares all of it: this is fedavg"]

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Put the client's own norms in, train all, send all but the norms."""
        if verb == "train":
            return (Edit(complete), Train(self.objective, self.local), Give(share_received))
        return {"use": (Edit(complete),)}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The parameters outside the norm layers."""
        shared = set(net.layout.params) - set(net.layout.norms)
        return dense_bytes(net.layout.count(shared), cohort, rounds)
