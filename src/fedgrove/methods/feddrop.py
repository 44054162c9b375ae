r"""FedDrop of Wen et al.: every client trains random channels, new ones every round.

(Wen, Jeon & Huang, "Federated Dropout - A Simple Approach for Enabling Federated Learning on
Resource Constrained Devices", IEEE WCL 2022. That of Caldas et al. is ``caldas-dropout``.)

Round :math:`t`, cohort :math:`S_t`, client k has a share :math:`s_k` of every layer's channels::

    M_k  = s_k C channels of every layer, drawn for this round and client    -> select_random
    w_k  = E epochs of min CE(w; D_k) from w M_k                             -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                              -> HeteroFL

A client uses the whole model. With a share of 1 for all this is FedAvg. Differs from the paper:
channels of convolutions are dropped too, not units of linear layers alone; every parameter is
averaged over the clients that have it; and as HeteroFL's docs page describes.

- Shared: the model; each client trains random channels, new ones every round, as many as fit on its
  device.
- A client uses: the shared model.
- Bytes in the paper: as ``heterofl``.
- Secure aggregation: yes; as heterofl, with random channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..channels.selection import select_random
from ..channels.submodel import extract_submodel, groups_from_plain
from ..core import Packet, Task
from ..parts.one_model import deliver_model
from ..seeds import torch_rng
from .heterofl import HeteroFL, State


@dataclass(frozen=True)
class FedDrop(HeteroFL):
    """One model of which every client trains channels drawn at random, anew in every round."""

    draw: int = 0
    """Seed of the random channels, together with round and client; they do not depend on the run's
    seed."""

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the whole model."""
        # A draw is of one round's training; no client has channels to keep for use.
        return deliver_model(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client its own draw."""
        groups = groups_from_plain(state.structure)
        tasks = []
        for k in cohort:
            # From names, not from a state of a generator: a resumed run draws what it would have.
            generator = torch_rng(self.draw, state.round, k, "channels")
            channels = select_random(groups, state.shares[k], generator)
            tasks.append(Task(k, {"model": extract_submodel(state.model, groups, channels)}))
        return tasks
