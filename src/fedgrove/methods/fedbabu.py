r"""FedBABU: the body is trained under a random head, which clients tune in the end (Oh, Kim & Yun,
"FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; b the body, h the last ``head`` layers as they started::

    b_k  = E epochs of min CE((b, h); D_k) over b alone, from b        -> Train(frozen="fixed")
    b    = sum_k n_k b_k / sum_k n_k                                   -> FedAvg
    h_k  = ``tune`` epochs of min CE((b, h); D_k) over h alone         -> Train(frozen="received")

The head is drawn from the seed on both sides and is never sent. A client uses (b, h_k), tuned again
whenever it is scored; ``tune=0`` is the paper's shared model before personalisation. With no head
(``head=0``) this is FedAvg.

- Shared: the body; the head stays random.
- A client uses: the shared body, with a head that it tunes on its own data.
- Bytes in the paper: 8 (d − d_head) M T.
- Secure aggregation: yes; the body is averaged; the head stays on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Edit, Give, Setup, Stage, Train
from ..errors import check
from ..nets import Net
from ..parts.local import for_epochs
from ..parts.one_model import OneModel, dense_bytes, initial_model
from ..parts.personal import complete_from_start, count_body, send_received, start_body
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """A body that all train, under a head that stays random until a client tunes it for itself."""

    head: int = 1
    """Number of layers in the head: the last layers with parameters."""
    tune: int = 1
    """Epochs for which a client tunes the head before it uses the model; 0: the head stays
    random."""

    def __post_init__(self) -> None:
        check(self.head >= 0, "head", self.head, "0 or more layers")
        check(self.tune >= 0, "tune", self.tune, "0 or more epochs")

    def init(self, setup: Setup) -> OneModel:
        """Alg. 1, "initialize": the server has the body; both sides draw the head."""
        return initial_model(setup, self.server, start_body(setup, self.head))

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the body under the head and send it; to use the model, tune the head first."""
        whole = Edit(complete_from_start)
        if verb == "train":
            # The head takes part in the forward pass, but stays as both sides drew it.
            body = Train(self.objective, self.local, frozen="fixed")
            return (whole, body, Give(send_received))
        return {"use": (whole, *self._tuning())}[verb]

    def _tuning(self) -> tuple[Stage, ...]:
        """The training of the head, if there is a head and it is tuned."""
        if not (self.head and self.tune):
            return ()
        recipe = for_epochs(self.local, self.tune)
        # The other way round: what was received, the body, stays, and the head is trained.
        return (Train(self.objective, recipe, "model", "model", frozen="received"),)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The parameters of the body."""
        return dense_bytes(count_body(net.layout, self.head), cohort, rounds)
