r"""FedRep: clients train their own head, then the shared body under it (Collins, Hassani, Mokhtari,
Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Alg. 1).

Round :math:`t`, cohort :math:`S_t`; b the body, h_k the last ``head`` layers of client k::

    h_k  = ``head_epochs`` epochs of min CE((b, h); D_k) over h alone, from h_k
                                                            -> Train(frozen="received")
    b_k  = E epochs of min CE((b, h_k); D_k) over b alone, from b   -> Train(frozen="head")
    b    = sum_k n_k b_k / sum_k n_k                                -> FedAvg

A client that has not trained yet uses the initial h. With no head (``head=0``) this is FedAvg.

- Shared: all but the last ``head`` layers.
- A client uses: the shared body under its own head.
- Bytes in the paper: 8 (d − d_head) M T.
- Secure aggregation: yes; the body is averaged; the head stays on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Carry, Client, Edit, Give, Stage, Train
from ..errors import check
from ..parts.local import for_epochs
from ..parts.personal import complete, share_received
from .fedper import FedPer


@dataclass(frozen=True)
class FedRep(FedPer):
    """A body that all train, each client under a head that it has trained first."""

    head_epochs: int = 10
    """Epochs for which a client trains its head in a round; then it trains the body for the epochs
    of the recipe. 0: the heads stay random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.head_epochs >= 0, "head_epochs", self.head_epochs, "0 or more epochs")

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the head under the fixed body, then the body under the fixed head; send it."""
        if verb != "train" or not self.head:
            return super().work(verb)
        stages: list[Stage] = [Edit(complete), Edit(name_head)]
        body_from = "model"
        if self.head_epochs:
            recipe = for_epochs(self.local, self.head_epochs)
            # What was received, the body, stays.
            stages.append(Train(self.objective, recipe, frozen="received"))
            body_from = "local"
        stages.append(Train(self.objective, self.local, body_from, "local", frozen="head"))
        return (*stages, Give(share_received))


def name_head(carry: Carry, client: Client) -> Carry:
    """FedRep: ``carry["head"]`` names what is not trained with the body."""
    head = {}
    for name, value in carry["model"].items():
        if name not in carry["received"]:
            head[name] = value
    return {**carry, "head": head}
