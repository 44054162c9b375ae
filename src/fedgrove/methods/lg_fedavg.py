r"""LG-FedAvg: the first layers stay on the client, the last ones are averaged (Liang et al., "Think
Locally, Act Globally: Federated Learning with Local and Global Representations", 2020, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; u the first layers, v the last ``shared`` layers::

    (u_k, v_k)  = E epochs of min CE from (u_k, v)    -> complete, Train, share_received
    v           = sum_k n_k v_k / sum_k n_k           -> FedAvg

If all layers are shared this is FedAvg.

- Shared: the last ``shared`` layers.
- A client uses: the shared layers on its own first layers.
- Bytes in the paper: 8 d_shared M T.
- Secure aggregation: yes; the last layers are averaged; the others stay on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Edit, Give, Setup, Stage, Train
from ..errors import UnfitError, check, spell_option
from ..nets import Net
from ..parts.one_model import OneModel, dense_bytes, initial_model
from ..parts.personal import complete, share_received
from ..trees import pick
from .fedavg import FedAvg


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """The client's own features under a head that all share."""

    shared: int = 2
    """Number of shared layers: the last layers with parameters."""

    def __post_init__(self) -> None:
        check(self.shared >= 1, "shared", self.shared, "1 or more layers")

    def init(self, setup: Setup) -> OneModel:
        """The last layers are shared."""
        layers = setup.layout.trained_layers
        if len(layers) < self.shared:
            raise UnfitError(
                f"the last {self.shared} layers are shared, and it has {len(layers)} with "
                f"parameters. Share fewer ({spell_option('set', f'shared={len(layers)}')}), or "
                "use a deeper net."
            )
        shared = pick(setup.params, setup.layout.last(self.shared))
        return initial_model(setup, self.server, shared)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Put the client's own layers under the shared ones, train all, send the shared ones."""
        if verb == "train":
            return (Edit(complete), Train(self.objective, self.local), Give(share_received))
        return {"use": (Edit(complete),)}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The parameters of the shared layers."""
        # `last` names buffers too, which the papers do not count.
        shared = set(net.layout.last(self.shared)) & set(net.layout.params)
        return dense_bytes(net.layout.count(shared), cohort, rounds)
