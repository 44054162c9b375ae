r"""FedDrop of Wen et al.: every client trains random channels, new ones every round.

(Wen, Jeon & Huang, "Federated Dropout - A Simple Approach for Enabling Federated Learning on
Resource Constrained Devices", IEEE WCL 2022. That of Caldas et al. is ``caldas-dropout``.)

Round :math:`t`, cohort :math:`S_t`, client k has a share :math:`s_k` of every layer's channels::

    M_k  = s_k C channels of every layer, drawn for this round and client    -> select_random
    w_k  = E epochs of min CE from w M_k, what is left divided by s_k        -> scaled_weights
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                              -> HeteroFL

A client uses the whole model. With a share of 1 for all this is FedAvg. Differs from the paper:
channels of convolutions are dropped too, not units of linear layers alone, and are rescaled as
these are; every parameter is averaged over the clients that have it.

- Shared: the model; each client trains random channels, new ones every round, limited to what
  fits on its device.
- A client uses: the shared model.
- Bytes in the paper: as ``heterofl``.
- Secure aggregation: yes; as heterofl, with random channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..channels.groups import ChannelGroup, Channels
from ..channels.selection import select_random
from ..seeds import torch_rng
from .heterofl import HeteroFL, State


@dataclass(frozen=True)
class FedDrop(HeteroFL):
    """One model of which every client trains channels drawn at random, anew in every round."""

    # The paper rescales what is left, as dropout does; the rest is HeteroFL's.
    masked: bool = False
    static: bool = False
    draw: int = 0
    """Seed of the random channels, together with round and client; they do not depend on the run's
    seed."""

    # A draw is of one round's training; no client has channels to keep for use.
    uses_whole: ClassVar[bool] = True

    def part(self, state: State, client: int, groups: Sequence[ChannelGroup]) -> Channels:
        """The client's own draw."""
        # From names, not from a state of a generator: a resumed run draws what it would have.
        generator = torch_rng(self.draw, state.round, client, "channels")
        return select_random(groups, self.width_of(state, client), generator)
