r"""FedPer: the base layers are averaged, the last ones are a client's own (Arivazhagan, Aggarwal,
Singh, Choudhary, "Federated Learning with Personalization Layers", 2019, Alg. 1 and 2).

Round :math:`t`, cohort :math:`S_t`; b the body, h_k the last ``head`` layers of client k::

    (b_k, h_k)  = E epochs of min CE from (b, h_k)    -> complete, Train, share_received
    b           = sum_k n_k b_k / sum_k n_k           -> FedAvg

A client that has not trained yet uses the initial h. With no head (``head=0``) this is FedAvg.

- Shared: all but the last ``head`` layers.
- A client uses: the shared body under its own head.
- Bytes in the paper: 8 (d − d_head) M T.
- Secure aggregation: yes; the body is averaged; the head stays on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Edit, Give, Setup, Stage, Train
from ..errors import check
from ..nets import Net
from ..parts.one_model import OneModel, dense_bytes, initial_model
from ..parts.personal import complete, count_body, share_received, start_body
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedPer(FedAvg):
    """A body that all train, under heads that every client keeps to itself."""

    head: int = 1
    """Number of layers in the head: the last layers with parameters."""

    def __post_init__(self) -> None:
        check(self.head >= 0, "head", self.head, "0 or more layers")

    def init(self, setup: Setup) -> OneModel:
        """Alg. 2, "initialize": the server has the body."""
        return initial_model(setup, self.server, start_body(setup, self.head))

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Put the client's own head on, train all, send the body."""
        if verb == "train":
            return (Edit(complete), Train(self.objective, self.local), Give(share_received))
        return {"use": (Edit(complete),)}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The parameters of the body."""
        return dense_bytes(count_body(net.layout, self.head), cohort, rounds)
