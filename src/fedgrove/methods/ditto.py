r"""Ditto: a personal model next to the global one (Li et al., "Ditto: Fair and Robust Federated
Learning Through Personalization", ICML 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; w global, v_k personal::

    w_k  = E epochs of min CE(w; D_k) from w                       -> Train(ProblemLoss)
    v_k  = E epochs of min CE(v; D_k) + mu/2 |v - w|^2 from v_k    -> Train(ProblemLoss + Proximal)
    w    = sum_k n_k w_k / sum_k n_k                               -> FedAvg

The paper's lambda is our ``mu``. A client uses v_k; before it has one, w. Only w_k is sent, and w
is FedAvg's model.

- Shared: the model.
- A client uses: a personal model, pulled towards the shared one.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the shared model is averaged; the personal one is kept on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Carry, Client, Edit, Give, Outcome, Packet, Stage, Train
from ..parts.objective import Proximal
from ..parts.personal import use_personal
from .fedavg import FedAvg


@dataclass(frozen=True)
class Ditto(FedAvg):
    """A global model, and a personal one that is pulled towards it."""

    pull: Proximal = Proximal(mu=0.1)
    """The pull of the personal model towards the global one; ``mu`` is the paper's lambda."""

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the global model, then the personal one; send the first, keep the second."""
        if verb == "train":
            return (
                # First, so that old and new clients have equal sets of trees, and train at once.
                Edit(begin_personal),
                Train(self.objective, self.local),
                # `pull` is towards carry["model"], the global model as it was received.
                Train(self.objective + self.pull, self.local, start="personal", end="personal"),
                Give(send_and_keep),
            )
        return {"use": (Edit(use_personal),)}[verb]


def begin_personal(carry: Carry, client: Client) -> Carry:
    """Ditto: a client's first personal model starts at the global one."""
    return {"personal": carry["model"], **carry}


def send_and_keep(carry: Carry, client: Client) -> Outcome:
    """Ditto: send the global model, keep the personal one."""
    return Outcome({"model": Packet(carry["local"])}, memory={"personal": carry["personal"]})
